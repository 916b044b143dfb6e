"""What can be set: typed sections, presets, overrides, and where every value came from.

Touches no device. May import only the ground: errors, files, terminal, hardware.

Chapters: 6.
"""

from minitext import exports

__getattr__, __dir__ = exports(
    __name__, Config="config", ConfigError="config", load_config="config", flatten="config",
    to_yaml="config", ModelConfig="model", DataConfig="data", MeshConfig="sections",
    OptimConfig="sections", TrainConfig="sections",
)  # fmt: skip
