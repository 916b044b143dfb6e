"""Sphinx extension: a folded cell's summary says what is inside: imports, the code of a picture, or other code."""

import re
from typing import Any

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

IMPORTS = re.compile(r"(?:import|from) |\s|\)|#")


def summary(source: str, has_picture: bool) -> str:
    """Returns what a cell's code is for."""
    if all(IMPORTS.match(line) for line in source.splitlines() if line.strip()):
        return "imports"
    return "how the picture is drawn" if has_picture else "the code of this cell"


class Summaries(SphinxPostTransform):
    """Names what is folded, before MyST-NB folds it (at 199)."""

    default_priority = 198

    def run(self, **_: Any) -> None:
        """Goes through a page's cells."""
        for cell in self.document.findall(nodes.container):
            if cell.get("nb_element") == "cell_code" and cell.get("hide_mode") == "input":
                if "{type}" not in cell["prompt_show"]:
                    continue  # the cell's own words
                picture = any(True for _ in cell.findall(nodes.image))
                what = summary(cell.children[0].astext(), picture)
                cell["prompt_show"], cell["prompt_hide"] = f"Show {what}", f"Hide {what}"


def setup(app: Any) -> dict[str, bool]:
    """Tells Sphinx what to call."""
    app.add_post_transform(Summaries)
    return {"parallel_read_safe": True}
