"""Sphinx extension: the directive `hero` shows a chapter's picture on another page, with a sentence and a link.

    ```{hero} 03_rooflines
    One sentence about the chapter.
    ```

The picture comes from the chapter as it was executed in this build: that of the cell with the tag `hero`, or else the
first. Its alternative text comes along.
"""

from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

log = logging.getLogger(__name__)


class Hero(nodes.General, nodes.Element):
    """Stands for a chapter's picture until all chapters have been read."""


class HeroDirective(SphinxDirective):
    """A chapter's picture, its title as a link, and the directive's text."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Leaves the picture open: the chapter may not have been read yet."""
        chapter = f"notebooks/{self.arguments[0]}"
        link = addnodes.pending_xref(
            "", nodes.inline(), refdomain="std", reftype="doc", reftarget=f"/{chapter}", refdoc=self.env.docname,
            refexplicit=False, refwarn=True,
        )  # fmt: skip
        title = nodes.paragraph("", "", link, classes=["mt-hero-title"])
        text = self.parse_content_to_nodes()
        return [nodes.container("", Hero(chapter=chapter), title, *text, classes=["mt-hero"])]


def picture(doctree: nodes.document) -> nodes.image | None:
    """Returns the image that a chapter is remembered by, or None if no cell draws one."""
    drawn, cells = [], [node for node in doctree.findall(nodes.container) if _is(node, "cell_code")]
    for cell in cells:
        outputs = [part for part in cell.children if _is(part, "cell_code_output")]
        made = [image for output in outputs for image in output.findall(nodes.image)]
        if made and "tag_hero" in cell["classes"]:
            return made[0]
        drawn += made[:1]
    return drawn[0] if drawn else None


def _is(node: Any, element: str) -> bool:
    return isinstance(node, nodes.Element) and node.get("nb_element") == element


def fill(app: Any, doctree: nodes.document, docname: str) -> None:
    """Puts the pictures into a page that is about to be written."""
    for hero in list(doctree.findall(Hero)):
        chapter = hero["chapter"]
        found = picture(app.env.get_doctree(chapter)) if chapter in app.env.found_docs else None
        if found is None:
            log.warning("%s has no picture to show", chapter, location=hero)
            hero.parent.remove(hero)
            continue
        image = found.deepcopy()
        for size in {"width", "height", "scale", "align"} & set(image.attributes):
            del image[size]
        address = app.builder.get_relative_uri(docname, chapter)
        link = nodes.reference("", "", image, refuri=address, internal=True, classes=["mt-hero-picture"])  # fmt: skip
        hero.replace_self(link)


def setup(app: Any) -> dict[str, bool]:
    """Tells Sphinx what to call."""
    app.add_node(Hero)
    app.add_directive("hero", HeroDirective)
    app.connect("doctree-resolved", fill)
    return {"parallel_read_safe": True}
