"""Files that an artefact carries, as they are: they import JAX and NumPy, and nothing of minitext."""
