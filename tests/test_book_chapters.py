"""What a chapter looks like: its number, its Predicts, and what is folded away."""

import functools
import re
from pathlib import Path

import pytest

CHAPTERS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("[0-9]*.md"))
FOLDED = {"hide-input", "remove-input", "remove-cell", "exercise"}


# Words and turns of phrase that readers stumbled over.
STILTED = (
    r"\bnobody\b", r"\bbesides\b", r"\bshall\b", r"\banew\b", r", of which\b", r"\bthereby\b", r"\bwherein\b",
    r"\bin the place of\b", r"\bdear(?:er|est)\b", r"\btrained so\b", r"\bwaits? to be\b", r"\balso NaN\b",
)  # fmt: skip


@functools.cache
def read(path):
    import jupytext  # for seconds: it compiles a grammar

    return jupytext.read(path).cells


@pytest.fixture(params=CHAPTERS, ids=lambda path: path.stem)
def cells(request):
    return read(request.param)


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


def test_visible_code_fits_80_columns(cells):
    """A page of 1,280 pixels shows so many; what installs minitext is one address."""
    shown = [
        line
        for cell in cells
        if cell.cell_type == "code"
        and not (FOLDED - {"exercise"}) & set(cell.metadata.get("tags", ()))
        for line in cell.source.splitlines()
        if "%pip" not in line
    ]
    assert not [line for line in shown if len(line) > 80]


def test_solutions_fit_80_columns():
    """They are printed beside the stubs."""
    for path in (CHAPTERS[0].parents[1] / "exercises" / "solutions").glob("*.py"):
        assert not [line for line in path.read_text().splitlines() if len(line) > 80], path


def test_a_chapter_has_five_pictures(cells):
    """Steps through a picture count as one."""
    drawn = [
        cell
        for cell in cells
        if cell.cell_type == "code"
        and (
            {"image", "figure"} & set(cell.metadata.get("mystnb", {}))
            or "step_through(" in cell.source
        )
    ]
    written = [cell for cell in cells if cell.cell_type == "markdown"]
    written = re.findall(r"!\[|```\{(?:image|figure)\}", "".join(cell.source for cell in written))
    assert len(drawn) + len(written) >= 5


def test_the_text_has_none_of_the_phrases_that_readers_stumbled_over(cells):
    text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    text = re.sub(r"```.*?```|`[^`\n]+`", "", text, flags=re.DOTALL)
    found = [match[0] for phrase in STILTED for match in re.finditer(phrase, text)]
    assert not found


# Terms that are everyday words too: their plain meaning needs no glossary.
EVERYDAY = re.compile(
    r"advantage|barrier|batch|block|bucket|capacity|checkpoint|computation|decode|exposed|grid|head|instruction|kernel"
    r"|latency|ledger|manifest|module|page|positions?|profile|race|ref|residual|ring|scale|scratch|slice|spill|stage"
    r"|step|temperature|token|topology|trace"
)


def test_no_term_of_the_glossary_is_used_before_it_is_introduced():
    """The first chapter that uses a term links it, sets it in bold or italics, or has it in a heading."""
    glossary = (CHAPTERS[0].parents[1] / "book" / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^(\w.*)$", glossary.split("```{glossary}\n")[1], flags=re.MULTILINE)
    assert len(terms) > 200
    unmet = dict.fromkeys(term for term in terms if not EVERYDAY.fullmatch(term))
    early = {}
    for path in CHAPTERS:
        cells = "\n\n".join(c.source for c in read(path) if c.cell_type == "markdown")
        text = re.sub(r"<!-- exercise .*?<!-- end exercise .*?-->", "", cells, flags=re.DOTALL)
        links = re.findall(r"\{term\}`(?:[^`<]*<)?([^`>]+)", text)
        headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
        emphasised = [words for _, words in re.findall(r"(\*\*?)(?=\S)([^*]+)(?<=\S)\1", text)]
        introduced = "\n".join(links + headings + emphasised)
        plain = re.sub(r"```.*?```|`[^`]*`|\$[^$]*\$", "", text, flags=re.DOTALL)
        for term in list(unmet):
            flags = re.IGNORECASE if term.islower() else 0
            word = re.compile(rf"(?<![\w/-]){re.escape(term)}(?:e?s)?(?![\w/-])", flags)
            if word.search(introduced):
                del unmet[term]
            elif word.search(plain):
                early[term] = path.stem
                del unmet[term]
    assert not early
