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
    # BEGIN SOLUTION
    own = dict.fromkeys((name for _, name, _, _ in events), 0)
    # by lane, events still open: (end, name), innermost last
    opened = defaultdict(list)
    busy, until = 0, window[0]
    # The outer event starts earlier, or at the same time and ends later.
    for lane, name, start, end in sorted(events, key=lambda e: (e[2], -e[3])):
        stack = opened[lane]
        while stack and stack[-1][0] <= start:
            stack.pop()
        within = max(0, min(end, window[1]) - max(start, window[0]))
        own[name] += within
        if stack:
            own[stack[-1][1]] -= within
        stack.append((end, name))
        busy += max(0, min(end, window[1]) - max(start, until))
        until = max(until, end)
    return own, 1 - busy / (window[1] - window[0])
    # END SOLUTION


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
    # BEGIN SOLUTION
    D, F, N = model.embed, model.mlp, model.heads
    K, H = model.kv_heads or N, model.head_dim or D // N
    per_layer = D * N * H + 2 * D * K * H + N * H * D + 3 * D * F
    # Looking up a row isn't a product. The output layer is one, with tied
    # embeddings too.
    weights = model.layers * per_layer + model.vocab * D
    # Each query meets half of the keys on average, in two products.
    attention = model.layers * 4 * N * H * seq_len / 2
    # Forward once, backward twice as much. The model doesn't need what remat
    # computes again.
    flops = 3 * rows * seq_len * (2 * weights + attention)
    return flops / (seconds * chips * peaks[model.dtype])
    # END SOLUTION


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
    # BEGIN SOLUTION
    records, job, began_at = [], 0, {}
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        job += record["event"] == "job_start"
        records.append((record["start"], job, record))
        if record["event"] == "step":
            began_at.setdefault(job, record["step"])
    records.sort(key=lambda r: r[0])
    spent = defaultdict(float)
    spent |= dict.fromkeys(("step", "lost", "idle", "other"), 0.0)
    begun = until = records[0][0]
    for start, job, record in records:
        kind = record["event"]
        if start > until:
            spent["idle" if kind == "job_start" else "other"] += start - until
            until = start
        # A later job began at this step or before it.
        if kind == "step" and any(
            j > job and s <= record["step"] for j, s in began_at.items()
        ):
            kind = "lost"
        # If two events claim the same moment, the earlier one gets it.
        end = max(until, start + record["seconds"])
        spent[kind] += end - until
        until = end
    return {kind: seconds / (until - begun) for kind, seconds in spent.items()}
    # END SOLUTION


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
    # BEGIN SOLUTION
    devices = {e[0] for e in events} - {None}
    waits = {e[2]: 0.0 for e in events if e[1] != "compute"} | {"idle": 0.0}
    edges = sorted({e[3] for e in events} | {e[4] for e in events})
    for device in devices:
        mine = [e for e in events if e[0] in (device, None)]
        # Between two neighbouring edges nothing starts or ends.
        for start, end in pairwise(edges):
            running = [e for e in mine if e[3] <= start and e[4] >= end]
            if any(kind == "compute" for _, kind, _, _, _ in running):
                continue
            # Without the waits that end earlier, the device would have waited
            # just as long.
            blamed = max(running, key=lambda e: e[4], default=None)
            name = blamed[2] if blamed else "idle"
            waits[name] += (end - start) / len(devices)
    return max(waits, key=lambda name: waits[name]), waits
    # END SOLUTION
