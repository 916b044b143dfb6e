import re
from pathlib import Path

import jax
import numpy as np


# EXERCISE 21.process_rows
def global_rows(read, sharding, shape):
    """Make a global array of which this process reads only its own rows.

    Args:
      read: function of a list of row numbers, increasing, -> NumPy [len(rows),
        T]. It reads data.
      sharding: `jax.sharding.NamedSharding` of the array; its mesh has devices
        of every process.
      shape: (B, T), two Python ints.

    Returns:
      jax.Array [B, T] with the sharding and the dtype of what was read.
    """
    # YOUR CODE HERE
    raise NotImplementedError("21.process_rows")


# EXERCISE 21.find_coordinator
def find_job(env):
    """Decide from the environment how this process starts.

    Args:
      env: dict of environment variables, str -> str.

    Returns:
      (address, processes, index): the coordinator's "host:port", how many
      processes there are, and which one this is; or None if the process is
      alone.

    Raises:
      ValueError: naming the variable that is missing or whose value is wrong.
    """
    # YOUR CODE HERE
    raise NotImplementedError("21.find_coordinator")


# EXERCISE 21.deadlock
def run_job(job, steps, save_every):
    """Train, save and stop without waiting for a process that never comes.

    Args:
      job: this process's part of the job, with the members of the statement.
      steps: how many steps to take, an int of at least 1, the same in every
        process.
      save_every: steps from one save to the next, the same in every process.

    Returns:
      (losses, state): the list of the sums of all steps taken, and what
      `job.read` returns for the last of them.
    """
    # YOUR CODE HERE
    raise NotImplementedError("21.deadlock")


# EXERCISE 21.elastic
def resume(folder, wanted, index, count, batch):
    """Go on from a checkpoint that a different number of processes wrote.

    Args:
      folder: `pathlib.Path` with a folder for each step, as in the statement.
      wanted: dict from the name of each array to (start, stop), the rows that
        this process holds from now on.
      index: which of the new processes this is.
      count: how many there are now.
      batch: rows in a batch over all processes, a multiple of `count`.

    Returns:
      (step, state, batches): the step of the checkpoint; a dict from each name
      to the NumPy array of the rows wanted; and an endless iterator with, for
      each batch from here on, the list of the rows that this process reads.

    Raises:
      FileNotFoundError: no step is whole.
    """
    # YOUR CODE HERE
    raise NotImplementedError("21.elastic")


# EXERCISE 21.account
def bill(attempts, faults):
    """Give every second under faults its cause, and each fault its bill.

    Args:
      attempts: list of dicts, one for each start of the job, in order: `start`,
        `first`, `end`, `resumed` and `steps`, as in the statement.
      faults: list of dicts in the order of their times: `at`, and either
        `noticed` or `over`; the other is None.

    Returns:
      (seconds, bills): a dict of the seconds of "start-up", "step", "slow",
      "lost", "detect", "restart" and "end", which sum to the wall time; and for
      each fault a tuple (seconds that it cost, steps that were repeated because
      of it).
    """
    # YOUR CODE HERE
    raise NotImplementedError("21.account")
