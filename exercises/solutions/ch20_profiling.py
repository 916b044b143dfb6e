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
    # BEGIN SOLUTION
    own = dict.fromkeys((name for _, name, _, _ in events), 0)
    opened = defaultdict(list)  # by lane, what may still run: (end, name), the innermost last
    busy, until = 0, window[0]
    # The outer of two starts earlier, or together with the inner one and ends later.
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
    # BEGIN SOLUTION
    D, F, N = model.embed, model.mlp, model.heads
    K, H = model.kv_heads or N, model.head_dim or D // N
    per_layer = D * N * H + 2 * D * K * H + N * H * D + 3 * D * F
    # Looking a row up is no product; the output layer is one, of its own or of the same matrix.
    weights = model.layers * per_layer + model.vocab * D
    # Two products of a query with each key, and half of the keys on average.
    attention = model.layers * 4 * N * H * seq_len / 2
    # Forward once, backward twice that. What remat computes again is not the model's need.
    flops = 3 * rows * seq_len * (2 * weights + attention)
    return flops / (seconds * chips * peaks[model.dtype])
    # END SOLUTION


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
    spent = defaultdict(float, {"step": 0.0, "lost": 0.0, "idle": 0.0, "other": 0.0})
    begun = until = records[0][0]
    for start, job, record in records:
        kind = record["event"]
        if start > until:
            spent["idle" if kind == "job_start" else "other"] += start - until
            until = start
        # A later job that began at this step or before it went on from less.
        if kind == "step" and any(j > job and s <= record["step"] for j, s in began_at.items()):
            kind = "lost"
        # Of a moment that two events claim, the later one gets nothing.
        end = max(until, start + record["seconds"])
        spent[kind] += end - until
        until = end
    return {kind: seconds / (until - begun) for kind, seconds in spent.items()}
    # END SOLUTION


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
    # BEGIN SOLUTION
    devices = {e[0] for e in events} - {None}
    waits = dict.fromkeys((e[2] for e in events if e[1] != "compute"), 0.0) | {"idle": 0.0}
    edges = sorted({e[3] for e in events} | {e[4] for e in events})
    for device in devices:
        mine = [e for e in events if e[0] in (device, None)]
        # Between two neighbouring edges nothing starts or ends.
        for start, end in pairwise(edges):
            running = [e for e in mine if e[3] <= start and e[4] >= end]
            if any(kind == "compute" for _, kind, _, _, _ in running):
                continue
            # Whatever ends earlier would not have ended the wait.
            blamed = max(running, key=lambda e: e[4], default=None)
            waits[blamed[2] if blamed else "idle"] += (end - start) / len(devices)
    return max(waits, key=lambda name: waits[name]), waits
    # END SOLUTION
