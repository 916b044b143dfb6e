import hashlib
import json
import math
from pathlib import Path

import numpy as np


# EXERCISE 08.crash_safe_save
def save_step(disk, step, files):
    """Save a step: a crash at any moment leaves it whole, or the step before.

    Args:
      disk: a disk with the methods of the statement: mkdir, write, fsync,
        rename, delete, list.
      step: Python int, larger than every step on the disk.
      files: dict from file names to bytes.
    """
    # YOUR CODE HERE
    raise NotImplementedError("08.crash_safe_save")


# EXERCISE 08.reshard
def read_piece(saved, read, want, dtype):
    """Build one device's piece of an array from the pieces that others saved.

    Args:
      saved: list of the saved pieces' regions in the whole array; a region is a
        tuple with one (start, stop) for each dimension. Two regions are equal
        or have no element in common.
      read: function of an index into `saved` -> NumPy array, that whole piece.
      want: the region of the piece to build, a tuple like those in `saved`.
      dtype: NumPy dtype of the array.

    Returns:
      NumPy array with the shape of `want` and the dtype.

    Raises:
      ValueError: an element of `want` is in no saved piece.
    """
    # YOUR CODE HERE
    raise NotImplementedError("08.reshard")


# EXERCISE 08.retention
def names_to_delete(names, saved, keep, keep_every=None):
    """Choose which checkpoints to delete after a save.

    Args:
      names: list of the names in the checkpoint folder, in any order.
      saved: the step that was just saved, an int; its name is among them.
      keep: how many of the newest steps to keep, an int of at least 1.
      keep_every: keep the multiples of this as well; None keeps no others.

    Returns:
      List of names, the oldest step first.
    """
    # YOUR CODE HERE
    raise NotImplementedError("08.retention")


# EXERCISE 08.find_damaged
def newest_whole(folder):
    """Find the newest checkpoint whose files are all as written.

    Args:
      folder: `pathlib.Path` of a folder with a folder for each step, as in the
        statement.

    Returns:
      (step, damaged): the number of the newest undamaged step, or None; and a
      list of the damaged steps that are newer, newest first.
    """
    # YOUR CODE HERE
    raise NotImplementedError("08.find_damaged")


# EXERCISE 08.interval
def best_save_every(stall, step_seconds, devices, hours_per_device):
    """Return the number of steps between saves that wastes the least time.

    Args:
      stall: seconds that a save stalls the loop, 0 or more.
      step_seconds: seconds of a step.
      devices: how many devices the job uses; it fails when any of them does.
      hours_per_device: mean time between failures of one device, in hours.

    Returns:
      Python int of at least 1.
    """
    # YOUR CODE HERE
    raise NotImplementedError("08.interval")
