"""Draws the README's picture from a run: its loss, and the text it wrote on the way.

python book/first_run.py runs/NAME     (writes book/_static/first-run.svg)
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt

from minitext.observability.metrics import read_metrics
from minitext.perf.figures import figure_style

LINES, WIDTH = 4, 46


def main(directory: Path) -> None:
    """Reads the run and writes the picture."""
    figure_style()
    # A picture that stands outside the book brings its own ground, so that it reads in dark mode too.
    plt.rcParams.update(
        {"savefig.transparent": False, "svg.fonttype": "path", "svg.hashsalt": "minitext"}
    )
    records = read_metrics(directory)
    held_out = [r for r in records if "val_loss" in r]
    figure, (curve, text) = plt.subplots(
        1, 2, figsize=(10, 3.6), width_ratios=(5, 6), facecolor="white"
    )
    curve.set_facecolor("white")
    curve.plot(
        [r["step"] for r in records], [r["loss"] for r in records], alpha=0.5, label="training"
    )
    curve.plot(
        [r["step"] for r in held_out], [r["val_loss"] for r in held_out], "o-", label="validation"
    )
    curve.set(xlabel="step", ylabel="loss (nats per byte)", title="two minutes on two cores")
    curve.legend(frameon=False)
    text.axis("off")
    blocks = (directory / "samples.txt").read_text(encoding="utf-8").split("--- step ")[1:]
    for i, block in enumerate(blocks[:3]):
        step, _, written = block.partition("\n")
        lines = [line[:WIDTH] for line in written.partition("|")[2].splitlines() if line.strip()][
            :LINES
        ]
        shown = "\n".join("".join(c if 31 < ord(c) < 127 else "·" for c in line) for line in lines)
        top = 1.0 - i * 0.36
        text.text(
            0,
            top,
            f"what it writes at step {step}",
            va="top",
            weight="bold",
            size=9,
            color="#404040",
        )
        text.text(0.02, top - 0.08, shown, va="top", family="monospace", size=8.5, color="#202020")
    figure.set_layout_engine("constrained")
    figure.savefig(Path(__file__).parent / "_static" / "first-run.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
