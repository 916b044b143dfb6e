"""Step-throughs: pictures of one computation that the reader moves through with a slider.

`step_through` puts its frames, style and script into one piece of HTML, so it works offline in the book, in Jupyter and
on Colab. Without JavaScript, and on paper, all frames are shown one after another.
"""

import hashlib
import html
import io
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from minitext.errors import UserError

FONTS = "DejaVu Sans,Verdana,sans-serif"

STYLE = """
.mt-steps{max-width:46rem;margin:1rem 0}
.mt-steps figure{margin:0 0 1.2rem}
.mt-steps img{display:block;width:100%;max-width:var(--w);height:auto;margin:0 auto}
.mt-steps figcaption{text-align:left;margin-top:.4rem}
.mt-bar{display:flex;align-items:center;gap:.6rem;max-width:32rem;margin:0 auto .6rem}
.mt-bar[hidden]{display:none}
.mt-bar input{flex:1;min-width:0;height:2.4rem}
.mt-bar button{font:inherit;color:inherit;background:none;border:1px solid;border-radius:6px;min-width:2.6rem;
height:2.4rem;cursor:pointer}
@media screen{
.mt-live .mt-frames{display:grid}
.mt-live figure{grid-area:1/1;visibility:hidden;margin:0}
.mt-live figure.mt-on{visibility:visible}
}
@media print{
.mt-bar{display:none!important}
.mt-frames{display:grid;grid-template-columns:1fr 1fr;gap:.5rem 1rem}
.mt-steps figure{break-inside:avoid}
}
"""

# Hidden frames keep their room, so the page doesn't jump. The slider's keys are the browser's own.
SCRIPT = """
for (const box of document.querySelectorAll("#ID:not(.mt-live)")) {
  const frames = [...box.querySelectorAll("figure")];
  const [back, slider, on] = box.querySelector(".mt-bar").children;
  const show = () => {
    frames.forEach((frame, i) => frame.classList.toggle("mt-on", i == slider.value - 1));
    slider.setAttribute("aria-valuetext", frames[slider.value - 1].textContent);
  };
  const go = by => { slider.value = +slider.value + by; show(); };
  slider.oninput = show;
  back.onclick = () => go(-1);
  on.onclick = () => go(1);
  box.classList.add("mt-live");
  slider.parentNode.hidden = false;
  show();
}
"""


class StepThrough:
    """Frames with captions. A notebook shows them with a slider, a terminal as a list of captions."""

    def __init__(self, frames: list[tuple[str, str]], alt: str):
        self.frames, self.alt = frames, alt

    def __repr__(self) -> str:
        captions = [f"{number}. {text}" for number, (_, text) in enumerate(self.frames, 1)]
        return "\n".join([self.alt, *captions])

    def _repr_html_(self) -> str:
        count, alt = len(self.frames), html.escape(self.alt)
        figures = [
            f'<figure><img src="{_address(svg)}" style="--w:{_width(svg)}" alt="{alt} Step {number} of {count}.">'
            f"<figcaption><b>{number} of {count}.</b> {html.escape(text)}</figcaption></figure>"
            for number, (svg, text) in enumerate(self.frames, 1)
        ]
        # The name follows from the content: running a cell again gives the same page.
        digest = hashlib.sha256("".join([self.alt, *figures]).encode()).hexdigest()
        name = f"mt-steps-{digest[:8]}"
        return (
            f'<style>{STYLE}</style>\n<div class="mt-steps" id="{name}" role="group" aria-label="{alt}">\n'
            '<div class="mt-bar" hidden><button type="button" aria-label="previous step">&#8249;</button>'
            f'<input type="range" min="1" max="{count}" value="1" autocomplete="off" aria-label="step">'
            '<button type="button" aria-label="next step">&#8250;</button></div>\n'
            f'<div class="mt-frames">\n{chr(10).join(figures)}\n</div>\n</div>\n'
            f"<script>(() => {{{SCRIPT.replace('ID', name)}}})();</script>"
        )


def step_through(frames: Iterable[tuple[Any, str]], alt: str) -> StepThrough:
    """Makes a step-through of pictures, for a cell's last line.

    Args:
      frames: (picture, caption) pairs. A picture is a matplotlib figure, which is closed here, or an SVG as text.
      alt: what all pictures show, for readers who don't see them. It ends with a full stop.

    Raises:
      UserError: there are fewer than two frames, or no `alt`.
    """
    made = [(_svg(picture), caption) for picture, caption in frames]
    if len(made) < 2 or not alt:
        raise UserError(
            f"step_through() was given {len(made)} frames and alt={alt!r}: it needs two or more, "
            "and a text for readers who don't see them."
        )
    return StepThrough(made, alt)


def _svg(picture: Any) -> str:
    """A picture as a small SVG, in which text is text."""
    if isinstance(picture, str):
        return picture
    import matplotlib
    import matplotlib.pyplot as plt

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}):
        picture.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(picture)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' transform="rotate\(-0 [^"]*"|(?<=<g) id="[^"]*"', "", svg)
    svg = re.sub(r"(\.\d\d)\d+", r"\1", svg)
    svg = re.sub(r"'DejaVu Sans'(, sans-serif)?", FONTS, svg)
    return re.sub(r"\s*\n\s*", " ", svg)


def _address(svg: str) -> str:
    """An SVG as the address of an image."""
    return "data:image/svg+xml," + quote(svg, safe=" /:;,=()'!*+$?@[]{}|^~")


def _width(svg: str) -> str:
    """How wide an SVG wants to be, or all the room there is."""
    found = re.search(r"<svg[^>]*?\swidth=[\"']([\d.]+(?:px|pt|in|em)?)[\"']", svg)
    return "100%" if found is None else found[1] if found[1][-1].isalpha() else f"{found[1]}px"
