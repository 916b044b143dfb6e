import json
from collections import defaultdict
from itertools import pairwise


# EXERCISE 20.read_trace
def read_trace(events, window):
    """Say where the time of a trace went, by name, and which share of it nothing ran.

    Args:
      events: list of (lane, name, start, end), in any order; start and end are int nanoseconds.
        Of two events of one lane, one lies inside the other or they do not overlap; no two have
        equal times. Different lanes run at the same time.
      window: (start, end) in nanoseconds; only what lies inside it counts.

    Returns:
      (own, idle): a dict that gives for each name in `events` the nanoseconds of its own, an int,
      without what ran inside it on the same lane; and the share of the window, a float, in which
      no lane had an event.
    """
    # YOUR CODE HERE
    raise NotImplementedError("20.read_trace")


# EXERCISE 20.mfu
def mfu(model, rows, seq_len, seconds, peaks, chips):
    """Compute the model FLOP utilisation of a training step.

    Args:
      model: has `vocab`, `layers`, `embed`, `heads`, `kv_heads` (None: as many as heads),
        `head_dim` (None: embed / heads), `mlp`, `tie_embeddings`, `remat` and `dtype`, as
        minitext's configuration has them. The feed-forward layer is gated: three matrices.
      rows: rows in the batch of a step, over all chips.
      seq_len: tokens in a row.
      seconds: what a step takes.
      peaks: FLOP/s of one chip by the dtype of a product's inputs, such as {"bfloat16": 2e14}.
      chips: how many chips run the step.

    Returns:
      MFU, a float: FLOPs that the model needs over those that the chips could have done.
    """
    # YOUR CODE HERE
    raise NotImplementedError("20.mfu")


# EXERCISE 20.goodput
def goodput(lines):
    """Divide the time of a run that was killed and resumed, from its ledger.

    Args:
      lines: list of str in the order in which they were written, a JSON object each: `event`, such
        as "job_start", "compile", "data_wait", "step" or "save"; `start`, when it began, and
        `seconds`, how long it took; and for a step its number `step`. A job's first line is its
        "job_start". Torn lines, which are no JSON, occur.

    Returns:
      dict of the shares of the time from the first start to the last end, floats that sum to 1: of
      each event that occurs, and of "step", "lost", "idle" and "other".
    """
    # YOUR CODE HERE
    raise NotImplementedError("20.goodput")


# EXERCISE 20.find_stall
def find_stall(events):
    """Say what the devices waited for, and which wait cost most.

    Args:
      events: list of (device, kind, name, start, end), in any order; start and end are int
        nanoseconds. Kinds are "compute", "collective" and "data". The device of a data wait is
        None: it is the host's, and concerns all devices. Events of one device may overlap.

    Returns:
      (worst, waits): a dict of floats that gives for each name of a collective or data wait, and
      for "idle", the nanoseconds it cost, the mean over devices; and the name that cost most.
    """
    # YOUR CODE HERE
    raise NotImplementedError("20.find_stall")
