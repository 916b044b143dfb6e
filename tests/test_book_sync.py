"""book/sync.py: stubs, notebook blocks and paired notebooks follow from their one source."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from minitext.book.grading import registry

spec = importlib.util.spec_from_file_location(
    "sync", Path(__file__).resolve().parent.parent / "book" / "sync.py"
)
sync = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sync)

SOLUTIONS = '''"""Fixture."""

import numpy as np


# EXERCISE 90.twice
def twice(x):
    """Twice x, as in ```x + x```."""
    # BEGIN SOLUTION
    return np.add(x, x)
    # END SOLUTION


# EXERCISE 90.thrice
def thrice(x):
    # BEGIN SOLUTION
    return 3 * x
    # END SOLUTION
'''
CHECKS = '''from minitext.book.grading import Exercise


def make(name, devices):
    exercise = Exercise(
        f"90.{name}", title=name.title(), function=name, minutes=10, points=4, devices=devices,
        statement="""
        Return $2x$.

        - Any shape.
        """,
        hints=("one", "two", "three"),
    )
    exercise.check("three")(lambda fn, t: t.equal(fn(3), 6))
    return exercise


twice, thrice = make("twice", 1), make("thrice", 8)
'''
NOTEBOOK = """---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
    jupytext_version: 1.2.3
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---

# Chapter

```{code-cell} ipython3
try:
    import minitext
except ModuleNotFoundError:
    %pip install -q "minitext[book] @ git+https://example.org/old"
from minitext.book import check, setup
setup()
```

Text.

<!-- exercise 90.twice -->
<!-- end exercise 90.twice -->

```{code-cell} ipython3
1 + 1
```

<!-- exercise 90.thrice -->
stale
<!-- end exercise 90.thrice -->

```{code-cell} ipython3
1 + 1
```
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    for folder in ("exercises/solutions", "exercises/checks", "notebooks"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "exercises/solutions/ch90_fixture.py").write_text(SOLUTIONS)
    (tmp_path / "exercises/checks/ch90_fixture.py").write_text(CHECKS)
    (tmp_path / "notebooks/90_fixture.md").write_text(NOTEBOOK)
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nRepository = "https://x.org/y"\n')
    monkeypatch.setenv("MINITEXT_EXERCISES", str(tmp_path / "exercises"))
    return tmp_path


def test_sync_writes_once_and_then_finds_all_in_step(repository, capsys):
    assert sync.main(["--check"]) == 1
    named = capsys.readouterr().out
    for path in (
        "exercises/ch90_fixture.py",
        "notebooks/90_fixture.md",
        "notebooks/90_fixture.ipynb",
    ):
        assert f"out of step: {path}" in named
    assert not (repository / "notebooks/90_fixture.ipynb").exists()
    assert sync.main([]) == 0
    assert sync.main(["--check"]) == 0
    stub = repository / "exercises/ch90_fixture.py"
    stub.write_text(stub.read_text() + "\n")
    capsys.readouterr()
    assert sync.main(["--check"]) == 1
    assert capsys.readouterr().out == "out of step: exercises/ch90_fixture.py\n"


def test_the_block_has_statement_stub_check_hints_and_solution_folded(repository):
    sync.main([])
    text = (repository / "notebooks/90_fixture.md").read_text()
    block = text.split("<!-- exercise 90.twice -->")[1].split("<!-- end exercise 90.twice -->")[0]
    assert "### Exercise 90.twice: Twice\n\n*10 minutes, 4 points.*" in block
    assert "Return $2x$.\n\n- Any shape." in block
    assert (
        ":exercise: 90.twice\n:tags: [exercise]\n\nimport numpy as np\n\n\ndef twice(x):" in block
    )
    assert 'raise NotImplementedError("90.twice")' in block
    assert 'check("90.twice", twice)' in block
    assert re.findall(r"<summary>(.*)</summary>", block) == [
        "Hint 1", "Hint 2", "Hint 3", "Solution"
    ]  # fmt: skip
    assert block.count("<details>") == block.count("</details>") == 4
    assert "````python\ndef twice(x):" in block and "return np.add(x, x)\n````" in block
    assert "8 simulated devices" in text and "stale" not in text
    assert "git+https://x.org/y" in text and "example.org" not in text


def test_the_paired_notebook_has_no_outputs_and_stable_ids(repository):
    sync.main([])
    first = (repository / "notebooks/90_fixture.ipynb").read_text()
    book = json.loads(first)
    ids = [cell["id"] for cell in book["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
    marked = [c["metadata"]["exercise"] for c in book["cells"] if "exercise" in c["metadata"]]
    assert marked == ["90.twice", "90.thrice"]
    assert "1.2.3" not in first
    path = repository / "notebooks/90_fixture.md"
    path.write_text(
        path.read_text().replace("Text.", "Text.\n\n```{code-cell} ipython3\nnew = 1\n```")
    )
    sync.main([])
    after = [
        c["id"]
        for c in json.loads((repository / "notebooks/90_fixture.ipynb").read_text())["cells"]
    ]
    assert len(set(ids) - set(after)) <= 1  # only the paragraph that was split


@pytest.mark.parametrize(
    ("path", "old", "new", "says"),
    [
        ("notebooks/90_fixture.md", "<!-- end exercise 90.twice -->", "", "its end line"),
        ("notebooks/90_fixture.md", "exercise 90.thrice", "exercise 90.other", "no such exercise"),
        ("notebooks/90_fixture.md", "exercise 90.thrice", "exercise 90.other", "no block for"),
        ("notebooks/90_fixture.md", "try:\n    import minitext", "import minitext", "setup cell"),
        ("exercises/solutions/ch90_fixture.py", "90.thrice", "90.fourth", "solutions ['90.twice'"),
        ("exercises/checks/ch90_fixture.py", "minutes=10", "minutes=99", "minutes=99"),
        ("exercises/solutions/ch90_fixture.py", "# END SOLUTION", "", "unpaired"),
    ],
)
def test_faults_are_named(repository, capsys, path, old, new, says):
    path = repository / path
    path.write_text(path.read_text().replace(old, new))
    assert sync.main([]) == 1
    assert says in capsys.readouterr().err


def test_strays_are_named(repository, capsys):
    (repository / "exercises/ch91_stray.py").write_text("")
    (repository / "notebooks/91_stray.ipynb").write_text("{}")
    assert sync.main([]) == 1
    said = capsys.readouterr().err
    assert "stub without a solutions file" in said and "notebook without its .md" in said
    assert sync.main(["--verify"]) == 2


@pytest.mark.slow
def test_this_repository_is_in_step():
    root = registry.exercises_root()
    faults: list[str] = []
    stale = [
        str(path.relative_to(root.parent))
        for path, text in sync.wanted(root.parent, faults).items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    assert not faults
    assert not stale, "run python book/sync.py"
