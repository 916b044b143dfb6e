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
    # BEGIN SOLUTION
    old = [name for name in disk.list("") if name.isdigit()]
    for name in disk.list(""):
        if name.endswith(".tmp"):  # what a killed save left
            disk.delete(name)
    draft = f"{step}.tmp"
    disk.mkdir(draft)
    for name, data in files.items():
        disk.write(f"{draft}/{name}", data)
        disk.fsync(f"{draft}/{name}")
    disk.fsync(draft)
    # All content is on the disk. The rename commits; the next line flushes it.
    disk.rename(draft, str(step))
    disk.fsync("")
    for name in old:
        disk.delete(name)
    # END SOLUTION


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
    # BEGIN SOLUTION
    shape = tuple(stop - start for start, stop in want)
    piece, missing, seen = np.empty(shape, dtype), math.prod(shape), set()

    def within(overlap, whole):
        """The overlap's slices, counted from the corner of a whole region."""
        pairs = zip(overlap, whole, strict=True)
        return tuple(slice(a - c, b - c) for (a, b), (c, _) in pairs)

    for index, region in enumerate(saved):
        pairs = zip(region, want, strict=True)
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in pairs]
        if region in seen or any(start >= stop for start, stop in both):
            continue
        seen.add(region)
        piece[within(both, want)] = read(index)[within(both, region)]
        missing -= math.prod(b - a for a, b in both)
    if missing:
        raise ValueError(f"{missing} elements of {want} are in no saved piece")
    return piece
    # END SOLUTION


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
    # BEGIN SOLUTION
    steps = sorted(int(name) for name in names if name.isdigit())
    return [
        str(step)
        for step in steps[:-keep]
        if step != saved and (keep_every is None or step % keep_every)
    ]
    # END SOLUTION


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
    # BEGIN SOLUTION
    folder = Path(folder)

    def sha256(content):
        return hashlib.sha256(content).hexdigest()

    def is_whole(path):
        try:
            text = (path / "manifest.json").read_text(encoding="utf-8")
            manifest = json.loads(text)
            files = manifest["files"]
            if manifest["sha256"] != sha256(json.dumps(files).encode()):
                return False
            for name, digest in files.items():
                if sha256((path / name).read_bytes()) != digest:
                    return False
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False  # a file can't be read, or the manifest isn't one
        return True

    names = [path.name for path in folder.iterdir()]
    steps = sorted(int(name) for name in names if name.isdigit())
    damaged = []
    for step in reversed(steps):
        if is_whole(folder / str(step)):
            return step, damaged
        damaged.append(step)
    return None, damaged
    # END SOLUTION


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
    # BEGIN SOLUTION
    seconds_between_failures = 3600 * hours_per_device / devices

    def waste(steps):
        work = steps * step_seconds
        return stall / work + work / (2 * seconds_between_failures)

    best = math.sqrt(2 * stall * seconds_between_failures) / step_seconds
    below = max(1, math.floor(best))
    return min((below, below + 1), key=waste)
    # END SOLUTION
