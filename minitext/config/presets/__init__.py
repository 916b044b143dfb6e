"""The presets: YAML files of differences from the defaults."""
