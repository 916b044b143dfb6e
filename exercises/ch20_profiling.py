import json
from collections import defaultdict
from itertools import pairwise


# EXERCISE 20.read_trace
def read_trace(events, window):
    """Divide a trace's time among its names, and find the idle share.

    Args:
      events: list of (lane, name, start, end), in any order; start and end are
        int nanoseconds. Two events of one lane are either nested or don't
        overlap, and never have the same start and end. Different lanes run at
        the same time.
      window: (start, end) in nanoseconds; only time inside it counts.

    Returns:
      (own, idle): a dict from each name in `events` to its own time in
      nanoseconds, an int, which excludes what ran inside it on the same lane;
      and the share of the window, a float, in which no lane had an event.
    """
    # YOUR CODE HERE
    raise NotImplementedError("20.read_trace")


# EXERCISE 20.mfu
def mfu(model, rows, seq_len, seconds, peaks, chips):
    """Compute the model FLOPs utilisation of a training step.

    Args:
      model: has `vocab`, `layers`, `embed`, `heads`, `kv_heads` (None: as many
        as heads), `head_dim` (None: embed / heads), `mlp`, `tie_embeddings`,
        `remat` and `dtype`, as minitext's configuration has them. The
        feed-forward layer is gated: three matrices.
      rows: rows in the batch of a step, over all chips.
      seq_len: tokens in a row.
      seconds: the time of a step.
      peaks: FLOP/s of one chip for each dtype of a product's inputs, such as
        {"bfloat16": 2e14}.
      chips: how many chips run the step.

    Returns:
      MFU, a float: the FLOPs that the model needs divided by those that the
        chips could have done.
    """
    # YOUR CODE HERE
    raise NotImplementedError("20.mfu")


# EXERCISE 20.goodput
def goodput(lines):
    """Divide the time of a run that was killed and resumed, from its ledger.

    Args:
      lines: list of str in the order in which they were written, each a JSON
        object with `event`, such as "job_start", "compile", "data_wait", "step"
        or "save"; `start`, when it began; `seconds`, how long it took; and for
        a step its number `step`. A job's first line is its "job_start". Some
        lines may be torn and aren't valid JSON.

    Returns:
      dict from each event that occurs, and from "step", "lost", "idle" and
      "other", to its share of the time from the first start to the last end;
      the shares are floats that sum to 1.
    """
    # YOUR CODE HERE
    raise NotImplementedError("20.goodput")


# EXERCISE 20.find_stall
def find_stall(events):
    """Find what the devices waited for, and which wait cost most.

    Args:
      events: list of (device, kind, name, start, end), in any order; start and
        end are int nanoseconds. Kinds are "compute", "collective" and "data".
        The device of a data wait is None: it belongs to the host and concerns
        all devices. Events of one device may overlap.

    Returns:
      (worst, waits): the name that cost most; and a dict from the name of each
      collective and data wait, and from "idle", to the nanoseconds it cost, a
      float, the mean over devices.
    """
    # YOUR CODE HERE
    raise NotImplementedError("20.find_stall")
