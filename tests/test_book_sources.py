"""What the book is made from: its configuration, its generated pages and its glossary."""

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from minitext import hardware
from minitext.config import config

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """book/generate.py, which is a script and no part of the package."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "book" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    for key, field in config.keys().items():
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
    text = measured.page(found)
    assert set(found) >= {"train_cpu", "decode_cpu", "compile", "data", "checkpoint"}
    for name in found:
        assert f"## {measured.SECTIONS[name][0]}" in text
        assert f"`benchmarks/{name}.py`, {found[name][-1]['date'][:4]}" in text
    measured.figure(found["train_cpu"], tmp_path / "a.svg")
    assert "</svg>" in (tmp_path / "a.svg").read_text()


def test_the_bibliography_can_be_read_and_has_what_is_cited():
    database = pytest.importorskip("pybtex.database")
    known = set(database.parse_file(str(ROOT / "book" / "references.bib")).entries)
    for page in [*(ROOT / "notebooks").glob("*.md"), *(ROOT / "book").glob("*.md")]:
        for cited in re.findall(r"\{cite(?::\w+)?\}`([^`]+)`", page.read_text()):
            assert {key.strip() for key in cited.split(",")} <= known, page.name
