"""Sphinx extension: every "chapter 5" in the text is a link to that chapter.

"Chapters 9 to 12" links both numbers. References of a chapter to itself stay text, as do those in code, titles and
links.
"""

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

MENTION = re.compile(
    r"\b[Cc]hapter\s+\d{1,2}\b|\b[Cc]hapters\s+\d{1,2}(?:(?:,| and| or| to|, and)\s+\d{1,2})*\b"
)
CLOSED = (
    nodes.literal,
    nodes.literal_block,
    nodes.reference,
    nodes.title,
    nodes.raw,
    nodes.math,
    addnodes.pending_xref,
)


def parts(text: str) -> Iterator[tuple[str, int | None]]:
    """Yields a text in pieces, each with the number of the chapter that it should lead to, or None."""
    end = 0
    for found in MENTION.finditer(text):
        yield text[end : found.start()], None
        numbers = list(re.finditer(r"\d+", found[0]))
        if len(numbers) == 1:
            yield found[0], int(numbers[0][0])
        else:
            last = 0
            for number in numbers:
                yield found[0][last : number.start()], None
                yield number[0], int(number[0])
                last = number.end()
        end = found.end()
    yield text[end:], None


class ChapterLinks(SphinxTransform):
    """Replaces mentions of chapters by references."""

    default_priority = 800

    def apply(self, **_: Any) -> None:
        """Goes through a page's texts."""
        pages = {
            int(name.removeprefix("notebooks/")[:2]): name
            for name in self.env.found_docs
            if re.match(r"notebooks/\d\d_", name)
        }
        pages = {number: name for number, name in pages.items() if name != self.env.docname}
        for text in list(self.document.findall(nodes.Text)):
            up: Any = text.parent
            while up is not None and not isinstance(up, CLOSED):
                up = up.parent
            if up is None and MENTION.search(text):
                made = [
                    _node(piece, pages.get(n or 0), self.env.docname)
                    for piece, n in parts(text)
                    if piece
                ]
                text.parent.replace(text, made)


def _node(text: str, page: str | None, here: str) -> nodes.Node:
    if page is None:
        return nodes.Text(text)
    return addnodes.pending_xref(
        "", nodes.inline("", text), refdomain="std", reftype="doc", reftarget=f"/{page}", refdoc=here,
        refexplicit=True, refwarn=True,
    )  # fmt: skip


def setup(app: Any) -> dict[str, bool]:
    """Tells Sphinx what to call."""
    app.add_transform(ChapterLinks)
    return {"parallel_read_safe": True}
