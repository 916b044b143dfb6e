"""minitext.book.notebook: what the chapters' first cell and listings rely on."""

import functools
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from minitext.book import notebook
from minitext.compiler import hlo
from minitext.errors import UserError
from minitext.perf import figures


def run_python(code: str, **env: str) -> subprocess.CompletedProcess:
    """Run code in a new process, where JAX has not started."""
    clean = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run_cells(*cells: str) -> list[list[dict]]:
    """Execute cells in a real kernel; each cell's outputs."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(book, timeout=120, kernel_name="python3").execute()
    return [cell["outputs"] for cell in book.cells]


def test_setup_simulates_devices_and_may_be_called_again():
    code = """
        import jax  # a chapter may import JAX before it calls setup
        from minitext.book.notebook import setup
        setup(devices=4); setup(devices=4); setup()
        assert len(jax.devices()) == 4 and jax.default_backend() == "cpu", jax.devices()
    """
    done = run_python(re.sub(r"(?m)^ {8}", "", code))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_setup_too_late_says_how_to_fix_it():
    code = """
        import jax
        from minitext.book.notebook import setup
        setup()
        jax.devices()
        setup(devices=2)
    """
    done = run_python(re.sub(r"(?m)^ {8}", "", code), JAX_PLATFORMS="cpu")
    last = done.stderr.strip().splitlines()[-1]
    assert "2 simulated devices were asked for and JAX runs with 1 cpu device" in last
    assert "restart the kernel" in last


def test_setup_keeps_a_platform_you_named(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    notebook.setup()
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_setup_rejects_no_devices():
    with pytest.raises(UserError, match="at least 1"):
        notebook.setup(devices=0)


def test_package_and_notebook_module_leave_plotting_out():
    code = (
        "import sys, minitext.book.notebook; bad = {'IPython', 'matplotlib', 'jax'} & set(sys.modules);"
        "assert not bad, bad"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def luminance(color: str) -> float:
    """Relative luminance of WCAG 2."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("color", [*figures.COLORS, figures.INK])
@pytest.mark.parametrize("ground", ["#ffffff", "#15181d"])
def test_figure_colors_read_on_white_and_on_black(color, ground):
    assert contrast(color, ground) >= 3


def test_figures_read_in_grey():
    """Lines that follow each other differ in lightness, and every line has a style of its own."""
    assert len(set(figures.LINESTYLES)) == len(figures.COLORS) == len(set(figures.COLORS))
    lightness = [luminance(color) ** (1 / 3) for color in figures.COLORS]
    steps = [abs(a - b) for a, b in itertools.pairwise(lightness)]
    assert min(steps) > 0.03


def test_figure_style_is_transparent():
    import matplotlib

    with matplotlib.rc_context():
        figures.figure_style()
        assert matplotlib.rcParams["savefig.facecolor"] == "none"
        assert [c["color"] for c in matplotlib.rcParams["axes.prop_cycle"]] == list(figures.COLORS)


@jax.custom_vjp
def cube(x):
    """A function under three wrappers."""
    return x**3


cube.defvjp(lambda x: (x**3, x), lambda x, g: (3 * x**2 * g,))


class Thing:
    @property
    def size(self):
        return 1

    @staticmethod
    def make():
        return Thing()


@pytest.mark.parametrize(
    ("obj", "starts"),
    [
        (cube, "@jax.custom_vjp\ndef cube(x):"),
        (jax.jit(cube), "@jax.custom_vjp\ndef cube(x):"),
        (functools.partial(jax.jit(cube), 2.0), "@jax.custom_vjp\ndef cube(x):"),
        (Thing, "class Thing:"),
        (Thing.size, "@property\ndef size(self):"),
        (Thing().make, "@staticmethod\ndef make():"),
    ],
)
def test_show_removes_wrappers(obj, starts, capsys):
    notebook.show(obj)
    heading, source = capsys.readouterr().out.split("\n", 1)
    assert re.fullmatch(r"# test_notebook\.py, lines \d+ to \d+", heading)
    assert source.startswith(starts)


def test_show_names_the_package_file_and_its_lines(capsys):
    notebook.show(notebook.show)
    heading, source = capsys.readouterr().out.split("\n", 1)
    first, last = map(int, re.findall(r"\d+", heading))
    lines = Path(notebook.__file__).read_text().splitlines()
    assert heading.startswith("# minitext/book/notebook.py, lines ")
    assert source.rstrip("\n").splitlines() == lines[first - 1 : last]


def test_show_prints_a_module_whole(capsys):
    import minitext.errors

    notebook.show(minitext.errors)
    assert "class UserError(Exception):" in capsys.readouterr().out


@pytest.mark.parametrize("value", [3, ("data", "fsdp"), None, "text", {"a": 1}])
def test_show_rejects_values(value):
    with pytest.raises(UserError, match=f"type {type(value).__name__}, which has no source"):
        notebook.show(value)


def test_show_rejects_compiled_code():
    with pytest.raises(UserError, match=r"show\(len\)"):
        notebook.show(len)


def test_in_a_kernel():
    """Listings are Markdown with a link, figures SVG with an empty ground, glued arrays numbers."""
    listing, figure, glued = run_cells(
        "from minitext.book.notebook import setup, show, glue; setup(); show(setup)",
        "import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()",
        "import jax.numpy as jnp; glue('three', jnp.float32(3.0)); glue('seen', 2, display=True)",
    )
    text = listing[0]["data"]["text/markdown"]
    url = re.escape(notebook.repository_url())
    assert re.match(
        rf"\[minitext/book/notebook\.py, lines (\d+) to (\d+)\]"
        rf"\({url}/blob/main/minitext/book/notebook\.py#L\1-L\2\)\n\n```python\ndef setup",
        text,
    )
    svg = figure[0]["data"]["image/svg+xml"]
    assert figures.COLORS[0] in svg
    assert 'id="patch_1"' in svg and "fill: none" in svg
    values = {o["metadata"]["scrapbook"]["name"]: json.dumps(o["data"]) for o in glued}
    assert '"3.0"' in values["three"]
    assert '"2"' in values["seen"]


def test_glue_turns_one_element_arrays_into_numbers(monkeypatch):
    import myst_nb

    seen = {}
    monkeypatch.setattr(myst_nb, "glue", lambda name, value, display: seen.update({name: value}))
    notebook.glue("a", jnp.float32(1.5))
    notebook.glue("b", jnp.ones((2,)))
    assert seen["a"] == 1.5 and type(seen["a"]) is float
    assert seen["b"].shape == (2,)


def test_a_fusion_and_a_step_s_collectives_are_drawn():
    import matplotlib.pyplot as plt

    text = (
        jax.jit(lambda x: jnp.tanh(x) * 2 + jnp.sin(x)).lower(jnp.ones((8, 64))).compile().as_text()
    )
    (fusion,) = hlo.Module(text).fusions()
    drawn = {text.get_text().split("\n")[0] for text in figures.draw_fusion(fusion).axes[0].texts}
    assert {"parameter", "tanh", "sine", "multiply", "add"} <= drawn
    gathered = """\
ENTRY %main (w: f32[4]) -> f32[8] {
  %w = f32[4]{0} parameter(0)
  %start = (f32[4]{0}, f32[8]{0}) all-gather-start(%w), replica_groups={{0,1}}
  %work = f32[4]{0} negate(%w)
  %done = f32[8]{0} all-gather-done(%start)
  ROOT %sum = f32[8]{0} all-reduce(%done), replica_groups={{0,1}}
}
"""
    bars = figures.draw_collectives(hlo.Module(gathered)).axes[0].patches
    assert sorted(bar.get_width() * 2**20 for bar in bars) == [16, 32]
    assert [bool(bar.get_hatch()) for bar in bars] == [True, False]
    plt.close("all")
