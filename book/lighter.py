"""Sphinx extension: pages load only what they show.

The theme's script of icons has 2,000 of them, 1.4 MB, and its style sheet a rule for each; pages show about twenty. The
script draws the icons of brands, so their font isn't needed. Templates in `book/_templates` leave out
the search index, which only the search page needs. A picture is loaded when a reader comes near it.
"""

import re
from pathlib import Path
from typing import Any

from docutils import nodes

SCRIPT = "_static/scripts/fontawesome.js"
STYLES = "_static/styles/pydata-sphinx-theme.css"
# One icon: "name":[width, height, [other names], "code point", "path" or paths]
ICON = re.compile(r'"?([a-z0-9-]+)"?:\[\d+,\d+,\[([^\]]*)\],"[0-9a-f]+",(?:"[^"]*"|\[[^\]]*\])\],?')
RULE = re.compile(r'(?:\.fa-[a-z0-9-]+:before,?)+\{content:"[^"]*"\}')
BRANDS = re.compile(r"@font-face\{[^}]*fa-brands[^}]*\}")


def icons_of(folder: Path) -> set[str]:
    """Returns the names of icons in a built book's pages and in what its scripts add to them."""
    scripts = (path for path in folder.glob("_static/**/*.js") if "mathjax" not in path.parts)
    files = [*folder.rglob("*.html"), *(path for path in scripts if path != folder / SCRIPT)]
    texts = (path.read_text(errors="ignore") for path in files)
    return {name for text in texts for name in re.findall(r"fa-([a-z0-9-]+)", text)}


def without_others(script: str, names: set[str]) -> str:
    """Returns the theme's script with no icons but those named."""

    def kept(icon: re.Match[str]) -> str:
        found = {icon[1], *re.findall(r'"([a-z0-9-]+)"', icon[2])}
        return icon[0] if found & names else ""

    return ICON.sub(kept, script)


def without_other_rules(styles: str, names: set[str]) -> str:
    """Returns the theme's style sheet with no icons but those named, and without the font of brands."""

    def kept(rule: re.Match[str]) -> str:
        return rule[0] if names & {*re.findall(r"\.fa-([a-z0-9-]+)", rule[0])} else ""

    return RULE.sub(kept, BRANDS.sub("", styles))


def finish(app: Any, error: Exception | None) -> None:
    """Shortens the script and the style sheet of a book that was built."""
    if error is not None or app.builder.format != "html":
        return
    folder = Path(app.outdir)
    for name, shorten in ((SCRIPT, without_others), (STYLES, without_other_rules)):
        path = folder / name
        if path.exists():
            path.write_text(shorten(path.read_text(), icons_of(folder)))


def load_late(app: Any, doctree: nodes.document, docname: str) -> None:
    """Tells browsers to load a page's pictures when a reader comes near them."""
    for image in doctree.findall(nodes.image):
        image["loading"] = "lazy"


def setup(app: Any) -> dict[str, bool]:
    """Tells Sphinx what to call."""
    # After the gallery has put its pictures in.
    app.connect("doctree-resolved", load_late, priority=900)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True}
