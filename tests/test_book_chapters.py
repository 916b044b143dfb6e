"""What a chapter looks like: its number, its Predicts, and what is folded away."""

import re
from pathlib import Path

import jupytext
import pytest

CHAPTERS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("[0-9]*.md"))
FOLDED = {"hide-input", "remove-input", "remove-cell", "exercise"}


@pytest.fixture(params=CHAPTERS, ids=lambda path: path.stem)
def cells(request):
    return jupytext.read(request.param).cells


def predicts(cells):
    texts = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return re.findall(r"\*\*Predict[.:]?\*\*(.*?)(?:\n\s*\n|\Z)", texts, re.DOTALL)


def test_the_title_has_the_chapters_number(cells, request):
    number = int(request.node.callspec.params["cells"].name[:2])
    title = next(c.source for c in cells if c.cell_type == "markdown").partition("\n")[0]
    assert re.fullmatch(rf"# {number}\. \S.*", title)


def test_a_predict_asks_one_question_in_a_box_of_its_own(cells):
    found = predicts(cells)
    assert len(found) >= 3
    assert not [text for text in found if text.count("?") > 1]
    boxed = [c for c in cells if c.cell_type == "markdown" and "**Predict" in c.source]
    lines = [line for c in boxed for line in c.source.splitlines() if "**Predict" in line]
    assert not [line for line in lines if not line.startswith((">", ":::", "```"))]


def test_plumbing_is_folded(cells):
    """Imports, and cells that draw a picture; an exercise shows what it imports."""
    for cell in cells:
        if cell.cell_type != "code" or FOLDED & set(cell.metadata.get("tags", ())):
            continue
        assert not {"image", "figure"} & set(cell.metadata.get("mystnb", {})), cell.source[:80]
        assert len(re.findall(r"^(?:import|from) ", cell.source, re.MULTILINE)) < 5, cell.source[
            :80
        ]
