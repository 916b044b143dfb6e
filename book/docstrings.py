"""Sphinx extension: reads the package's docstrings, which are text with Markdown's backticks.

Autodoc takes docstrings for reStructuredText, where an asterisk opens emphasis, a trailing
underscore makes a link and a backtick may not touch a letter. The package's docstrings are full of
`B*T` and of plurals such as `Batch`es, so their code spans and marks are translated before napoleon
reads the sections.
"""

import re
from typing import Any

CODE = re.compile(r"(``.+?``|`[^`\n]+(?:\n[^`\n]+)?`)", re.DOTALL)


def to_rest(line: str) -> str:
    """A docstring's text as reStructuredText: code spans become literals, marks are escaped."""
    parts = CODE.split(line)
    for i, part in enumerate(parts):
        if i % 2:  # an empty escape on both sides lets letters touch the literal
            parts[i] = rf"\ ``{part.strip('`')}``\ "
        else:
            parts[i] = re.sub(r"[*|]|(?<=\w)_(?=\W|$)", r"\\\g<0>", part)
    return "".join(parts)


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Translates a docstring in place. An indented block after `:` and an empty line is code."""
    blocks = re.split(r"(?<=:)\n\n((?:[ ]{4}.*(?:\n|$)|\n(?=[ ]{4}))+)", "\n".join(lines))
    for i, block in enumerate(blocks):
        if i % 2:
            blocks[i] = f":\n\n{block}\n"
        else:
            blocks[i] = to_rest(block)
    lines[:] = "".join(blocks).split("\n")


def skip(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out what Python itself documents: the fields of a NamedTuple."""
    return (
        True if (getattr(obj, "__doc__", "") or "").startswith("Alias for field number") else None
    )


def setup(app: Any) -> dict[str, bool]:
    """Connects the extension, before napoleon (which has the default priority, 500)."""
    app.connect("autodoc-process-docstring", process, priority=400)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
