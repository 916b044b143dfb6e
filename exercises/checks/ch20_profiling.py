import json
import math
from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace

import numpy as np

from minitext.book.grading import Exercise

# ---------------------------------------------------------------------------------- read_trace

read_trace = Exercise(
    "20.read_trace",
    title="Read a trace",
    function="read_trace",
    minutes=30,
    points=10,
    statement="""
Write `read_trace(events, window)`. It returns how much of a trace's time went to each name, and the share of the window
in which nothing ran.

- An event's *own* time is its duration minus that of the events directly inside it on the same lane. A name's own time
  is the sum over all its events. An event may contain another of the same name.
- A lane is one line of a trace, such as a thread. Lanes run at the same time. The window is idle when *no* lane has an
  event.
- Only time inside the window counts: events may begin before it and end after it. A name that has no time inside the
  window is still in the result, with 0.
- Events come in any order. An event that starts where another ends isn't inside it, and an event can have no duration.
""",
    hints=(
        "Sort by start; if two start together, put the longer one first. Which events are open when the next one "
        "starts?",
        "Keep a stack for each lane. Before you push an event, pop those that have ended. The top of the stack is then "
        "the event around this one: subtract the duration from that event and from no other.",
        "For the busy time, walk all lanes together in order of starts and remember the largest end so far: an event "
        "adds only the part of it after that end.",
    ),
)

NAMES = ("fusion.1", "dot.2", "while.3", "call", "all-reduce.4", "copy")


def nest(t, lane, start, end, depth):
    """Random events of one lane inside [start, end): any two nested or apart, no two the same."""
    events, at = [], start
    while at < end:
        first = at + int(t.rng.integers(0, 12))
        last = first + int(t.rng.integers(1, max(2, (end - start) // 2)))
        if last > end or (first, last) == (start, end):
            break
        events.append((lane, str(t.rng.choice(NAMES)), first, last))
        if depth and last - first > 4:
            events += nest(t, lane, first, last, depth - 1)
        at = last
    return events


def counted(events, window):
    """The right answer, nanosecond by nanosecond: the shortest event that is open owns it."""
    own = dict.fromkeys((name for _, name, _, _ in events), 0)
    busy = np.zeros(window[1] - window[0], bool)
    for lane in {e[0] for e in events}:
        mine = [e for e in events if e[0] == lane]
        for ns in range(*window):
            at = [e for e in mine if e[2] <= ns < e[3]]
            if at:
                own[min(at, key=lambda e: e[3] - e[2])[1]] += 1
                busy[ns - window[0]] = True
    return own, 1 - float(busy.mean())


def reads(fn, t, events, window, why, shuffled=True):
    order = t.rng.permutation(len(events)) if shuffled else range(len(events))
    own, idle = fn([events[i] for i in order], window)
    want, want_idle = counted(events, window)
    # One list for both, so that a mistake in either is seen whole.
    got = [own.get(name, -1) for name in sorted(want)] if isinstance(own, dict) else own
    told = ""
    if isinstance(own, dict):
        missing = [name for name in want if name not in own]
        t.true(
            not missing,
            f"no entry for {missing}, want one for each name; yours are {list(own)}: {why}",
            got,
        )
        if not all(isinstance(n, (int, float)) for n in got):
            told = "; not all of them are numbers"
        elif any(n < 0 for n in got):
            told = "; a time is negative: something was subtracted that isn't inside that event"
            if any(e[3] <= window[0] or e[2] >= window[1] for e in events):
                told += ", or an event outside the window has a negative length there"
        elif (more := sum(got) - sum(want.values())) != 0:
            much = "many: some are counted twice or outside the window" if more > 0 else "few"
            told = f"; together they are {abs(more):g} ns too {much}"
        else:
            told = "; together they are right, but some time is under the wrong name"
    right = [want[name] for name in sorted(want)]
    w0, w1 = window
    only = counted([e for e in events if w0 <= e[2] and e[3] <= w1], window)[0]
    several = {
        "Times are in nanoseconds; yours are in microseconds": [ns / 1000 for ns in right],
        "You return shares of the window, want nanoseconds": [ns / (w1 - w0) for ns in right],
        "You return shares of the busy time, want nanoseconds": [ns / sum(right) for ns in right],
        "You leave out events that aren't all inside the window; the part inside counts": [
            only.get(name, 0) for name in sorted(want)
        ],
    }
    t.equal(got, right, why=f"own time of {sorted(want)}{told}: {why}", mistakes=several)
    told = "idle share, the part of the window in which no lane has an event"
    if isinstance(idle, (int, float)) and abs(1 - idle - want_idle) < 1e-9:
        told += "; yours is the busy share"
    length = window[1] - window[0]
    ns = {"You return nanoseconds: divide by the window's length": want_idle * length}
    ns["You return the busy nanoseconds"] = (1 - want_idle) * length
    spans = sorted((max(e[2], w0), e[3], e[0]) for e in events)
    ns["You also count busy time after the window's end"] = 1 - covered(spans, w0) / length
    ns["You add up the lanes; when two of them are busy at once, the time counts once"] = (
        1 - sum(want.values()) / length
    )
    ns["You add up all durations; what overlaps counts once"] = right_read(
        events, window, busy="sum"
    )[1]
    ns["You measure from the first event to the last; use the given window"] = right_read(
        events, window, given=False
    )[1]
    t.close(idle, want_idle, rtol=0, atol=1e-9, why=f"{told}: {why}", mistakes=ns)


@read_trace.check("one after the other on one lane")
def _(fn, t):
    a, b, c = (int(n) for n in t.rng.integers(5, 30, size=3))
    events = [
        ("x", "dot.2", 0, a),
        ("x", "copy", a, a + b),
        ("x", "dot.2", a + b + 7, a + b + c + 7),
    ]
    reads(
        fn,
        t,
        events,
        (0, a + b + c + 20),
        "three events one after the other, two of one name, in any order in the list",
    )


@read_trace.check("nested, three deep")
def _(fn, t):
    a, b, c = (int(n) for n in t.rng.integers(3, 9, size=3))
    end = 2 * (a + b + c) + 10
    events = [
        ("x", "while.3", 0, end),
        ("x", "call", a, end - a),
        ("x", "dot.2", a + b, end - a - b),
        ("x", "fusion.1", end - a - 2, end - a),
    ]
    reads(
        fn,
        t,
        events,
        (0, end + 5),
        "a loop, a call directly in it, and two products directly in the call",
    )


@read_trace.check("two that start together, and one that starts where another ends")
def _(fn, t):
    why = "dot.2 starts together with the loop around it; copy, all-reduce.4 and fusion.1 start where another ends"
    # Listed after the loop, and then before it.
    for n, step in zip(
        map(int, t.rng.choice(range(5, 15), 2, replace=False)), (1, -1), strict=True
    ):
        events = [
            ("x", "while.3", 0, 3 * n),
            ("x", "dot.2", 0, n),
            ("x", "copy", n, 2 * n),
            ("x", "fusion.1", 3 * n, 4 * n + 1),
            ("x", "all-reduce.4", 2 * n, 3 * n),
        ]
        reads(fn, t, events[::step], (0, 5 * n), why, shuffled=False)


@read_trace.check("a name inside itself, and events of no duration")
def _(fn, t):
    n = int(t.rng.integers(8, 15))
    events = [
        ("x", "call", 0, 3 * n),
        ("x", "call", 2, n),
        ("x", "copy", n, n),
        ("x", "dot.2", n + 1, 2 * n),
    ]
    reads(fn, t, events, (0, 4 * n), "a call that calls itself, and a copy of no duration")


@read_trace.check("lanes that run at the same time")
def _(fn, t):
    n = int(t.rng.integers(6, 20))
    events = [
        ("x", "while.3", 0, 4 * n),
        ("x", "dot.2", 3, n),
        ("y", "fusion.1", n - 2, 2 * n),
        ("y", "copy", n + 1, n + 3),
        ("z", "all-reduce.4", 5 * n, 6 * n),
    ]
    reads(
        fn,
        t,
        events,
        (0, 7 * n),
        "lane x has a product in a loop, lane y a copy in a fusion, lane z one event",
    )


@read_trace.check("a window that cuts events off")
def _(fn, t):
    n = int(t.rng.integers(9, 20))
    events = [
        ("x", "while.3", 0, 3 * n),
        ("x", "dot.2", 2, 2 * n),
        ("y", "copy", 4 * n, 6 * n),
        ("y", "fusion.1", 7 * n, 8 * n),
    ]
    why = f"the window from {n} to {5 * n} cuts off the start of a loop and of a product in it, and the end of a copy"
    reads(fn, t, events, (n, 5 * n), why)


@read_trace.check("random traces")
def _(fn, t):
    for depth in (1, 2, 3):
        lanes = int(t.rng.integers(1, 4))
        events = [e for i in range(lanes) for e in nest(t, f"lane {i}", 10, 260, depth)]
        reads(fn, t, events, (40, 300), f"{len(events)} events on {lanes} lanes")


def right_read(
    events, window, *, own_lane=True, inner="direct", clip=True, touch=False, total=True,
    busy="union", by_end=True, given=True, ordered=True,
):  # fmt: skip
    w0, w1 = window
    if not given:
        w0, w1 = min(e[2] for e in events), max(e[3] for e in events)
    own = dict.fromkeys((name for _, name, _, _ in events), 0)
    opened = defaultdict(list)
    order = sorted(events, key=lambda e: (e[2], -e[3]) if by_end else (e[2], e[3]))
    order = order if ordered else events
    for lane, name, start, end in order:
        stack = opened[lane if own_lane else ""]
        while stack and (stack[-1][0] < start or (not touch and stack[-1][0] == start)):
            stack.pop()
        within = max(0, min(end, w1) - max(start, w0)) if clip else end - start
        own[name] = own[name] + within if total else within
        if inner != "none":
            for _, outer in stack if inner == "all" else stack[-1:]:
                own[outer] -= within
        stack.append((end, name))
    return own, 1 - busy_time(events, (w0, w1), busy) / (w1 - w0)


def busy_time(events, window, how):
    inside = sorted((max(e[2], window[0]), min(e[3], window[1]), e[0]) for e in events)
    lanes = sorted({lane for *_, lane in inside})
    if how == "mean":
        parts = [[e for e in inside if e[2] == lane] for lane in lanes]
        return sum(covered(part, window[0]) for part in parts) / len(lanes)
    if how == "sum":
        return sum(max(0, end - start) for start, end, _ in inside)
    return covered(inside, window[0], forgets=how == "forgets")


def covered(inside, until, forgets=False):
    busy = 0
    for start, end, _ in inside:
        busy += max(0, end - max(start, until))
        until = end if forgets else max(until, end)
    return busy


@read_trace.mutant(
    "You count an event's whole duration, so whatever runs inside a loop is counted twice, under its own name and "
    "under the loop's. Subtract inner events from the event around them."
)
def whole_durations(events, window):
    return right_read(events, window, inner="none")


@read_trace.mutant(
    "You subtract an event's duration from every event open around it. The loop has already lost the whole call, "
    "including what runs in it: subtract from the innermost open event only."
)
def off_all_around(events, window):
    return right_read(events, window, inner="all")


@read_trace.mutant(
    "You nest events of different lanes. Lanes run at the same time: keep a stack for each."
)
def one_stack(events, window):
    return right_read(events, window, own_lane=False)


@read_trace.mutant(
    "When two events start together you push the shorter one first, as if the longer one were inside it. Sort by "
    "(start, -end)."
)
def shorter_first(events, window):
    return right_read(events, window, by_end=False)


@read_trace.mutant(
    "When two events start together you leave them in the order of the list. The longer one is around the other: sort "
    "by (start, -end)."
)
def together_as_listed(events, window):
    return right_read(sorted(events, key=lambda e: e[2]), window, ordered=False)


@read_trace.mutant(
    "Names without time inside the window are missing from your result. Each name in `events` has an entry, if only 0."
)
def leaves_out_zeros(events, window):
    own, idle = right_read(events, window)
    return {name: ns for name, ns in own.items() if ns}, idle


@read_trace.mutant(
    "You subtract the whole of an inner event, also what is outside the window. Clip it before you subtract it."
)
def whole_inner_ones(events, window):
    own, idle = right_read(events, window)
    whole, cut = (
        right_read(events, window, clip=False)[0],
        right_read(events, window, inner="none")[0],
    )
    durations = right_read(events, window, clip=False, inner="none")[0]
    return {name: cut[name] - durations[name] + whole[name] for name in own}, idle


@read_trace.mutant(
    "You close at most one event before you open the next. Several may have ended by then: close all that have."
)
def closes_one(events, window):
    own, opened = right_read(events, window, inner="none")[0], defaultdict(list)
    for lane, name, start, end in sorted(events, key=lambda e: (e[2], -e[3])):
        if opened[lane] and opened[lane][-1][0] <= start:
            opened[lane].pop()
        if opened[lane]:
            own[opened[lane][-1][1]] -= max(0, min(end, window[1]) - max(start, window[0]))
        opened[lane].append((end, name))
    return own, right_read(events, window)[1]


@read_trace.mutant(
    "You sort events by lane or name before their start. An event is inside one that is open at its start, so go "
    "through a lane's events in order of starts."
)
def sorted_by_name(events, window):
    return right_read(sorted(events), window, ordered=False)


@read_trace.mutant(
    "An event that is wholly outside the window has a negative length after you cut it. It counts 0."
)
def negative_outside(events, window):
    own, idle = right_read(events, window)
    for _, name, start, end in events:
        own[name] += min(0, min(end, window[1]) - max(start, window[0]))
    return own, idle


@read_trace.mutant(
    "You treat an event that starts where another ends as if it were inside it. Pop events that end at or before the "
    "start."
)
def touching_is_inside(events, window):
    return right_read(events, window, touch=True)


@read_trace.mutant(
    "You take events in the order of the list. They come in any order: sort them by start."
)
def as_listed(events, window):
    return right_read(events, window, ordered=False)


@read_trace.mutant("A name that occurs again overwrites what you had. Add up all its events.")
def overwritten(events, window):
    return right_read(events, window, total=False, inner="direct")


@read_trace.mutant(
    "Your own times include time outside the window. Clip each event to the window at both ends."
)
def not_cut(events, window):
    return right_read(events, window, clip=False)


@read_trace.mutant(
    "Your busy time is the sum of durations, which counts nested events and simultaneous lanes twice. Take the union."
)
def busy_is_a_sum(events, window):
    return right_read(events, window, busy="sum")


@read_trace.mutant(
    "You go through the lanes one after another with one stack. What the last lane left open isn't around the events "
    "of the next: begin each lane with an empty stack."
)
def stack_of_the_lane_before(events, window):
    own, opened = dict.fromkeys((e[1] for e in events), 0), []
    for _, name, start, stop in sorted(events, key=lambda e: (e[0], e[2], -e[3])):
        while opened and opened[-1][0] <= start:
            opened.pop()
        within = max(0, min(stop, window[1]) - max(start, window[0]))
        own[name] += within
        if opened:
            own[opened[-1][1]] -= within
        opened.append((stop, name))
    return own, right_read(events, window)[1]


@read_trace.mutant(
    "You subtract what runs on other lanes at the same time. Only an event of the same lane is inside another."
)
def inside_on_any_lane(events, window):
    own, idle = right_read(events, window)
    for lane, _, start, stop in events:
        for other in events:
            around = [
                e for e in events if e[0] == other[0] != lane and e[2] <= start and stop <= e[3]
            ]
            smallest = min(around, key=lambda e: e[3] - e[2], default=None)
            if other is smallest:
                own[other[1]] -= max(0, min(stop, window[1]) - max(start, window[0]))
    return own, idle


@read_trace.mutant(
    "A name may be on several lanes, and you keep the time of one of them. Add up all its events."
)
def one_lane_of_each_name(events, window):
    own, lanes = {}, sorted({e[0] for e in events})
    for lane in lanes:
        own |= right_read([e for e in events if e[0] == lane], window)[0]
    return own, right_read(events, window)[1]


@read_trace.mutant(
    "You take the mean of the lanes' idle shares. A single thread that rarely works would then make any program look "
    "idle: the window is idle only when no lane has an event."
)
def mean_over_lanes(events, window):
    return right_read(events, window, busy="mean")


@read_trace.mutant(
    "Your union forgets how far a long event reached: after a short event inside it, you continue from the short one's "
    "end. Keep the largest end so far."
)
def forgets_the_outer(events, window):
    return right_read(events, window, busy="forgets")


@read_trace.mutant(
    "You measure from the first event to the last. Use the given window, which may begin or end with nothing running."
)
def own_window(events, window):
    return right_read(events, window, given=False)


# ----------------------------------------------------------------------------------------- mfu

mfu = Exercise(
    "20.mfu",
    title="MFU, from the configuration",
    function="mfu",
    minutes=25,
    points=10,
    statement="""
Write `mfu(model, rows, seq_len, seconds, peaks, chips)`, which returns the share of the chips' peak that a training
step used.

$$
\\text{MFU} = \\frac{\\text{FLOPs that the model needs for a step}}
{\\text{seconds} \\times \\text{chips} \\times \\text{peak FLOP/s of one chip}}
$$

- Multiplying a token by a matrix of P weights takes 2P FLOPs. Count the matrices of attention, of a *gated*
  feed-forward layer and of the output layer. Don't count norms, rotations, the softmax or the embedding lookup.
- Count attention's two products, queries with keys and scores with values, for the causal half: a token sees
  `seq_len / 2` keys.
- The backward pass takes twice the FLOPs of the forward pass. Leave out what `model.remat` computes again: the
  hardware does that work, but the model doesn't need it.
- Use the peak for `model.dtype`. Tied embeddings change memory, not FLOPs.
- A result above 1 is impossible, so it shows that the seconds or the peak are wrong. Return it unchanged.
""",
    hints=(
        "Count for one token first: the weights of one layer times the number of layers, plus the output layer once. "
        "Then add attention's two products.",
        "Queries and the output projection have D N H weights each, keys and values D K H each, and the gated layer "
        "has three matrices of D F. A query costs 2 N H for each key, and scores times values cost as much again.",
        "FLOPs of a step are 3 * rows * seq_len * (2 * weights + layers * 4 * N * H * seq_len / 2), with weights = "
        "layers * (2 D N H + 2 D K H + 3 D F) + V D.",
    ),
)


def drawn_model(t, **changes):
    N = int(t.rng.choice([4, 6, 12]))
    drawn = {
        "vocab": int(t.rng.integers(300, 3000)),
        "layers": int(t.rng.integers(2, 9)),
        "embed": N * int(t.rng.integers(8, 40)),
        "heads": N,
        "kv_heads": None,
        "head_dim": None,
        "mlp": int(t.rng.integers(100, 900)),
        "tie_embeddings": False,
        "remat": "none",
        "dtype": "bfloat16",
    }
    return SimpleNamespace(**drawn | changes)


PEAKS = {"float32": 1.3e13, "bfloat16": 1.1e14, "int8": 2.7e14}


def right_mfu(
    m, rows, seq_len, seconds, peaks, chips, *, attention=0.5, passes=3.0, multiply_add=2, groups=True,
    matrices=3, output=True, lookup=False, dtype=None, all_chips=True, width=True, both=2, few_scores=False,
):  # fmt: skip
    D, N = m.embed, m.heads
    K = (m.kv_heads or N) if groups else N
    H = (m.head_dim or D // N) if width else D // N
    weights = m.layers * (2 * D * N * H + 2 * D * K * H + matrices * D * m.mlp)
    weights += (output + lookup * (not m.tie_embeddings)) * m.vocab * D
    keys = m.layers * both * multiply_add * (K if few_scores else N) * H * seq_len * attention
    flops = passes * rows * seq_len * (multiply_add * weights + keys)
    return flops / (seconds * (chips if all_chips else 1) * peaks[dtype or m.dtype])


def parts_of(m, seq_len):
    """FLOPs of a token, forward and backward: each half of attention's matrices, the layers' rest, output, scores."""
    D, N = m.embed, m.heads
    K, H = m.kv_heads or N, m.head_dim or D // N
    L = 6 * m.layers
    return (
        L * 2 * D * N * H,
        L * 2 * D * K * H,
        L * 3 * D * m.mlp,
        6 * m.vocab * D,
        L * N * H * seq_len,
    )


def miscounts(m, seq_len):
    """What a wrong count of a token's FLOPs has, for each mistake."""
    wide, narrow, gated, output, scores = parts_of(m, seq_len)
    whole = wide + narrow + gated + output + scores
    share = m.embed / m.heads / (m.head_dim or m.embed / m.heads)
    keys = ": keys and values have one each" if narrow < wide else ""
    return (
        (f"You count three of attention's four matrices{keys}", whole - narrow / 2),
        ("You count three of attention's four matrices: the output projection has one too", whole - wide / 2),
        ("Attention's four matrices are missing: queries, keys, values, output projection", whole - wide - narrow),
        ("You leave the feed-forward layer out", whole - gated),
        ("You count one of the gated layer's three matrices", whole - 2 * gated / 3),
        ("Every layer counts: multiply by `layers`", (whole - output) / m.layers + output),
        ("The output layer comes once; looking up the embedding is no product", whole + output),
        ("The output layer comes once, not in every layer", whole + (m.layers - 1) * output),
        ("`kv_heads` is None where there are as many as heads, not one", whole - narrow * (1 - 1 / m.heads)),
        ("A token meets half of a row's keys; you multiply by seq_len once more", whole + scores * (seq_len - 1)),
        ("A token meets half of a row's T keys; you count T times T", whole + scores * (2 * seq_len - 1)),
        ("Attention's two products come in every layer", whole - scores + scores / m.layers),
        ("Attention's two products have a backward pass as well, twice the forward one", whole - 2 * scores / 3),
        ("The output layer has a backward pass as well, twice the forward one", whole - 2 * output / 3),
        ("You count one FLOP for each weight; a multiplication and an addition are two", whole / 2 + scores / 2),
        ("You count twice as many FLOPs as a step has: a weight takes 2", 2 * whole - scores),
        ("Attention's two products have H numbers for each head, which needn't be D / N", whole - scores * (1 - share)),
        ("Queries and output projection have D N H weights, which needn't be D D", whole - wide * (1 - share)),
        ("Keys and values have D K H weights; H needn't be D / N", whole - narrow * (1 - share)),
        ("The backward pass takes twice the FLOPs of the forward pass, not three times", 4 * whole / 3),
    )  # fmt: skip


def measures(fn, t, model, rows, seq_len, why, chips=1, rtol=1e-6, seconds=None):
    seconds = seconds or float(t.rng.uniform(0.05, 20))
    peaks = {dtype: peak * float(t.rng.uniform(0.9, 1.1)) for dtype, peak in PEAKS.items()}
    args = rows, seq_len, seconds, peaks, chips
    got = fn(model, *args)
    # Relative to the right one: what is off by a factor shows the same factor in every draw.
    told = {
        "You count the rows, and each has seq_len tokens": 1 / seq_len,
        "You count the tokens of one row": 1 / rows,
        "You multiply by the seconds": seconds**2,
        "You don't divide by the seconds": seconds,
        "You don't divide by the chips": chips,
        "You return FLOP/s: divide by the peak of all chips": peaks[model.dtype] * chips,
        "You return FLOPs: divide by the seconds and by the peak of all chips": seconds
        * peaks[model.dtype]
        * chips,
        "You multiply by the chips": chips**2,
        "You return per cent": 100.0,
    }
    right = right_mfu(model, *args)
    told |= {
        f"You divide by the peak of {dtype}, and the model computes in {model.dtype}": peaks[
            model.dtype
        ]
        / peak
        for dtype, peak in peaks.items()
    }
    told |= {
        text: flops / sum(parts_of(model, seq_len)) for text, flops in miscounts(model, seq_len)
    }
    t.close(got / right, 1.0, rtol=rtol, why=f"over the right one: {why}", mistakes=told)


@mfu.check("weights, within 1%: rows of 8 tokens")
def _(fn, t):
    model = drawn_model(t, vocab=4000, embed=240, heads=4, mlp=700, layers=2)
    measures(fn, t, model, 16, 8, "short rows", rtol=1e-2)


@mfu.check("attention, with long rows")
def _(fn, t):
    measures(fn, t, drawn_model(t, layers=4, mlp=200), 2, 65536, "rows of 65,536 tokens")


@mfu.check("grouped key heads")
def _(fn, t):
    model = drawn_model(t, heads=12, embed=240, kv_heads=2, mlp=100)
    measures(fn, t, model, 4, 512, "2 key heads for 12 heads")


@mfu.check("heads that are wider than embed / heads")
def _(fn, t):
    model = drawn_model(t, heads=4, embed=128, head_dim=80)
    measures(fn, t, model, 4, 512, "head_dim = 80, embed / heads = 32")


@mfu.check("tied embeddings")
def _(fn, t):
    model = drawn_model(t, tie_embeddings=True, vocab=30000, layers=2)
    measures(fn, t, model, 4, 128, "tie_embeddings = True")


@mfu.check("rematerialisation")
def _(fn, t):
    measures(fn, t, drawn_model(t, remat="full"), 4, 256, "remat = full")


@mfu.check("float32")
def _(fn, t):
    measures(fn, t, drawn_model(t, dtype="float32"), 4, 256, "dtype = float32")


@mfu.check("many chips")
def _(fn, t):
    chips = int(t.rng.integers(2, 500))
    measures(fn, t, drawn_model(t), 1024, 2048, f"{chips} chips", chips=chips)


@mfu.check("a step that is too fast to be true")
def _(fn, t):
    measures(fn, t, drawn_model(t), 1024, 2048, "a step of a microsecond", seconds=1e-6)


@mfu.mutant(
    "You count attention's two products for the key heads alone. Every query head has scores of its own, also where "
    "several share their keys."
)
def scores_of_key_heads(model, rows, seq_len, seconds, peaks, chips):
    return right_mfu(model, rows, seq_len, seconds, peaks, chips, few_scores=True)


@mfu.mutant(
    "`head_dim` or `kv_heads` is None here, and you compute with it. None means embed / heads, and as many as heads."
)
def computes_with_none(model, rows, seq_len, seconds, peaks, chips):
    model.heads * model.head_dim * model.kv_heads
    return right_mfu(model, rows, seq_len, seconds, peaks, chips)


@mfu.mutant(
    "You cap the result at 1. A share above 1 shows that a number is wrong, and the cap hides that."
)
def cut_off(*args):
    return min(1.0, right_mfu(*args))


@mfu.mutant(
    "Attention's own products are missing: 6 FLOPs for each weight and token is enough only for short rows. Each query "
    "meets half of a row's keys, in two products."
)
def six_n_d(*args):
    return right_mfu(*args, attention=0.0)


@mfu.mutant(
    "You count the whole square of attention. Causal attention needs half of it: a token sees seq_len / 2 keys on "
    "average."
)
def whole_square(*args):
    return right_mfu(*args, attention=1.0)


@mfu.mutant(
    "You count only one of attention's two products. Queries are multiplied with keys, and then scores with values."
)
def scores_only(*args):
    return right_mfu(*args, both=1)


@mfu.mutant(
    "You count the recomputed forward pass. That gives hardware FLOPs utilisation; for MFU, a step that computes "
    "everything twice is just a slow step."
)
def counts_remat(model, *args):
    return right_mfu(model, *args, passes=3.0 if model.remat == "none" else 4.0)


@mfu.mutant("You count the forward pass alone. The backward pass needs twice as much again.")
def forward_only(*args):
    return right_mfu(*args, passes=1.0)


@mfu.mutant(
    "You count the backward pass once. It has two products for each of the forward pass: gradients of the inputs and "
    "of the weights."
)
def backward_as_forward(*args):
    return right_mfu(*args, passes=2.0)


@mfu.mutant("You leave the output layer out. Its product with V D weights is part of every step.")
def no_output_layer(*args):
    return right_mfu(*args, output=False)


@mfu.mutant("A multiplication and an addition are two FLOPs. You count one for each weight.")
def one_a_weight(*args):
    return right_mfu(*args, multiply_add=1)


@mfu.mutant(
    "You count all parameters. The embedding table is only looked up; the output layer is the one that is multiplied."
)
def all_parameters(*args):
    return right_mfu(*args, lookup=True)


@mfu.mutant(
    "You leave the output layer out when embeddings are tied. It then has no matrix of its own, but the product is as "
    "large as before."
)
def tied_is_free(model, *args):
    return right_mfu(model, *args, output=not model.tie_embeddings)


@mfu.mutant(
    "You count the keys and values of all heads. With kv_heads = K their matrices have D K H weights."
)
def all_heads_have_keys(*args):
    return right_mfu(*args, groups=False)


@mfu.mutant("You compute the width of a head as embed / heads although `head_dim` says otherwise.")
def computed_width(*args):
    return right_mfu(*args, width=False)


@mfu.mutant("A gated layer has three matrices: gate, up and down. You count two.")
def two_matrices(*args):
    return right_mfu(*args, matrices=2)


@mfu.mutant(
    "You divide by the peak of bfloat16 whatever the model computes in. Take `peaks[model.dtype]`."
)
def always_bfloat16(*args):
    return right_mfu(*args, dtype="bfloat16")


@mfu.mutant(
    "Your result is too large by a factor of `chips`. `rows` counts the rows of all chips together, so the peak must "
    "be that of all chips too."
)
def one_chip(*args):
    return right_mfu(*args, all_chips=False)


# ------------------------------------------------------------------------------------- goodput

goodput = Exercise(
    "20.goodput",
    title="How a killed run spent its time",
    function="goodput",
    minutes=35,
    points=15,
    statement="""
Write `goodput(lines)`, which takes a run's ledger and returns the shares of its time. Each line is one event, with the
time it began and how long it took. Several jobs write into one file, and each begins with a `job_start`.

- The whole time runs from the first start to the last end. The shares sum to 1.
- A step is `"lost"` if *any* later job's first step has its number or a lower one. That job resumed from an earlier
  state, and it doesn't matter whether it has caught up since. A job that ended before its first step undoes nothing.
  All other steps are `"step"`. Don't look at saves: if a checkpoint can't be read, a run goes back further than its
  last save.
- Every other event counts under its own name.
- Time in which no event is open is `"idle"` if a `job_start` comes next, because no job ran then. Otherwise it is
  `"other"`.
- Jobs can overlap: a process that hangs in a save may finish it long after the next job has started. If two events
  claim the same moment, it belongs to the one that began first, and the other gets the rest.
- A process killed while it writes leaves half a line, at the end of the file or between two jobs. Skip it.
""",
    hints=(
        "First read the lines that are valid JSON, and give each the number of its job. Then divide the time in one "
        "sweep over the events in order of their starts.",
        "Remember the number of each job's first step. A step of job j is lost if some job after j has a first step "
        "with the same number or a lower one.",
        "In the sweep keep `until`, the end of the time already divided. An event that starts after it leaves a gap. "
        "The event's own time is max(until, start + seconds) - until, and that maximum is the new `until`.",
    ),
)


class Ledger:
    """A run that is told what happens, and writes it down. Times are eighths of a second."""

    def __init__(self, t):
        self.t, self.records = t, []
        self.now = 1000.0 * int(t.rng.integers(1, 9))

    def draw(self, low=1, high=30):
        return int(self.t.rng.integers(low, high)) / 8

    def note(self, event, low, high, **more):
        seconds = self.draw(low, high)
        self.records.append({"event": event, "start": self.now, "seconds": seconds, **more})
        self.now += seconds

    def work(self, first, last, every=3, down=20.0):
        """A job that does the steps from first to last, and is then gone for a while."""
        self.note("job_start", 8, 30)
        self.now += self.draw()
        self.note("compile", 20, 60)
        for step in range(first, last + 1):
            self.note("data_wait", 1, 5)
            self.note("step", 8, 40, step=step)
            if step % every == 0:
                self.note("save", 4, 20)
        # What it did until it was killed is in no event.
        self.now += down + self.draw()

    def lines(self):
        return [json.dumps(r) for r in self.records]

    def shares(self):
        """The right answer, by eighths of a second."""
        jobs = np.cumsum([r["event"] == "job_start" for r in self.records])
        firsts = {
            int(j): min(
                (
                    r["step"]
                    for r, k in zip(self.records, jobs, strict=True)
                    if k == j and "step" in r
                ),
                default=math.inf,
            )
            for j in set(jobs)
        }
        kinds = []
        for r, job in zip(self.records, jobs, strict=True):
            lost = (
                "step" in r
                and min([firsts[j] for j in firsts if j > job], default=r["step"] + 1) <= r["step"]
            )
            kinds.append("lost" if lost else r["event"])
        begun = min(r["start"] for r in self.records)
        starts = np.array([r["start"] for r in self.records])
        ends = starts + [r["seconds"] for r in self.records]
        at = np.arange(begun, ends.max(), 1 / 8)  # eighths of a second, all of them exact
        spent = dict.fromkeys(["step", "lost", "idle", "other", *kinds], 0)
        claims = (starts <= at[:, None]) & (at[:, None] < ends)
        first = np.where(claims, starts, np.inf).argmin(1)
        for tick in range(len(at)):
            if claims[tick, first[tick]]:
                spent[kinds[first[tick]]] += 1
            else:
                following = min(
                    (r["start"], r["event"]) for r in self.records if r["start"] > at[tick]
                )
                spent["idle" if following[1] == "job_start" else "other"] += 1
        ticks = len(at)
        return {kind: n / ticks for kind, n in spent.items()}


def divides(fn, t, ledger, why, lines=None):
    got = fn(ledger.lines() if lines is None else lines)
    want = ledger.shares()
    lacks, more = sorted(set(want) - set(got)), sorted(set(got) - set(want))
    t.true(
        not lacks,
        f"the result lacks {lacks}; each of these has a share, if only 0: {why}",
        sorted(got),
    )
    t.true(
        not more,
        f"the result has {more}, which is neither an event nor asked for: {why}",
        sorted(got),
    )
    # As a list, so that all shares are seen together.
    kinds = sorted(want)
    right = np.array([want[k] for k in kinds])
    begun = min(r["start"] for r in ledger.records)
    whole = max(r["start"] + r["seconds"] for r in ledger.records) - begun
    covered = 1 - want["idle"] - want["other"]
    told = {
        "You return seconds: divide by the whole time": right * whole,
        "You return per cent": right * 100,
        "Your whole time begins at 0: it begins with the first start": right
        * whole
        / (whole + begun),
        "You measure from time 0; the whole time begins with the first start": [
            (want[k] * whole + begun * (k == "idle")) / (whole + begun) for k in kinds
        ],
        "The time in which no event is open belongs to `other` here": [
            {"idle": want["idle"] + want["other"], "other": 0.0}.get(k, want[k]) for k in kinds
        ],
        "Your whole time lacks what is `idle`": right / (1 - want["idle"]),
        "Your whole time lacks what is in no event": right / covered,
        "You count lost steps under `step` too": [
            want[k] + want["lost"] * (k == "step") for k in kinds
        ],
        "You count lost steps under `step`, and not under `lost`": [
            {"step": want["step"] + want["lost"], "lost": 0.0}.get(k, want[k]) for k in kinds
        ],
    }
    t.close(
        [got[k] for k in kinds],
        right.tolist(),
        rtol=0,
        atol=1e-9,
        why=f"{kinds}; {misplaced(got, want, 'of the whole time')}: {why}",
        mistakes=told,
    )


def misplaced(got, want, unit):
    """How a division of time among causes is wrong."""
    if not all(isinstance(got[k], (int, float)) for k in want):
        return "not all of them are numbers"
    more = {k: float(got[k]) - want[k] for k in want}
    off = sorted((k for k in want if abs(more[k]) > 1e-9), key=lambda k: more[k])
    total = sum(more.values())
    if len(off) == 2 and abs(total) < 1e-6:
        return f"{more[off[1]]:.4g} {unit} is under {off[1]!r} and belongs to {off[0]!r}"
    if abs(total) > 1e-6:
        told = [
            f"{k!r} has {abs(more[k]):.4g} too {'much' if more[k] > 0 else 'little'}" for k in off
        ]
        whole = f"{sum(float(got[k]) for k in want):.6g}, want {sum(want.values()):.6g}"
        times = sum(float(got[k]) for k in want) / sum(want.values())
        several = sum(ns > 0 for ns in want.values()) > 1
        if several and np.allclose([float(got[k]) for k in want], [times * want[k] for k in want]):
            return f"together they are {whole}, and all are in proportion: you divide by another number, or by none"
        return f"together they are {whole}: {', '.join(told)}"
    return f"together they are right, but {len(off)} of them are not"


@goodput.check("one job that nobody killed")
def _(fn, t):
    ledger = Ledger(t)
    ledger.work(1, int(t.rng.integers(6, 12)))
    divides(
        fn, t, ledger, "one job: no later job undoes its steps, and no job_start comes after a gap"
    )


@goodput.check("killed and resumed from its last save")
def _(fn, t):
    ledger = Ledger(t)
    ledger.work(1, 8)
    ledger.work(7, 14)
    divides(fn, t, ledger, "killed after step 8, resumed after step 6")


@goodput.check("killed twice at one place")
def _(fn, t):
    ledger = Ledger(t)
    ledger.work(1, 8)
    ledger.work(7, 8)
    ledger.work(7, 11)
    divides(fn, t, ledger, "steps 7 and 8 were done three times")


@goodput.check("a job that ended before its first step")
def _(fn, t):
    ledger = Ledger(t)
    ledger.work(1, 7)
    ledger.work(7, 6)
    ledger.work(7, 9)
    ledger.work(10, 9)
    divides(fn, t, ledger, "the second and the last job took no step")


@goodput.check("the newest save could not be read")
def _(fn, t):
    ledger = Ledger(t)
    ledger.work(1, 10)
    ledger.work(4, 12)
    divides(fn, t, ledger, "saved after step 9, resumed after step 3")


@goodput.check("not yet as far as it was")
def _(fn, t):
    ledger = Ledger(t)
    ledger.work(1, 11)
    ledger.work(7, 8)
    divides(fn, t, ledger, "killed after step 11, resumed after step 6, now at step 8")


@goodput.check("further back the third time")
def _(fn, t):
    ledger = Ledger(t)
    ledger.work(1, 7)
    ledger.work(7, 8)
    ledger.work(4, 5)
    divides(fn, t, ledger, "jobs that began with steps 1, 7 and 4")


@goodput.check("less far back the third time")
def _(fn, t):
    ledger = Ledger(t)
    ledger.work(1, 7)
    ledger.work(4, 7)
    ledger.work(7, 9)
    divides(fn, t, ledger, "jobs that began with steps 1, 4 and 7")


@goodput.check("an event that outlasts those after it")
def _(fn, t):
    ledger = Ledger(t)
    ledger.work(1, 4)
    ledger.note("upload", 80, 90)
    ledger.now -= 9.0
    ledger.note("data_wait", 1, 5)
    why = "a data_wait begins and ends within an upload, which began first and has the whole of its time"
    divides(fn, t, ledger, why)


@goodput.check("a torn last line")
def _(fn, t):
    ledger = Ledger(t)
    ledger.work(1, 5)
    lines = [*ledger.lines(), '{"event": "st']
    divides(fn, t, ledger, "the last line is half a record", lines)


@goodput.check("a torn line between two jobs")
def _(fn, t):
    ledger = Ledger(t)
    ledger.work(1, 5)
    before = len(ledger.records)
    ledger.work(4, 9)
    lines = ledger.lines()
    torn = [*lines[:before], '{"event": "save", "start": 17', *lines[before:]]
    divides(fn, t, ledger, "half a record before the second job", torn)


@goodput.check("a save that ends after the next job has started")
def _(fn, t):
    ledger = Ledger(t)
    ledger.work(1, 6, down=0.0)
    hung = ledger.records[-1]
    hung["seconds"] += 10.0
    before = len(ledger.records)
    ledger.work(7, 12)
    # Its line is written when it ends.
    late = next(
        i for i, r in enumerate(ledger.records) if r["start"] > hung["start"] + hung["seconds"]
    )
    ledger.records.insert(late - 1, ledger.records.pop(before - 1))
    why = "the first job's last save began first and has all of its time; the second job's events get the rest"
    divides(fn, t, ledger, why)


def right_goodput(
    lines, *, lost="began", torn="skip", idle=True, whole="all", sweep=True, begins=True, ends="of all", ordered=True,
    first=True,
):  # fmt: skip
    records, job = [], 0
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            if torn == "raise" or (torn == "last" and line is not lines[-1]):
                raise
            if torn == "stop":
                break
            continue
        job += record["event"] == "job_start"
        records.append(record | {"job": job})
    if ordered:
        records.sort(key=lambda r: r["start"])
    spent = dict.fromkeys([*(r["event"] for r in records), "step", "lost", "idle", "other"], 0.0)
    begun = until = records[0]["start"]
    before = ""
    for r in records:
        kind, start = r["event"], r["start"]
        if start > until:
            spent["idle" if idle and kind == "job_start" else "other"] += start - until
            until = start
        end = start + r["seconds"]
        if start < until and not first:
            spent[before] -= min(until, end) - start
            spent[kind] += min(until, end) - start
        if kind == "step" and is_lost(r, records, lost):
            kind = "lost"
        if ends == "goes back":
            spent[kind] += end - until
            until = end
            continue
        spent[kind] += max(until, end) - until if sweep else r["seconds"]
        until, before = max(until, end), kind
    total = until - begun
    if not begins:
        total = records[-1]["start"] - begun
    if ends == "of the last start":
        total += records[-1]["start"] + records[-1]["seconds"] - until
    if whole == "jobs":
        total, spent["idle"] = total - spent["idle"], 0.0
    if whole == "events":
        spent["idle"] = spent["other"] = 0.0
        total = sum(spent.values())
    return {kind: seconds / total for kind, seconds in spent.items()}


def is_lost(step, records, how):
    steps = [r for r in records if r["event"] == "step"]
    later = [r for r in steps if r["job"] > step["job"]]
    if how == "never":
        return False
    if how == "again":
        return any(r["step"] == step["step"] for r in later)
    if how == "first":
        return any(r["step"] == step["step"] and r["job"] < step["job"] for r in steps)
    if how == "any job":
        return any(r["step"] <= step["step"] and r["job"] != step["job"] for r in steps)
    if how == "whole job":
        last = max(r["step"] for r in steps if r["job"] == step["job"])
        return any(r["step"] <= last for r in later)
    if how == "own job":
        return True
    if how == "began with it":
        firsts = {r["job"]: r["step"] for r in reversed(steps)}
        return any(firsts[r["job"]] == step["step"] for r in later)
    if how == "ended":
        lasts = {r["job"]: r["step"] for r in steps}
        return any(lasts[r["job"]] <= step["step"] for r in later)
    if how == "last":
        later = [r for r in later if r["job"] == max(r["job"] for r in steps)]
    if how == "lower":
        return any(r["step"] < step["step"] for r in later)
    if how == "next with a step":
        later = [r for r in later if r["job"] == min(r["job"] for r in later)]
    if how == "next":
        later = [r for r in later if r["job"] == step["job"] + 1]
    if how in ("unsaved", "killed"):
        saves = [r["start"] for r in records if r["event"] == "save" and r["job"] == step["job"]]
        last_job = step["job"] == max(r["job"] for r in records)
        return step["start"] > max(saves, default=0.0) and (how == "unsaved" or not last_job)
    return any(r["step"] <= step["step"] for r in later)


@goodput.mutant(
    "You call all steps of an earlier job lost. Those before the first step of a later job are kept: it resumed from "
    "them."
)
def the_whole_job_is_lost(lines):
    return right_goodput(lines, lost="whole job")


@goodput.mutant(
    "You count a step as lost whichever job it compares with, also an earlier one or its own. Only a *later* job "
    "undoes steps."
)
def lost_to_itself(lines):
    return right_goodput(lines, lost="own job")


@goodput.mutant(
    "You count a step as lost if an earlier job did the same one or a lower one. Only a *later* job undoes steps."
)
def lost_to_an_earlier_job(lines):
    return right_goodput(lines, lost="any job")


@goodput.mutant(
    "When two events claim the same moment you give it to the one that began later. It belongs to the one that began "
    "first."
)
def later_one_first(lines):
    return right_goodput(lines, first=False)


@goodput.mutant(
    "You skip half a line only at the end of the file. It may be between two jobs as well."
)
def torn_at_the_end_alone(lines):
    return right_goodput(lines, torn="last")


@goodput.mutant(
    "You call lost only the step that a later job began with. Those after it were undone as well: a step is lost if a "
    "later job began with its number or a *lower* one."
)
def only_the_first_again(lines):
    return right_goodput(lines, lost="began with it")


@goodput.mutant(
    "You compare with the last step of each later job. Its *first* step says how far back it went."
)
def last_step_of_a_job(lines):
    return right_goodput(lines, lost="ended")


@goodput.mutant(
    "After a long event you continue from the end of a shorter one that lies inside it. Keep the latest end so far."
)
def goes_back(lines):
    return right_goodput(lines, ends="goes back")


@goodput.mutant(
    "You count work that was thrown away as good. A step is lost if a later job began with its number or a lower one."
)
def nothing_is_lost(lines):
    return right_goodput(lines, lost="never")


@goodput.mutant(
    "You keep the first time a step was done and call its repetitions lost. The run continues from the last one, so "
    "the earlier ones are lost."
)
def the_first_counts(lines):
    return right_goodput(lines, lost="first")


@goodput.mutant(
    "You call only repeated steps lost. Steps that a later job hasn't reached again are lost too, because it resumed "
    "from before them."
)
def done_again(lines):
    return right_goodput(lines, lost="again")


@goodput.mutant(
    "You look only at the next job. A job after it may have gone back further and undone more steps of this one."
)
def next_job_only(lines):
    return right_goodput(lines, lost="next")


@goodput.mutant(
    "You look only at the next job that took a step. A job after it may have gone back further and undone more steps "
    "of this one."
)
def next_job_with_a_step(lines):
    return right_goodput(lines, lost="next with a step")


@goodput.mutant(
    "A later job that begins with the same number has undone this step too: a lower number *or the same* counts."
)
def only_lower_numbers(lines):
    return right_goodput(lines, lost="lower")


@goodput.mutant(
    "You go through the events in the order of the file. A line is written when its event ends, so an event that began "
    "earlier may come later: sort by `start`."
)
def in_file_order(lines):
    return right_goodput(lines, ordered=False)


@goodput.mutant(
    "You look only at the last job. One before it may have gone back further, and the steps it undid stay lost."
)
def last_job_only(lines):
    return right_goodput(lines, lost="last")


@goodput.mutant(
    "Your whole time ends with the event that began last. An event that began earlier may end later: take the latest "
    "end."
)
def end_of_the_last_start(lines):
    return right_goodput(lines, ends="of the last start")


@goodput.mutant(
    "You call every step after a job's last save lost, even in a job that wasn't killed. Its steps count until another "
    "job resumes from before them."
)
def unsaved_is_lost(lines):
    return right_goodput(lines, lost="unsaved")


@goodput.mutant(
    "You call lost only what a killed job did after its last save. If that save can't be read, more is lost: compare "
    "with the first steps of later jobs."
)
def since_the_last_save(lines):
    return right_goodput(lines, lost="killed")


@goodput.mutant(
    "You call the time between two jobs `other`. A gap before a `job_start` is `idle`, because no job ran then."
)
def never_idle(lines):
    return right_goodput(lines, idle=False)


@goodput.mutant(
    "You divide by the time in which a job ran. Chips that wait for a restart cost as much: the whole time runs from "
    "the first start to the last end."
)
def time_of_jobs(lines):
    return right_goodput(lines, whole="jobs")


@goodput.mutant(
    "You divide by the sum of the events' seconds. That leaves out time that no event covers, which is `idle` or "
    "`other`."
)
def sum_of_events(lines):
    return right_goodput(lines, whole="events")


@goodput.mutant(
    "Your whole time ends when the last event starts. It should end when that event ends: add its seconds."
)
def to_the_last_start(lines):
    return right_goodput(lines, begins=False)


@goodput.mutant(
    "Your program stops with an error at a torn line. Catch `json.JSONDecodeError` and continue with the next line."
)
def torn_raises(lines):
    return right_goodput(lines, torn="raise")


@goodput.mutant(
    "You stop reading at the first torn line. A killed job can leave one in the middle of the file, because the next "
    "job appends to it."
)
def torn_stops(lines):
    return right_goodput(lines, torn="stop")


@goodput.mutant(
    "When two events overlap you count both, so your shares sum to more than 1. The moment belongs to the event that "
    "began first."
)
def both_count(lines):
    return right_goodput(lines, sweep=False)


# ---------------------------------------------------------------------------------- find_stall

find_stall = Exercise(
    "20.find_stall",
    title="Find the stall",
    function="find_stall",
    minutes=35,
    points=15,
    statement="""
Write `find_stall(events)`, which finds what the devices waited for and which wait cost most. The window runs from the
first start to the last end of all events.

- A device works while any of its compute events is open. Every other nanosecond is blamed on exactly one cause.
- A collective costs the time it is *exposed*: the time it is open on a device that isn't computing. A data wait belongs
  to the host (its device is `None`), and costs each device the part of the wait in which that device isn't computing.
- If several waits are open at once, blame the one that ends last: without the others the device would have waited just
  as long. If several end at the same time, blame the one that comes first in the list.
- If no wait is open, the device is `"idle"`.
- A name's cost is the sum over all its events, in nanoseconds, averaged over all devices in the list. A wait that
  is entirely hidden is in the result too, and costs 0.0.
""",
    hints=(
        "When can the answer change? Only when some event starts or ends. Between two neighbouring edges everything is "
        "constant.",
        "For each device take its own events and the host's. For each interval between two edges: is the device "
        "computing? If not, which of the open events ends last?",
        "`running = [e for e in mine if e[3] <= start and e[4] >= end]`, then `max(running, key=lambda e: e[4], "
        "default=None)`. Divide by the number of devices, and find the worst with `max(waits, key=waits.get)`.",
    ),
)


def blame(events):
    """The right answer, nanosecond by nanosecond."""
    devices = sorted({e[0] for e in events} - {None})
    waits = dict.fromkeys((e[2] for e in events if e[1] != "compute"), 0.0) | {"idle": 0.0}
    for device in devices:
        for ns in range(min(e[3] for e in events), max(e[4] for e in events)):
            at = [e for e in events if e[0] in (device, None) and e[3] <= ns < e[4]]
            if not any(e[1] == "compute" for e in at):
                waiting = sorted(at, key=lambda e: -e[4])  # stable: of equals the first
                waits[waiting[0][2] if waiting else "idle"] += 1 / len(devices)
    return max(waits, key=lambda name: waits[name]), waits


def finds(fn, t, events, why):
    got = fn(list(events))
    formed = isinstance(got, tuple) and len(got) == 2 and isinstance(got[1], dict)
    t.true(formed, f"want a pair (name of the worst, dict of all costs), got {got}", "form")
    worst, waits = got
    want_worst, want = blame(events)
    missing, known = sorted(set(want) - set(waits)), sorted(waits, key=str)
    t.true(
        not missing,
        f"no entry for {missing}, want one for each wait; yours are {known}: {why}",
        known,
    )
    t.equal(known, sorted(want), why=f"the names: {why}")
    names = sorted(want)
    devices = len({e[0] for e in events} - {None})
    told = misplaced(waits, want, "ns on the average")
    if np.allclose([float(waits[n]) for n in names], [devices * want[n] for n in names]):
        told = f"they are {devices} times too large: an average over {devices} devices"
    right = np.array([want[n] for n in names])
    window = max(e[4] for e in events) - min(e[3] for e in events)
    data = {e[2] for e in events if e[1] == "data"}
    several = {
        "You return shares of the window, want nanoseconds": right / window,
        "You round: costs are means over devices, and may be fractions": np.floor(right),
        "A data wait costs each device the part of the wait in which it isn't computing": [
            want[n] / devices if n in data else want[n] for n in names
        ],
        "A data wait costs the mean over devices too, not the sum": [
            want[n] * devices if n in data else want[n] for n in names
        ],
    }
    t.close(
        [waits[n] for n in names],
        right.tolist(),
        rtol=0,
        atol=1e-6,
        why=f"{names}; {told}: {why}",
        mistakes=several,
    )
    t.equal(worst, want_worst, why=f"the worst: {why}")


def step_of(t, device, at, late=0):
    """Two products with an all-gather beside the first, and an all-reduce after them."""
    a, b, c = (int(n) for n in t.rng.integers(10, 30, size=3))
    return [
        (device, "compute", "dot.1", at + late, at + late + a),
        (device, "collective", "all-gather.2", at + late + 2, at + late + a - 3),
        (device, "compute", "dot.3", at + late + a, at + late + a + b),
        (device, "collective", "all-reduce.4", at + late + a + b, at + late + a + b + c),
    ]


@find_stall.check("a collective that is hidden and one that is not")
def _(fn, t):
    finds(
        fn,
        t,
        step_of(t, 0, 0),
        "one device, one step: all-gather.2 is open only while the device computes, all-reduce.4 only while it doesn't",
    )


@find_stall.check("a collective that is hidden in part")
def _(fn, t):
    n = int(t.rng.integers(10, 30))
    events = [
        (0, "compute", "dot.1", 0, 2 * n),
        (0, "collective", "all-gather.2", n, 4 * n),
        (0, "compute", "dot.3", 3 * n + 2, 5 * n),
        (0, "collective", "all-reduce.4", 5 * n, 5 * n + 3),
    ]
    finds(
        fn,
        t,
        events,
        "all-gather.2 is open over two products and the gap between them, which is what it costs",
    )


@find_stall.check("another device's computing hides nothing")
def _(fn, t):
    n = int(t.rng.integers(10, 30))
    events = [
        (0, "compute", "dot.1", 0, n),
        (0, "collective", "all-reduce.4", n, 3 * n + 1),
        (1, "compute", "dot.1", 0, 2 * n),
        (1, "compute", "dot.3", 2 * n, 3 * n),
        (1, "collective", "all-reduce.4", 2 * n + 1, 3 * n + 1),
    ]
    finds(fn, t, events, "device 0 waits in all-reduce.4 while device 1 computes")


@find_stall.check("computing on two lanes of a device")
def _(fn, t):
    n = int(t.rng.integers(10, 30))
    events = [
        (0, "compute", "dot.1", 0, 3 * n),
        (0, "compute", "copy.5", n, 2 * n),
        (0, "compute", "dot.3", 2 * n, 4 * n),
        (0, "collective", "all-gather.2", n // 2, 5 * n),
    ]
    finds(fn, t, events, "compute events that overlap")


@find_stall.check("a device that never computes")
def _(fn, t):
    n = int(t.rng.integers(10, 30))
    events = [(0, "compute", "dot.1", 0, 3 * n), (1, "collective", "all-gather.2", 0, 2 * n)]
    finds(fn, t, events, "device 1 has a collective and computes nothing: it waits all the time")


@find_stall.check("a slow data source")
def _(fn, t):
    slow = int(t.rng.integers(90, 150))
    events = [e for d in range(4) for e in step_of(t, d, 0) + step_of(t, d, 60 + slow)]
    events.append((None, "data", "next batch", 70, 60 + slow))
    finds(fn, t, events, "four devices, a wait for data between two steps")


@find_stall.check("nobody is to blame")
def _(fn, t):
    pause = int(t.rng.integers(200, 300))
    events = [e for d in range(2) for e in step_of(t, d, 0) + step_of(t, d, pause)]
    finds(fn, t, events, "a pause in which nothing is open")


@find_stall.check("two waits at once")
def _(fn, t):
    n = int(t.rng.integers(10, 30))
    for kind, device in (("collective", 0), ("data", None)):
        for ends in (2 * n, 4 * n):
            events = [
                (0, "compute", "dot.1", 0, n),
                (0, "collective", "all-reduce.4", n, 3 * n),
                (device, kind, "other", n + 3, ends),
                (0, "compute", "dot.3", 4 * n, 5 * n),
            ]
            last = "other" if ends > 3 * n else "all-reduce.4"
            why = f"all-reduce.4 is open from {n} to {3 * n}, a {kind} wait from {n + 3} to {ends}"
            finds(fn, t, events, f"{why}: while both are open, {last} ends last and gets the blame")


@find_stall.check("several waits at once")
def _(fn, t):
    n = int(t.rng.integers(10, 30))
    events = [
        (0, "compute", "dot.1", 0, n),
        (0, "collective", "all-gather.2", 0, 2 * n + 1),
        (0, "collective", "all-gather.8", 2, 3 * n + 4),
        (0, "collective", "all-reduce.4", n + 2, 4 * n),
        (None, "data", "next batch", n + 1, 2 * n),
        (0, "collective", "all-to-all.6", n + 4, 4 * n),
        (0, "compute", "dot.3", 4 * n, 5 * n),
    ]
    finds(fn, t, events, "four collectives and a data wait")
    events[3], events[5] = events[5], events[3]
    finds(fn, t, events, "the later of two that end together is the first in the list")


@find_stall.check("many short ones against a long one")
def _(fn, t):
    events, at = [], 0
    for _ in range(12):
        n = int(t.rng.integers(8, 14))
        events += [(0, "compute", "dot.1", at, at + 5)]
        events += [(0, "collective", "all-to-all.6", at + 5, at + 5 + n)]
        at += 5 + n
    events += [
        (0, "collective", "all-reduce.4", at, at + 40),
        (0, "compute", "dot.1", at + 40, at + 45),
    ]
    finds(fn, t, events, "twelve short waits of one name, a long one of another")


@find_stall.check("random steps, in any order")
def _(fn, t):
    events = []
    for device in range(3):
        at = int(t.rng.integers(0, 20))
        for _ in range(3):
            events += step_of(t, device, at, late=int(t.rng.integers(0, 15)))
            at += 110
    for _ in range(4):
        at = int(t.rng.integers(0, 300))
        events.append((None, "data", "next batch", at, at + int(t.rng.integers(5, 70))))
    order = t.rng.permutation(len(events))
    finds(fn, t, [events[i] for i in order], "three devices, three steps")


def right_stall(
    events, *, whole=False, own=True, host=True, mean=True, once=True, by=lambda e: e[4], sums=True,
    idle=True, partly=True, silent=True, split=False, worst_idle=True, nameless=False, own_window=False, floor=False,
    works_idle=False, one_stretch=False,
):  # fmt: skip
    devices = sorted({e[0] for e in events if silent or e[1] == "compute"} - {None})
    waits = dict.fromkeys((e[2] for e in events if e[1] != "compute"), 0.0) | {"idle": 0.0}
    longest, stretch = dict.fromkeys(waits, 0.0), dict.fromkeys(waits, 0.0)
    if nameless and any(e[0] is None for e in events):
        devices.append(None)
    edges = sorted({e[3] for e in events} | {e[4] for e in events})
    for device in devices:
        mine = [e for e in events if e[0] == device or (e[0] is None and host)]
        if own_window:
            edges = sorted({e[3] for e in mine} | {e[4] for e in mine})
        works = [e for e in (mine if own else events) if e[1] == "compute"]
        for start, end in pairwise(edges):
            at = [e for e in mine if e[3] <= start and e[4] >= end and e[1] != "compute"]
            computes = any(e[3] <= start and e[4] >= end for e in works)
            if not partly:  # whatever meets any computing counts as hidden
                at = [e for e in at if not any(w[3] < e[4] and w[4] > e[3] for w in works)]
            ns = (end - start) // len(devices) * len(devices) if floor else end - start
            if computes and works_idle and not at:
                waits["idle"] += end - start
            if computes and not whole:
                continue
            if not at:
                if idle and not computes:
                    waits["idle"] += ns
                continue
            first = max(at, key=by)
            for e in [first] if once else at:
                waits[e[2]] += ns / (len(at) if split else 1)
                longest[e[2]] = max(longest[e[2]], e[4] - e[3])
                stretch[e[2]] = max(stretch[e[2]], ns)
    if one_stretch:
        waits = stretch | {"idle": waits["idle"]}
    if mean:
        waits = {name: ns / len(devices) for name, ns in waits.items()}
    ranked = waits if sums else longest
    ranked = ranked if worst_idle else {name: waits[name] for name in waits if name != "idle"}
    return max(ranked, key=lambda name: ranked[name]), waits


@find_stall.mutant(
    "You count a collective's whole duration. It costs nothing while the device computes: count only the time in which "
    "no compute event is open."
)
def whole_collectives(events):
    return right_stall(events, whole=True)


@find_stall.mutant(
    "You count a collective as hidden if any computation overlaps it. It may be hidden only in part: look at each "
    "interval between two edges."
)
def hidden_or_not(events):
    return right_stall(events, partly=False)


@find_stall.mutant(
    "You let computation on one device hide a collective on another. Only a device's own computation hides its "
    "collective."
)
def hidden_by_others(events):
    return right_stall(events, own=False)


@find_stall.mutant(
    "Your data waits cost nothing. Their device is None because they belong to the host: they concern all devices."
)
def host_is_nobody(events):
    return right_stall(events, host=False)


@find_stall.mutant(
    "You leave out devices that never compute. Such a device waits all the time, and the mean is over all devices that "
    "occur."
)
def silent_devices_left_out(events):
    return right_stall(events, silent=False)


@find_stall.mutant(
    "Of several waits that are open at once you blame the one that ends first. Without it, the device would have "
    "waited just as long."
)
def blames_the_first_to_end(events):
    return right_stall(events, by=lambda e: -e[4])


@find_stall.mutant(
    "Of several waits that are open at once you blame the longest. A long one may end earlier than another: the end "
    "decides."
)
def blames_the_longest(events):
    return right_stall(events, by=lambda e: e[4] - e[3])


@find_stall.mutant(
    "You return sums over devices. If all devices wait 5 ns, the cost is 5 ns: take the mean."
)
def summed_over_devices(events):
    return right_stall(events, mean=False)


@find_stall.mutant(
    "When several waits are open at once you count the time for each, so your waits can sum to more than the time "
    "there was. Blame one of them."
)
def counted_for_each(events):
    return right_stall(events, once=False)


@find_stall.mutant(
    "If several waits end at the same time, you choose by their starts or names. Blame the one that "
    "comes first in the list."
)
def ties_by_start(events):
    # Python's sort keeps the order of equals, so only the waits' own order changes.
    waits = sorted((e for e in events if e[1] != "compute"), key=lambda e: e[3])
    return right_stall([e for e in events if e[1] == "compute"] + waits)


@find_stall.mutant(
    "If several waits end at the same time, you blame the one that comes last in the list. Blame the "
    "one that comes first."
)
def last_of_equals(events):
    waits = [e for e in events if e[1] != "compute"][::-1]
    return right_stall([e for e in events if e[1] == "compute"] + waits)


@find_stall.mutant(
    "You divide the time among all waits that are open. Without the others the one that ends last would have made the "
    "device wait just as long: blame that one alone."
)
def divided_among_all(events):
    return right_stall(events, once=False, split=True)


@find_stall.mutant(
    "You blame the wait that comes first, in time or in the list. If another ends later, the device would have waited "
    "just as long without the first: blame the one that ends last."
)
def first_in_the_list(events):
    return right_stall(events, by=lambda e: 0)


@find_stall.mutant(
    "You blame the host for data whenever it is open. It counts like the others: blame the wait that ends last."
)
def data_before_all(events):
    return right_stall(events, by=lambda e: (e[1] == "data", e[4]))


@find_stall.mutant(
    "You blame the wait that began last. How long a device waits is decided by the one that *ends* last."
)
def blames_the_newest(events):
    return right_stall(events, by=lambda e: e[3])


@find_stall.mutant("You leave `idle` out when you look for the worst. It's a name like the others.")
def idle_is_never_worst(events):
    return right_stall(events, worst_idle=False)


@find_stall.mutant(
    "You blame the wait that comes first, in time or in the list. If another ends later, the device would have waited "
    "just as long without the first: blame the one that ends last."
)
def blames_the_first(events):
    return right_stall(events, by=lambda e: -e[3])


@find_stall.mutant(
    "Your worst wait is the one with the longest single event. Many short waits can cost more: compare the sums."
)
def longest_single(events):
    return right_stall(events, sums=False)


@find_stall.mutant(
    "You leave out time in which nothing at all is open. The device is idle then, and that counts too."
)
def nothing_is_idle(events):
    return right_stall(events, idle=False)


@find_stall.mutant(
    "You subtract the durations of compute events from the collective's. If two of them overlap, you subtract the same "
    "time twice."
)
def durations_taken_off(events):
    worst, waits = right_stall(events)
    devices = sorted({e[0] for e in events} - {None})
    for device in devices:
        works = [e for e in events if e[0] == device and e[1] == "compute"]
        for i, a in enumerate(works):
            for b in works[:i]:
                for c in events:
                    if c[0] == device and c[1] == "collective":
                        both = min(a[4], b[4], c[4]) - max(a[3], b[3], c[3])
                        waits[c[2]] -= max(0, both) / len(devices)
    return worst, waits


@find_stall.mutant(
    "Your device None is a device like the others in your mean. It's the host, which has no time of its own here."
)
def host_is_a_device(events):
    return right_stall(events, nameless=True)


@find_stall.mutant(
    "You measure each device from its own first event to its own last. The window is the same for all: from the first "
    "start to the last end of all events."
)
def window_of_each_device(events):
    return right_stall(events, own_window=True)


@find_stall.mutant(
    "You divide with `//` and lose a part of a nanosecond each time. A mean over devices may be a fraction."
)
def whole_nanoseconds(events):
    return right_stall(events, floor=True)


@find_stall.mutant(
    "You count the time in which a device computes as well. A device that computes isn't idle and waits for nothing, "
    "whatever else is open."
)
def computing_is_waiting(events):
    return right_stall(events, whole=True, works_idle=True)


@find_stall.mutant(
    "Waits that cost nothing, or `idle`, are missing from your dict. Each has an entry, if only 0.0."
)
def leaves_out_zeros_too(events):
    worst, waits = right_stall(events)
    return worst, {name: ns for name, ns in waits.items() if ns}


@find_stall.mutant(
    "You blame a collective before a data wait. It counts like the others: blame the wait that ends last."
)
def collectives_before_data(events):
    return right_stall(events, by=lambda e: (e[1] == "collective", e[4]))


@find_stall.mutant(
    "You keep the longest stretch of each wait. A name's cost is the sum over all its events and all devices, divided "
    "by the number of devices."
)
def one_stretch_of_each(events):
    return right_stall(events, one_stretch=True)
