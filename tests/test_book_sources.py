"""What the book is made from: its configuration, its generated pages and its glossary."""

import ast
import importlib.util
import itertools
import json
import pydoc
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml

from minitext import hardware
from minitext.config import config

ROOT = Path(__file__).resolve().parent.parent


def script(name: str) -> ModuleType:
    """A file in book/, none of which are part of the package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "book" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return script("generate")


def book_config() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))


def chapters() -> list[str]:
    """The notebooks in the table of contents."""
    return re.findall(r"file: (notebooks/\S+)", (ROOT / "book" / "_toc.yml").read_text())


def test_repository_url_has_one_value():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert book_config()["repository"]["url"] == project["urls"]["Repository"]


def test_toc_names_the_notebooks_that_colab_opens():
    assert chapters()
    for chapter in chapters():
        assert chapter.endswith(".ipynb")
        assert (ROOT / chapter).is_file(), f"book/_toc.yml names {chapter}, which is not there"


def test_every_chapter_is_in_the_toc():
    assert sorted(chapters()) == sorted(
        f"notebooks/{p.name}" for p in ROOT.glob("notebooks/*.ipynb")
    )


def test_chapters_are_executed_and_errors_are_fatal():
    execute = book_config()["execute"]
    assert execute["execute_notebooks"] in ("force", "cache")
    assert execute["raise_on_error"] and not execute.get("allow_errors")


def test_cells_that_draw_have_alternative_text():
    """The built page's test asks for the same of each image, after half an hour."""
    for chapter in chapters():
        for cell in json.loads((ROOT / chapter).read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] != "code" or "plt." not in (source := "".join(cell["source"])):
                continue
            if "step_through(" in source:  # which demands one
                continue
            image = cell["metadata"].get("mystnb", {}).get("image", {})
            assert image.get("alt"), f"{chapter} draws without alternative text: {source[:80]}"


def heroes(chapter: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The cells of a chapter that draw, and those with the tag `hero`."""
    cells = json.loads((ROOT / chapter).read_text(encoding="utf-8"))["cells"]
    drawing = [c for c in cells if "image" in c["metadata"].get("mystnb", {})]
    return drawing, [c for c in cells if "hero" in c["metadata"].get("tags", ())]


@pytest.mark.parametrize("chapter", chapters())
def test_every_chapter_has_a_picture_for_the_gallery(chapter):
    """That of the cell with the tag `hero`, or else the first."""
    drawing, tagged = heroes(chapter)
    assert drawing and len(tagged) <= 1
    assert all(cell in drawing for cell in tagged)


def test_the_gallery_shows_every_chapter_in_order_with_one_sentence():
    text = (ROOT / "book" / "gallery.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```\{hero\} (\S+)\n(.*?)\n```$", text, re.DOTALL | re.MULTILINE)
    assert [f"notebooks/{name}.ipynb" for name, _ in shown] == chapters()
    for name, sentence in shown:
        assert re.fullmatch(r"[A-Z][^.?!]*\.", sentence), name
    assert "book/gallery" in (ROOT / "book" / "_toc.yml").read_text(encoding="utf-8")


def test_a_chapter_is_remembered_by_its_first_picture_unless_a_cell_has_the_tag():
    nodes = pytest.importorskip("docutils.nodes")
    pytest.importorskip("sphinx")

    def cell(*uris: str, tags: tuple[str, ...] = ()) -> Any:
        images = [nodes.image(uri=uri, alt=f"alt of {uri}") for uri in uris]
        source = nodes.container("", nb_element="cell_code_source")
        outputs = nodes.container("", *images, nb_element="cell_code_output")
        classes = ["cell", *(f"tag_{tag}" for tag in tags)]
        return nodes.container("", source, outputs, nb_element="cell_code", classes=classes)

    picture = script("gallery").picture
    text = nodes.image(uri="from-the-text.svg")
    first = [text, cell(), cell("a.svg", "b.svg"), cell("c.svg")]
    assert picture(nodes.section("", *first))["uri"] == "a.svg"
    tagged = [cell("a.svg"), cell("c.svg", tags=("hide-input", "hero"))]
    assert picture(nodes.section("", *tagged))["alt"] == "alt of c.svg"
    assert picture(nodes.section("", cell(), cell(tags=("hero",)))) is None


def test_reference_has_every_module(generate):
    pages = generate.reference()
    for name in ("config.config", "models.transformer", "data.batches", "book.grading", "errors"):
        room = name.partition(".")[0]
        assert f".. automodule:: minitext.{name}\n" in pages[f"api/{room}.md"]
        assert f"{{py:mod}}`minitext.{name}`" in pages["api.md"]
        assert f"(api/{room}.md)" in pages["api.md"]
    assert "api/cli.md" not in pages


def test_hardware_page_has_every_chip(generate):
    page = generate.hardware()
    for chip in hardware.CHIPS.values():
        assert f"`{chip.name}`" in page
        assert chip.source in page


@pytest.mark.parametrize(
    "value, text", [(1, "`1`"), (0.0, "`0.0`"), (True, "`true`"), (None, "`null`"), ("a", "`a`")]
)
def test_defaults_read_as_yaml_writes_them(generate, value, text):
    assert generate.default_text(value) == text


def test_configuration_page_has_every_key(generate):
    page = generate.configuration()
    for key, field in config.layout().keys.items():
        assert f"`{key}`" in page
        assert field.description.replace("|", r"\|") in page


def test_letters_page_has_every_letter(generate):
    assert re.findall(r"^\| \$([A-Z])\$", generate.letters(), flags=re.MULTILINE) == list(
        "BTSDNKHFVLEC"
    )


def test_glossary_is_sorted_and_explains_what_chapters_use():
    text = (ROOT / "book" / "glossary.md").read_text(encoding="utf-8")
    body = text.split("```{glossary}\n")[1].split("```")[0]
    terms = re.findall(r"^(\S.*)$", body, flags=re.MULTILINE)
    assert len(terms) >= 45
    assert terms == sorted(set(terms), key=lambda term: re.sub(r"\W", "", term.lower()))


def test_tables_of_measured_speeds_come_from_the_newest_records(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "book"))
    measured = importlib.import_module("measured")
    found = measured.newest(measured.RESULTS)
    text = measured.page(found, measured.elsewhere(measured.RESULTS))
    assert set(found) >= {"train_cpu", "decode_cpu", "compile", "data", "checkpoint"}
    for name in found.keys() - {"path"}:  # which the page on the house shows
        assert f"## {measured.SECTIONS[name][0]}" in text
        assert f"`benchmarks/{name}.py`, {found[name][-1]['date'][:4]}" in text
    measured.figure(found["train_cpu"], tmp_path / "a.svg")
    assert "</svg>" in (tmp_path / "a.svg").read_text()


def test_a_table_says_when_each_chapter_last_passed_and_with_which_versions(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "book"))
    measured = importlib.import_module("measured")
    old, new = ({"python": "3.12.1", "jax": version} for version in ("0.11.1", "0.11.2"))
    rows = {
        "01": {"passed": {"date": "2026-11-01", "versions": old}, "failed": None},
        "02": {"passed": {"date": "2026-11-02", "versions": new}, "failed": {"date": "2026-11-03"}},
        "03": {"passed": None, "failed": {"date": "2026-11-03"}},
        "tests": {"passed": {"date": "2026-11-02", "versions": new}, "failed": None},
    }
    text = measured.notebooks([{"environment": "lab", "python": "3.12", "rows": rows}])
    for line in (
        "| Chapter | `make lab`, Python 3.12 |",
        "| [](../notebooks/01_transformations.ipynb) | 2026-11-01 (A) |",
        "| [](../notebooks/02_xla.ipynb) | 2026-11-02 (B); failed 2026-11-03 |",
        "| [](../notebooks/03_rooflines.ipynb) | never; failed 2026-11-03 |",
        "| [](../notebooks/04_transformer.ipynb) | not run |",
        "| tests | 2026-11-02 (B) |",
        "| A | 3.12.1 | 0.11.1 |",
        "| B | 3.12.1 | 0.11.2 |",
    ):
        assert f"{line}\n" in text + "\n", line


def test_speeds_of_the_readme_name_both_processors_and_are_the_records(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "book"))
    measured = importlib.import_module("measured")
    other = measured.elsewhere(measured.RESULTS)
    lines = measured.two_processors_table(measured.newest(measured.RESULTS), other)
    assert "AMD" in lines and "Intel" in lines
    assert lines in (ROOT / "README.md").read_text(encoding="utf-8")


def test_figures_taken_down_elsewhere_say_when_where_and_by_what_command(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "book"))
    measured = importlib.import_module("measured")
    other = measured.elsewhere(measured.RESULTS)
    assert other["date"] == "2026-11-23" and {"processor", "cores"} <= set(other["machine"])
    for part in (part for part in other.values() if isinstance(part, dict) and "command" in part):
        script = re.match(r"python (benchmarks/\w+\.py)", part["command"] or "")
        assert (ROOT / script[1]).is_file() if script else part["what"]


def test_the_curves_beside_tunix_in_chapter_26_are_those_of_the_newest_record(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "book"))
    measured = importlib.import_module("measured")
    (record,) = measured.newest(measured.RESULTS)["post_training_tunix"]
    chapter = (ROOT / "notebooks" / "26_post_training.md").read_text(encoding="utf-8")
    shown = ast.literal_eval(
        re.search(r"^RECORD = (\{.*?^\})", chapter, re.DOTALL | re.MULTILINE)[1]
    )
    sides = ("ours", "tunix")
    for name in ("sft", "dpo"):
        losses = [record[name]["losses"][side] for side in sides]
        np.testing.assert_allclose(shown[f"{name.upper()}, loss"], losses, atol=5.1e-5)
    rewards = [np.reshape(record["grpo"][side]["reward"], (-1, 8)).mean(1) for side in sides]
    np.testing.assert_allclose(shown["GRPO, reward"], rewards, atol=5.1e-4)


def test_the_page_of_limits_has_the_errors_of_the_newest_record(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "book"))
    measured = importlib.import_module("measured")
    records = measured.newest(measured.RESULTS)["step_time"]
    text = measured.prediction_errors(records)
    for name, run in records[-1]["runs"].items():
        assert f"{run['error']:+.0%} for {name}" in text
    page = (ROOT / "book" / "limits.md").read_text(encoding="utf-8")
    assert "_generated/prediction_errors.md" in page and "third" not in page


def test_the_gains_beside_the_compiler_s_options_are_those_of_the_newest_record(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "book"))
    measured = importlib.import_module("measured")
    record = measured.newest(measured.RESULTS)["step_time"][-1]
    text = (ROOT / "minitext" / "compiler" / "options.py").read_text(encoding="utf-8")
    comment = text.replace("\n# ", " ")
    assert f"step_time-{record['date']}.json" in comment
    for run in record["runs"].values():
        gain = f"{run['without_options']['seconds']:.2f} and {run['predicted']['seconds']:.2f}"
        assert gain in comment, gain


def test_the_index_says_how_many_lines_there_are(generate):
    text = generate.size()
    count = int(re.search(r"([\d,]+) lines", text)[1].replace(",", ""))
    assert (
        5_000
        < count
        < sum(
            len(path.read_text(encoding="utf-8").splitlines())
            for path in (ROOT / "minitext").rglob("*.py")
        )
    )
    assert "_generated/size.md" in (ROOT / "book" / "index.md").read_text(encoding="utf-8")


def test_the_map_to_maxtext_has_every_key(generate):
    from minitext.config import maxtext

    text = generate.maxtext_keys()
    assert "`train.global_batch`" in text and "(removed in May 2026)" in text
    for group in maxtext.groups():
        assert f"### {group['title']}" in text
        for row in group["rows"]:
            assert all(f"`{key}`" in text for key in row["maxtext"])
    assert "_generated/maxtext_keys.md" in (ROOT / "book" / "maxtext.md").read_text(
        encoding="utf-8"
    )


@pytest.fixture
def house(monkeypatch) -> ModuleType:
    """book/house.py, which finds generate.py beside it."""
    monkeypatch.syspath_prepend(str(ROOT / "book"))
    return importlib.import_module("house")


def test_the_house_has_every_room_and_every_file(house):
    text = house.rooms_text(house.rooms())
    assert set(house.order()) == {
        path.stem for path in (ROOT / "minitext").iterdir() if path.stem.strip("_") in house.order()
    }
    for path in (ROOT / "minitext").rglob("*.py"):
        room, *within = path.relative_to(ROOT / "minitext").parts
        if not within:
            assert path.stem.startswith("__") or f"### {path.stem}\n" in text, path
        elif within != ["__init__.py"]:
            section = text.split(f"### {room}\n")[1].split("\n### ")[0]
            assert f"| `{'/'.join(within)}` |" in section, path
    for name in house.order():
        module = importlib.import_module(f"minitext.{name}")
        assert f"(room-{name})=\n### {name}\n" in text
        assert module.__doc__.split("\n\n")[0] in text
        assert name == "cli" or f"(_generated/api/{name}.md)" in text


def test_the_picture_of_the_house_is_xml_with_a_title_and_every_room(house):
    rooms = house.rooms()
    svg = ElementTree.fromstring(house.picture(rooms))
    space = {"svg": "http://www.w3.org/2000/svg"}
    named = {element.get("id"): element.text for element in svg.iter() if element.get("id")}
    assert svg.get("role") == "img"
    assert all(named[name] for name in svg.get("aria-labelledby").split())
    shown = [text.text for text in svg.iterfind(".//svg:text[@class='name']", space)]
    assert sorted(shown) == sorted(rooms)
    assert all(name in named["house-text"] for name in rooms)
    assert len(svg.findall("svg:path[@class='arrow']", space)) == len(house.direct(rooms))
    links = {link.get("href") for link in svg.iterfind("svg:a", space)}
    assert links == {f"#room-{name.replace('_', '-')}" for name in rooms}  # as Sphinx writes them


def test_arrows_of_the_house_are_imports_that_follow_from_no_others(house):
    rooms = {name: house.Room(name) for name in "abcd"}
    for name, below in {"a": "bcd", "b": "d", "c": "d", "d": ""}.items():
        rooms[name].imports = set(below)
    arrows = house.direct(rooms)
    assert set(arrows) == {("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")}
    floors, _ = house.layers(rooms, arrows)
    assert [{node[0] for node in floor} for floor in floors] == [{"a"}, {"b", "c"}, {"d"}]


def test_no_two_boxes_of_the_house_overlap(house):
    rooms = house.rooms()
    floors, pieces = house.layers(rooms, house.direct(rooms))
    house.untangle(floors, pieces)
    middle = house.place(floors, pieces)
    for floor in floors:
        for left, right in itertools.pairwise(floor):
            apart = middle[right] - middle[left]
            assert apart >= (house.width(left) + house.width(right)) / 2, (left, right)


def test_the_house_shows_the_lines_of_the_readme(house):
    lines, text = house.readme_lines(), house.readme_text()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "import jax, minitext as mt" in lines and "\n".join(lines) in text
    assert all(line in readme for line in lines)
    for path in re.findall(r"`(minitext/\S+\.py)`", text):
        assert (ROOT / path).is_file(), path


def test_the_house_says_how_far_a_run_goes_before_and_now(house):
    text = house.path_text()
    assert text.count("| flat |") == text.count("| in rooms |") == len(house.STAGES)
    with pytest.raises(KeyError):
        house.path_text(ROOT / "tests")


def test_what_the_house_refers_to_exists(house):
    page = (ROOT / "book" / "house.md").read_text(encoding="utf-8") + house.readme_text()
    found = re.findall(r"\{py:\w+\}`(?:[^`<]*<|~)?([\w.]+)>?`", page)
    assert len(found) >= 15
    for name in found:
        assert pydoc.locate(name).__doc__, name
    for name in house.parts():
        assert f"_generated/{name}" in page, name


@pytest.mark.parametrize("page", ["book/house.md", "README.md", "CONTRIBUTING.md", "AGENTS.md"])
def test_pages_for_contributors_name_files_that_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    folders = "minitext|tests|book|notebooks|exercises|benchmarks"
    for path in re.findall(
        rf"(?<![\w/-])((?:{folders})/[\w./-]*\w|(?:{folders})/)(?![\w<*])", text
    ):
        made = path.startswith("book/_generated") or "NN" in path
        assert made or (ROOT / path).exists(), path


def test_contributors_are_sent_to_the_house():
    for page in ("README.md", "CONTRIBUTING.md", "AGENTS.md"):
        assert "book/house.md" in (ROOT / page).read_text(encoding="utf-8"), page
    assert "(house.md)" in (ROOT / "book" / "index.md").read_text(encoding="utf-8")
    toc = yaml.safe_load((ROOT / "book" / "_toc.yml").read_text(encoding="utf-8"))
    assert toc["parts"][-1]["chapters"][0] == {"file": "book/house"}


TEXTS = sorted(
    [*(ROOT / "notebooks").glob("*.md"), *(ROOT / "book").glob("*.md"), ROOT / "README.md"],
    key=lambda path: path.name,
)


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: path.stem)
def test_keys_and_commands_in_the_texts_exist(page):
    """Keys in backquotes, and the commands, options and keys of lines that begin with `minitext`."""
    import typer

    from minitext.cli import main
    from minitext.config.config import Config, layout

    known, text = layout().keys, page.read_text(encoding="utf-8")
    sections = "|".join(Config.model_fields)
    for key in re.findall(rf"`((?:{sections})\.[a-z_]+(?:\.[a-z_]+)*)(?:=[^`]*)?`", text):
        of_some = any(name.startswith(f"{key}.") for name in known)
        assert key in known or of_some or key.endswith((".py", ".gguf", ".onnx", ".data")), key
    group = typer.main.get_command(main.app)
    context = typer.Context(group)
    for line in re.findall(r"(?:^|`|/bin/)minitext ([a-z][^`\n#]*)", text, re.MULTILINE):
        first, *words = line.split(" -- ")[0].split()
        command = group.get_command(context, first)
        if command is None:  # prose: "minitext keeps JAX's default"
            assert not re.search(r" --|\.\w+=", line), line
            continue
        inner = getattr(command, "commands", {}).get(words[0]) if words else None
        params = (inner or command).params
        options = {o for part in params for o in (*part.opts, *part.secondary_opts)} | {"--help"}
        for word in words:
            assert not word.startswith("--") or word.strip("[],.").partition("=")[0] in options, (
                line
            )
            if found := re.match(rf"((?:{sections})\.[a-z_.]+)=", word):
                assert found[1] in known or found[1] == "train.stepz", (
                    line
                )  # chapter 6 misspells one


def test_the_bibliography_can_be_read_and_has_what_is_cited():
    database = pytest.importorskip("pybtex.database")
    known = set(database.parse_file(str(ROOT / "book" / "references.bib")).entries)
    for page in [*(ROOT / "notebooks").glob("*.md"), *(ROOT / "book").glob("*.md")]:
        for cited in re.findall(r"\{cite(?::\w+)?\}`([^`]+)`", page.read_text()):
            assert {key.strip() for key in cited.split(",")} <= known, page.name


def test_mentions_of_chapters_are_found():
    parts = script("chapters").parts
    text = "As chapter 5 says, chapters 9 to 12, and 14 and Chapter 3; not chapter 7b, 12 chapters, chapter 123."
    found = list(parts(text))
    assert "".join(piece for piece, _ in found) == text
    linked = [(piece, number) for piece, number in found if number]
    assert linked == [("chapter 5", 5), ("9", 9), ("12", 12), ("14", 14), ("Chapter 3", 3)]


def test_chapters_quote_the_newest_record_of_a_gpu():
    """Figures that no cell can measure."""
    record = max((ROOT / "benchmarks" / "results").glob("kernels_gpu-*.json"))
    cases = json.loads(record.read_text())["cases"]
    plain, packed, grouped = (
        cases[f"{name} with gradients"]["ratio"]
        for name in ("attention", "attention of packed rows", "grouped_matmul")
    )
    for stem, figures in {
        "17_flash_attention": (f"{plain:.2f} of cuDNN's", f"{packed:.2f} times as fast"),
        "19_grouped_matmul": (f"{grouped:.1f} times as fast",),
    }.items():
        text = " ".join((ROOT / "notebooks" / f"{stem}.md").read_text(encoding="utf-8").split())
        assert all(figure in text for figure in (*figures, record.name)), stem


def test_the_readme_quotes_the_newest_records_of_a_gpu():
    def newest(benchmark):
        files = (ROOT / "benchmarks" / "results").glob(f"{benchmark}-*.json")
        return json.loads(max(files).read_text())

    trained = newest("train_gpu")["results"][0]
    cases = newest("decode_gpu")["cases"]
    (one_text,) = (case["results"] for case in cases if case["batch"] == 1)
    ratios = {name: case["ratio"] for name, case in newest("kernels_gpu")["cases"].items()}
    plain, packed = "attention", "attention of packed rows"
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for figure in (
        f"{round(trained['tokens_per_second'], -1):,.0f} tokens a second, which is {trained['mfu']:.0%} MFU",
        f"{one_text['minitext']['tokens_per_second']:.0f} tokens a second",
        f"{one_text['transformers']['decode_ratio']:.1f} times as many",
        f"{ratios[plain]:.2f} of cuDNN's speed",
        f"{ratios[packed]:.2f} times cuDNN's speed",
        f"({ratios[f'{plain} with gradients']:.2f} and {ratios[f'{packed} with gradients']:.2f} with gradients)",
    ):
        assert figure in text, figure
