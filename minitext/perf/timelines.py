"""Figures of what was done when: a run's wall time, a compiled step's schedule.

Chapters: 20, 22.
"""

from typing import Any

from minitext.perf.figures import COLORS, INK


def plot_goodput(goodput: Any) -> Any:
    """Draw a `minitext.observability.goodput.Goodput`: what was done when, and the share of each kind of time.

    Returns:
        The figure: above a strip of the wall time, below a bar for each kind, the largest first.
    """
    import matplotlib.pyplot as plt

    kinds = sorted(
        (k for k, s in goodput.seconds.items() if s >= 1e-3), key=lambda k: -goodput.seconds[k]
    )
    # Steps that count in the first colour; hatches tell apart what shares one of the others.
    order = ["step", *(kind for kind in kinds if kind != "step")]
    hatches = ("", "//", "..", "xx")
    looks = {
        kind: {"color": COLORS[i % 5], "hatch": hatches[i // 5], "edgecolor": INK, "linewidth": 0}
        for i, kind in enumerate(order)
    }
    figure, (strip, bars) = plt.subplots(
        2, 1, figsize=(6.4, 1.4 + 0.3 * len(kinds)), height_ratios=(1, 0.6 * len(kinds) + 0.1)
    )
    begin = goodput.spans[0].start if goodput.spans else 0.0
    for span in (s for s in goodput.spans if s.event in looks):
        strip.barh(0, span.seconds, left=span.start - begin, **looks[span.event])
    strip.set(yticks=[], xlim=(0, goodput.wall or 1), xlabel="seconds since the run began")
    strip.grid(False)
    bars.barh(kinds, [goodput.share(k) for k in kinds], **_columns([looks[k] for k in kinds]))
    for row, kind in enumerate(kinds):
        bars.text(goodput.share(kind), row, f" {goodput.share(kind):.1%}", va="center", fontsize=9)
    bars.invert_yaxis()
    bars.grid(False, axis="y")
    bars.set(xlabel="share of the wall time", xlim=(0, 1.1 * max(map(goodput.share, kinds))))
    strip.set_title(f"goodput {goodput.goodput:.1%}")
    return figure


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {key: [row[key] for row in rows] for key in rows[0]}


def plot_schedule(events: Any, start: float = 0.0, end: float | None = None) -> Any:
    """Draw what the core and the queues of a `minitext.perf.step_time.StepTime` do, from `start` to `end` seconds.

    Of a loop only the first turn is drawn; the others are a grey stretch with their number.

    Returns:
        The figure: a lane for each queue, in which `wait` is the core waiting.
    """
    import matplotlib.pyplot as plt

    end = float(max((event.end for event in events), default=1.0) if end is None else end)
    lanes = ("compute", "kernels", "wait", "ici", "dcn", "dma", "host")
    shown = [event for event in events if event.end > start and event.start < end]
    used = [lane for lane in lanes if any(event.queue == lane for event in shown)]
    unit, name = (1.0, "s") if end - start >= 1 else (1e3, "ms")
    figure, axes = plt.subplots(figsize=(7, 0.45 * len(used) + 1.1))
    for row, lane in enumerate(used):
        bars = [(e.start * unit, (e.end - e.start) * unit) for e in shown if e.queue == lane]
        color = INK if lane == "wait" else COLORS[row % len(COLORS)]
        axes.broken_barh(bars, (row - 0.38, 0.76), color=color, alpha=0.5 if lane == "wait" else 1)
    for loop in (e for e in shown if e.queue == "loop" and e.trips > 1):
        inside = [e.end for e in events if loop.start <= e.start < loop.end and e.queue != "loop"]
        first = max((at for at in inside if at <= loop.end), default=loop.start)
        axes.axvspan(first * unit, loop.end * unit, color=INK, alpha=0.15)
        middle = (max(first, start) + min(loop.end, end)) / 2 * unit
        axes.text(middle, -0.7, f"{loop.trips - 1} more turns", ha="center", fontsize=8)
    axes.set_yticks(range(len(used)), used)
    axes.set_ylim(len(used) - 0.5, -1.0)
    axes.set_xlim(start * unit, end * unit)
    axes.set_xlabel(f"time, {name}")
    return figure
