"""Line charts as SVG that takes its colours from the page: readable in light and dark, on paper and on a phone.

Drawn by hand: matplotlib writes its colours into the file, so a page would need each picture twice, and the journey
should not need the book's extra for its report.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 480, 290
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 14, 44
TICKS = 5  # about so many


class Line(NamedTuple):
    """A series.

    Attributes:
      label: in the legend.
      points: (x, y), ascending in x.
      dots: whether its points are drawn as dots alone, not joined.
    """

    label: str
    points: Sequence[Sequence[float]]
    dots: bool = False


class Axis(NamedTuple):
    """What an axis shows.

    Attributes:
      label: with the unit.
      log: whether it is logarithmic.
      percent: whether its numbers are shares.
    """

    label: str
    log: bool = False
    percent: bool = False


def chart(title: str, lines: Sequence[Line], x: Axis, y: Axis) -> str:
    """Returns a figure with a chart and its legend, as HTML; a sentence instead if nothing can be drawn."""
    lines = [one._replace(points=_drawable(one.points, x, y)) for one in lines]
    lines = [one for one in lines if one.points]
    if not lines:
        return f"<figure><figcaption>{escape(title)}: nothing was recorded</figcaption></figure>"
    to_x = _Scale([p[0] for one in lines for p in one.points], x.log, LEFT, WIDTH - RIGHT, 0.0)
    least = [0.0, 0.05] if y.percent else []  # shares are seen from 0
    to_y = _Scale(
        [*least, *(p[1] for one in lines for p in one.points)], y.log, HEIGHT - BOTTOM, TOP, 0.04
    )
    parts = [*_grid(x, y, to_x, to_y)]
    for number, one in enumerate(lines):
        spots = [(to_x(p[0]), to_y(p[1])) for p in one.points]
        if one.dots or len(spots) == 1:
            parts += [
                f'<circle class="s{number}" cx="{a:.1f}" cy="{b:.1f}" r="4.5"/>' for a, b in spots
            ]
        else:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in spots)
            parts.append(f'<polyline class="s{number}" points="{path}"/>')
    legend = "".join(
        f'<span class="key"><svg width="22" height="10" aria-hidden="true">{_sample(n, one)}</svg>'
        f"{escape(one.label)}</span>"
        for n, one in enumerate(lines)
    )
    said = escape(f"{title}: {', '.join(one.label for one in lines)}")
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{said}">{"".join(parts)}</svg><div class="legend">{legend}</div></figure>'
    )


def _drawable(points: Sequence[Sequence[float]], x: Axis, y: Axis) -> list[tuple[float, float]]:
    """Returns the points that can be drawn: finite, and above 0 on a logarithmic axis. Metrics write NaN as a word."""
    numbers = [(p[0], p[1]) for p in points if all(isinstance(v, int | float) for v in p)]
    return [
        (a, b) for a, b in numbers
        if math.isfinite(a) and math.isfinite(b) and not (x.log and a <= 0) and not (y.log and b <= 0)
    ]  # fmt: skip


class _Scale:
    """Maps values to positions, with a margin around them."""

    def __init__(self, values: Sequence[float], log: bool, start: float, end: float, margin: float):
        self.log, self.start, self.end = log, start, end
        low, high = self._at(min(values)), self._at(max(values))
        room = margin * (high - low) or (0.5 if high == low else 0.0)
        self.low, self.high = low - room, high + room

    def _at(self, value: float) -> float:
        return math.log10(value) if self.log else float(value)

    def __call__(self, value: float) -> float:
        share = (self._at(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Returns round values within the range."""
        if self.log and self.high - self.low >= 1:
            every = math.ceil((self.high - self.low) / TICKS)
            first = math.ceil(self.low)
            return [10.0**e for e in range(first, math.floor(self.high) + 1, every)]
        low, high = (10**self.low, 10**self.high) if self.log else (self.low, self.high)
        rough = (high - low) / TICKS
        unit = 10 ** math.floor(math.log10(rough))
        step = next(unit * f for f in (1, 2, 5, 10) if unit * f >= rough)
        first = math.ceil(low / step)
        return [i * step for i in range(first, math.floor(high / step) + 1)]


def _grid(x: Axis, y: Axis, to_x: _Scale, to_y: _Scale) -> list[str]:
    base, parts = HEIGHT - BOTTOM, []
    for value in to_y.ticks():
        at = to_y(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        parts.append(
            f'<text class="end" x="{LEFT - 6}" y="{at + 4:.1f}">{_number(value, y)}</text>'
        )
    for value in to_x.ticks():
        at = to_x(value)
        parts.append(
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{base}" y2="{base + 4}"/>'
        )
        parts.append(f'<text class="mid" x="{at:.1f}" y="{base + 17}">{_number(value, x)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="mid" x="{middle}" y="{HEIGHT - 6}">{escape(x.label)}</text>')
    center = (TOP + base) / 2
    parts.append(
        f'<text class="mid" x="12" y="{center}" transform="rotate(-90 12 {center})">{escape(y.label)}</text>'
    )
    return parts


def _number(value: float, axis: Axis) -> str:
    if axis.percent:
        return f"{value:.0%}"
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return f"{value:,.4g}"


def _sample(number: int, line: Line) -> str:
    if line.dots:
        return f'<circle class="s{number}" cx="11" cy="5" r="4.5"/>'
    return f'<polyline class="s{number}" points="1,5 21,5"/>'
