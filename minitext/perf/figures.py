"""The book's figure style, and the package's figures."""

import math
from collections.abc import Callable
from typing import Any

from minitext.errors import UserError

# Figures have a transparent background and must be readable on white and on near-black. Each colour has a contrast of
# at least 3:1 on both, which leaves only a narrow band of lightness; so the line style changes with the colour, for
# grey printing and for colour-blind readers. tests/book/test_notebook.py checks the contrasts.
COLORS = ("#2463c4", "#de7a0c", "#0f8a6d", "#b865c9", "#c4314b")
LINESTYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
INK = "#70777f"
MOST_NAMED = 16  # faults in a picture with names


def figure_style() -> None:
    """Gives matplotlib the book's style, and notebooks SVG figures."""
    import matplotlib
    from matplotlib.rcsetup import cycler

    cycle = cycler(color=COLORS) + cycler(linestyle=LINESTYLES)
    axes = ("edgecolor", "labelcolor", "titlecolor")
    ink_keys = ("text.color", "xtick.color", "ytick.color", *(f"axes.{key}" for key in axes))
    style: dict[Any, Any] = {
        **dict.fromkeys(ink_keys, INK),
        "axes.prop_cycle": cycle,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.titleweight": "bold",
        "grid.color": INK,
        "grid.alpha": 0.25,
        "grid.linewidth": 0.6,
        "figure.figsize": (6.4, 3.6),
        "figure.facecolor": "none",
        "figure.constrained_layout.use": True,
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "legend.frameon": False,
        "lines.linewidth": 2.0,
        "image.cmap": "cividis",  # even in lightness, the same to colour-blind readers
        "font.size": 11.0,
        "svg.hashsalt": "minitext",  # the same figure gives the same file
    }
    matplotlib.rcParams.update(style)
    running = shell()
    if running is not None:
        running.run_line_magic("config", "InlineBackend.figure_formats = ['svg']")


def _subplots(*args: Any, **kwargs: Any) -> Any:
    """Calls `plt.subplots`; matplotlib is optional, so only drawing imports it."""
    import matplotlib.pyplot as plt

    return plt.subplots(*args, **kwargs)


def sketch(width: float, height: float, panels: int = 1, **kwargs: Any) -> Any:
    """Makes a figure without axes, to draw boxes and arrows on.

    Args:
      width: inches; so is `height`.
      height: also the units from the bottom to the top of a panel, so that texts keep their size beside boxes.
      panels: how many, side by side. Each is `width / panels` units wide.
      **kwargs: for `plt.subplots`.

    Returns:
      (figure, axes), as from `plt.subplots`.
    """
    figure, axes = _subplots(1, panels, figsize=(width, height), **kwargs)
    for ax in [axes] if panels == 1 else axes:
        ax.set(xlim=(0, width / panels), ylim=(0, height))
        ax.axis("off")
    return figure, axes


def draw_box(
    axes: Any, x: float, y: float, width: float, height: float, text: str = "", color: str = INK,
    alpha: float = 1.0, **look: Any,
) -> None:  # fmt: skip
    """Draws a rectangle with a text of 9 points in its middle.

    `alpha` is the face's: text and edge are white on a solid face; on a pale one they are grey and `color`. `look` has
    further properties of the rectangle, such as `hatch`.
    """
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    ink, weight, edge = ("white", "bold", "white") if alpha > 0.6 else (INK, "normal", color)
    hatch = look.pop("hatch", None)
    look = {"ec": edge, "lw": 0.8, "fc": to_rgba(color, alpha), "clip_on": False} | look
    axes.add_patch(Rectangle((x, y), width, height, **look))
    if hatch:  # by itself: in an SVG it would be as pale as the face
        look |= {"fc": "none", "lw": 0}
        axes.add_patch(Rectangle((x, y), width, height, hatch=hatch, **look))
    spot = x + width / 2, y + height / 2
    axes.text(*spot, text, color=ink, weight=weight, ha="center", va="center", fontsize=9)


def draw_arrow(axes: Any, start: Any, end: Any, color: str = INK, **look: Any) -> None:
    """Draws an arrow from one (x, y) to another. `look` has further properties of it, such as `connectionstyle`."""
    look = {"arrowstyle": "-|>", "color": color, "shrinkA": 0, "shrinkB": 0} | look
    axes.annotate("", end, start, arrowprops=look)


def draw_fusion(fusion: Any) -> Any:
    """Draws a `minitext.compiler.hlo.Fusion`: what is read from memory, what stays in registers, what is written.

    Returns:
      The figure, in which each operation is below its operands.
    """
    inside = [i for i in fusion.inside if i.opcode not in ("constant", "tuple")]
    if not inside:
        raise UserError(
            f"{fusion.name} has nothing to draw: its text is truncated, or not a fusion's"
        )
    level: dict[str, int] = {}
    for i in inside:
        level[i.name] = 1 + max((level[o] for o in i.operands if o in level), default=-1)
    rows = [[i for i in inside if level[i.name] == n] for n in range(max(level.values()) + 1)]
    width, height = max(map(len, rows)), len(rows)
    figure, axes = _subplots(figsize=(max(4.0, 1.7 * width), 0.8 * height + 0.8))
    place = {
        i.name: ((k + 0.5) * width / len(row), -n)
        for n, row in enumerate(rows)
        for k, i in enumerate(row)
    }
    for i in inside:
        in_memory = i.opcode == "parameter" or i is inside[-1]
        edge = COLORS[0] if in_memory else INK
        box = {"boxstyle": "round", "fc": "none", "ec": edge, "lw": 1 + in_memory}
        shape = i.line.partition("{")[0].partition(" ")[0]
        axes.text(
            *place[i.name], f"{i.opcode}\n{shape}", ha="center", va="center", bbox=box, fontsize=8
        )
        for operand in set(i.operands) & place.keys():
            arrow = {"arrowstyle": "->", "color": INK, "shrinkA": 14, "shrinkB": 14}
            axes.annotate("", place[i.name], place[operand], arrowprops=arrow)
    axes.set(xlim=(0, width), ylim=(-height + 0.4, 0.6))
    axes.axis("off")
    axes.set_title(
        f"{fusion.name}\nreads {fusion.read:,} bytes, writes {fusion.written:,}", fontsize=9
    )
    return figure


def draw_collectives(module: Any) -> Any:
    """Draws what each collective of a `minitext.compiler.hlo.Module` sends in all its runs.

    Returns:
      The figure. Collectives with solid bars block; hatched ones overlap with other work.
    """
    found = sorted(module.collectives(), key=lambda c: c.runs * c.moved)
    figure, axes = _subplots(figsize=(6.4, 0.4 * len(found) + 1.2))
    kinds = sorted({c.kind for c in found})
    for n, c in enumerate(found):
        style: dict[str, Any] = {"color": COLORS[kinds.index(c.kind) % len(COLORS)]}
        if c.overlapped:
            style = {"fc": "none", "ec": style["color"], "hatch": "//"}
        axes.barh(n, c.runs * c.moved / 2**20, **style)
    axes.set_yticks(range(len(found)), [f"{c.kind} x{c.runs}, groups of {c.group}" for c in found])
    axes.set_xlabel("MiB sent by each device")
    return figure


def draw_roofline(prediction: Any, dtype: str = "float32") -> Any:
    """Draws a `minitext.perf.roofline.Prediction` under its machine's roofline, a disc for each operation.

    Args:
      prediction: what to draw, by intensity and predicted rate.
      dtype: the type whose matmul peak is the roof.

    Returns:
      The figure. A disc's area is the time of all runs of its operation.
    """
    machine, parts = prediction.machine, dict(zip(prediction.parts, COLORS, strict=False))
    peak, ridge = machine.peak(dtype), machine.ridge(dtype)
    discs = [row for row in prediction.rows if row["flops"] and row["seconds"]]
    reach = [row["intensity"] for row in discs] + [ridge]
    bends = [min(reach) / 3, ridge, max(reach) * 4]
    roof = [min(peak, x * machine.bandwidth) / 1e9 for x in bends]
    figure, axes = _subplots(figsize=(7, 4.4))
    axes.loglog(bends, roof, color=INK, ls="-", lw=2.5)
    axes.axvline(ridge, color=INK, ls=":", lw=1.2)
    for part, color in parts.items():
        axes.scatter([], [], s=80, color=color, alpha=0.6, lw=0, label=part)
    for row in discs:  # longest first, so that short ones are on top
        rate = row["flops"] * row["runs"] / prediction.devices / row["seconds"] / 1e9
        area = 10_000 * row["seconds"] / prediction.seconds
        axes.scatter(row["intensity"], rate, s=area, color=parts[row["part"]], alpha=0.5, lw=0)
    axes.set(xlabel="intensity, FLOPs per byte", ylabel="GFLOP/s", ylim=(None, 5 * peak / 1e9))
    axes.legend(loc="lower right")
    return figure


def draw_sharding(parameters: Any, mesh: Any) -> Any:
    """Draws which device of a mesh holds which part of each parameter.

    Args:
      parameters: `minitext.perf.shard_report.Parameter`s; optimizer state is left out.
      mesh: the mesh, or an abstract one.

    Returns:
      The figure: a panel for each parameter, its last two dimensions as rows and columns. A cell is a part; its colour
      and number are those of the first device that holds it, and the title says how many copies there are.
    """
    import numpy as np

    drawn = [p for p in parameters if p.name.startswith("params.") and len(p.axes) > 1]
    columns = min(3, len(drawn))
    rows = -(-len(drawn) // columns)
    figure, panels = _subplots(rows, columns, figsize=(7, 1.9 * rows), squeeze=False)
    for axes in panels.flat[len(drawn) :]:
        axes.axis("off")
    for axes, p in zip(panels.flat, drawn, strict=False):
        first = _first_devices(p.spec[-2:], mesh)
        # Edges separate the parts even if neighbours have the same colour.
        edges = {"edgecolor": INK, "linewidth": 0.5} if first.size <= 64 else {}
        axes.pcolormesh(first, vmin=0, vmax=max(1, mesh.size - 1), **edges)
        axes.invert_yaxis()
        if first.size <= 64:
            for (i, k), device in np.ndenumerate(first):
                axes.text(k + 0.5, i + 0.5, str(device), ha="center", va="center", fontsize=8,
                          color="white" if device < 0.6 * mesh.size else "black")  # fmt: skip
        copies = mesh.size // max(1, round(p.bytes / p.device_bytes))
        name, noun = p.name.removeprefix("params."), "copy" if copies == 1 else "copies"
        axes.set_title(f"{name}\n{copies} {noun}", fontsize=8)
        axes.set(xticks=[], yticks=[])
        axes.set_ylabel(p.axes[-2], fontsize=8)
        axes.set_xlabel(p.axes[-1], fontsize=8)
        axes.grid(False)
    return figure


def _first_devices(spec: Any, mesh: Any) -> Any:
    """Returns [rows, columns] the number of the first device with each part."""
    import numpy as np

    numbers = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    names = list(mesh.shape)
    order = [names.index(axis) for entry in spec for axis in entry]
    others = [i for i in range(len(names)) if i not in order]
    sizes = (math.prod(mesh.shape[axis] for axis in entry) for entry in spec)
    return numbers.transpose(*order, *others).reshape(*sizes, -1)[..., 0]


def draw_bundles(kernels: Any, parts: int = 120) -> Any:
    """Draws what each unit of the chip does along a kernel's machine code.

    Args:
      kernels: `minitext.compiler.llo.Kernel`s.
      parts: stretches into which each kernel's bundles are divided.

    Returns:
      The figure: a panel for each kernel, its first bundle on the left. A stretch is brighter the more of its bundles
      keep the unit busy; the share of all bundles is on the right.
    """
    figure, panels = _subplots(len(kernels), 1, figsize=(7, 1.9 * len(kernels)), squeeze=False)
    for axes, kernel in zip(panels.flat, kernels, strict=True):
        strip = kernel.strip(parts)
        ends = (0, kernel.bundles, len(strip) - 0.5, -0.5)
        axes.imshow(list(strip.values()), aspect="auto", vmin=0, vmax=1, extent=ends)
        axes.set_yticks(range(len(strip)), strip)
        for row, unit in enumerate(strip):
            share = f" {kernel.share(unit):.0%}"
            axes.text(kernel.bundles, row, share, va="center", fontsize=8)
        axes.set_title(f"{kernel.name} on {kernel.chip}", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(False)
    panels[-1, 0].set_xlabel("bundles")
    return figure


def save_figure(file: str, draw: Callable[[], Any]) -> None:
    """Writes a figure to a file, in the format of the name's ending.

    Raises:
      UserError: if matplotlib is not installed, or it cannot write the file or the format.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise UserError("drawing needs matplotlib: pip install 'minitext[book]'") from error
    matplotlib.use("agg")
    figure_style()
    figure = draw()
    try:
        figure.savefig(file, facecolor="white", dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot draw into {file}: {error}") from error


def shell() -> Any:
    """Returns the running IPython shell, or None in a plain Python process."""
    try:
        from IPython.core.getipython import get_ipython
    except ModuleNotFoundError:
        return None
    return get_ipython()


def plot_goodput(goodput: Any) -> Any:
    """Draws a `minitext.observability.goodput.Goodput`: what happened when, and the share of each kind of time.

    Returns:
      The figure: at the top a strip of the wall time, below it a bar for each kind, largest first.
    """
    seconds = goodput.seconds
    kinds = sorted((k for k in seconds if seconds[k] >= 1e-3), key=lambda k: -seconds[k])
    # Productive steps have the first colour; hatches distinguish kinds that share one of the others.
    order = ["step", *(kind for kind in kinds if kind != "step")]
    hatches = ("", "//", "..", "xx")
    looks = {
        kind: {"color": COLORS[i % 5], "hatch": hatches[i // 5], "edgecolor": INK, "linewidth": 0}
        for i, kind in enumerate(order)
    }
    figure, (strip, bars) = _subplots(
        2, 1, figsize=(6.4, 1.4 + 0.3 * len(kinds)), height_ratios=(1, 0.6 * len(kinds) + 0.1)
    )
    begin = goodput.spans[0].start if goodput.spans else 0.0
    for span in (s for s in goodput.spans if s.event in looks):
        strip.barh(0, span.seconds, left=span.start - begin, **looks[span.event])
    strip.set(yticks=[], xlim=(0, goodput.wall or 1), xlabel="seconds since the run began")
    strip.grid(False)
    for row, kind in enumerate(kinds):
        share = goodput.share(kind)
        bars.barh(kind, share, **looks[kind])
        bars.text(share, row, f" {share:.1%}", va="center", fontsize=9)
    bars.invert_yaxis()
    bars.grid(False, axis="y")
    bars.set(
        xlabel="share of the wall time", xlim=(0, 1.1 * max(map(goodput.share, kinds), default=1.0))
    )
    strip.set_title(f"goodput {goodput.goodput:.1%}")
    return figure


def plot_downtime(downtime: Any) -> Any:
    """Draws a `minitext.observability.downtime.Downtime`: as `plot_goodput`, with an arrow for each fault.

    Returns:
      The figure.
    """
    figure = plot_goodput(downtime)
    strip = figure.axes[0]
    began = downtime.spans[0].start if downtime.spans else 0.0
    named = len(downtime.bills) <= MOST_NAMED
    for bill in downtime.bills:
        at = bill.strike.at - began
        strip.annotate(
            bill.strike.kind if named else "", (at, 0.4), (at, 0.75), fontsize=7, rotation=60, ha="left",
            va="bottom", annotation_clip=False, arrowprops={"arrowstyle": "-|>", "color": INK, "shrinkB": 0},
        )  # fmt: skip
    title = strip.get_title()
    strip.set_title("")
    strip.set_title(title, loc="left", pad=38 if named else 14)
    return figure


def plot_schedule(events: Any, start: float = 0.0, end: float | None = None) -> Any:
    """Draws what the core and the queues of a `minitext.perf.step_time.StepTime` do, from `start` to `end` seconds.

    Only a loop's first iteration is drawn; the others are a grey stretch with their number.

    Returns:
      The figure: a lane for each queue, and one for the time that the core waits.
    """
    end = float(max((event.end for event in events), default=1.0) if end is None else end)
    lanes = ("compute", "kernels", "wait", "ici", "dcn", "dma", "host")
    shown = [event for event in events if event.end > start and event.start < end]
    used = [lane for lane in lanes if any(event.queue == lane for event in shown)]
    unit, name = (1.0, "s") if end - start >= 1 else (1e3, "ms")
    figure, axes = _subplots(figsize=(7, 0.45 * len(used) + 1.1))
    for row, lane in enumerate(used):
        bars = [(e.start * unit, (e.end - e.start) * unit) for e in shown if e.queue == lane]
        color = INK if lane == "wait" else COLORS[row % len(COLORS)]
        axes.broken_barh(bars, (row - 0.38, 0.76), color=color, alpha=0.5 if lane == "wait" else 1)
    for loop in (e for e in shown if e.queue == "loop" and e.trips > 1):
        inside = [e.end for e in events if loop.start <= e.start < loop.end and e.queue != "loop"]
        first = max((at for at in inside if at <= loop.end), default=loop.start)
        axes.axvspan(first * unit, loop.end * unit, color=INK, alpha=0.15)
        middle = (max(first, start) + min(loop.end, end)) / 2 * unit
        axes.text(middle, -0.7, f"{loop.trips - 1} more iterations", ha="center", fontsize=8)
    axes.set_yticks(range(len(used)), used)
    axes.set(xlim=(start * unit, end * unit), ylim=(len(used) - 0.5, -1.0), xlabel=f"time, {name}")
    return figure


def draw_storage(schemes: Any) -> Any:
    """Draws the perplexity of each `minitext.training.quantize_run.Scheme` against the bytes of its parameters.

    Returns:
      The figure, with a point for each scheme and its name beside it.
    """
    figure, axes = _subplots(figsize=(6.4, 3.6))
    for number, scheme in enumerate(schemes):
        size = scheme.bytes / 2**20
        axes.plot(size, scheme.perplexity, "o", color=COLORS[number % len(COLORS)])
        axes.annotate(
            scheme.name,
            (size, scheme.perplexity),
            xytext=(6, 4),
            textcoords="offset points",
            fontsize=9,
        )
    axes.margins(0.2, 0.15)
    axes.set(xlabel="parameters, MiB", ylabel="perplexity")
    return figure
