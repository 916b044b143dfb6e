"""Draws and writes the generated parts of the page "The house" (book/house.md): book/generate.py calls `parts`.

Rooms, files, lines and arrows come from the package's source, read without importing it; the order of the rooms is
that of tests/test_structure.py; the figures are those of the newest records of benchmarks/path.py.
"""

import ast
import functools
import itertools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "minitext"


# ---------------------------------------------------------------------------- what the source says


@dataclass
class Room:
    """A folder of the package, or one of the files beside them.

    Attributes:
      doc: its docstring without the line of chapters.
      files: path within the room -> first line of the file's docstring.
      lines: of all its Python files.
      imports: the rooms that any of its files imports.
    """

    name: str
    doc: str = ""
    files: dict[str, str] = field(default_factory=dict)
    lines: int = 0
    imports: set[str] = field(default_factory=set)


def order() -> tuple[str, ...]:
    """The rooms from the top down, as the architecture's test has them."""
    text = (ROOT / "tests" / "test_structure.py").read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROOMS":
            return ast.literal_eval(node.value)
    raise SystemExit("tests/test_structure.py has no ROOMS")


@functools.cache
def rooms() -> dict[str, Room]:
    """Every room with its files, from the top down."""
    found = {name: Room(name) for name in order()}
    for path in sorted(PACKAGE.rglob("*.py")):
        within = path.relative_to(PACKAGE)
        room = found.get(within.parts[0].removesuffix(".py"))
        if room is None:  # the package's own __init__ and __main__
            continue
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        doc = ast.get_docstring(tree) or ""
        if within.parts[1:] in ((), ("__init__.py",)):
            room.doc = re.sub(r"\n*^Chapters: .*\.$", "", doc, flags=re.MULTILINE).strip()
        room.files["/".join(within.parts[1:]) or within.name] = doc.partition("\n")[0]
        room.lines += text.count("\n")
        room.imports |= (imported(tree) & found.keys()) - {room.name}
    return found


def imported(tree: ast.AST) -> set[str]:
    """The first name below `minitext` of everything that a file imports, wherever it does so."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("minitext.")}


def direct(found: dict[str, Room]) -> list[tuple[str, str]]:
    """The imports between rooms that don't follow from others: the transitive reduction."""
    below: dict[str, set[str]] = {}
    for name in reversed(found):
        near = found[name].imports
        below[name] = near.union(*(below[other] for other in near))
    return [
        (name, other)
        for name, room in found.items()
        for other in found
        if other in room.imports and not any(other in below[x] for x in room.imports - {other})
    ]


# ---------------------------------------------------------------------------- the picture

BOX, HEIGHT, FLOOR, GAP, MARGIN = 112, 54, 92, 16, 8
Node = tuple[str, int]  # a room, or a point where an arrow passes a floor: (its two rooms, floor)


def layers(
    found: dict[str, Room], arrows: list[tuple[str, str]]
) -> tuple[list[list[Node]], list[tuple[Node, Node]]]:
    """The floors from the top down, and the arrows in pieces from each floor to the next.

    A room is one floor above the highest room that it imports.
    """
    height: dict[str, int] = {}
    for name in reversed(found):
        height[name] = max((height[other] + 1 for other in found[name].imports), default=0)
    top = max(height.values())
    floors: list[list[Node]] = [[] for _ in range(top + 1)]
    for name in found:
        floors[top - height[name]].append((name, top - height[name]))
    pieces = []
    for upper, lower in arrows:
        at = (upper, top - height[upper])
        for floor in range(at[1] + 1, top - height[lower]):
            passing = (f"{upper}>{lower}", floor)
            floors[floor].append(passing)
            pieces.append((at, passing))
            at = passing
        pieces.append((at, (lower, top - height[lower])))
    return floors, pieces


def crossings(floors: list[list[Node]], pieces: list[tuple[Node, Node]]) -> int:
    """How many pairs of pieces cross."""
    place = {node: i for floor in floors for i, node in enumerate(floor)}
    count = 0
    for (a, b), (c, d) in itertools.combinations(pieces, 2):
        if a[1] == c[1]:
            count += (place[a] - place[c]) * (place[b] - place[d]) < 0
    return count


def untangle(floors: list[list[Node]], pieces: list[tuple[Node, Node]]) -> None:
    """Orders each floor so that few arrows cross, floor by floor until no floor can do better."""
    best = crossings(floors, pieces) + 1
    while (now := crossings(floors, pieces)) < best:
        best = now
        for i, floor in [*enumerate(floors), *reversed(list(enumerate(floors)))]:
            near = [piece for piece in pieces if i in (piece[0][1], piece[1][1])]

            def cost(nodes, i=i, near=near):
                return crossings([*floors[:i], list(nodes), *floors[i + 1 :]], near)

            floors[i] = list(min(itertools.permutations(floor), key=cost))


def width(node: Node) -> int:
    """The width that a node needs on its floor."""
    return 6 if ">" in node[0] else BOX


def place(floors: list[list[Node]], pieces: list[tuple[Node, Node]]) -> dict[Node, float]:
    """The middle of each node: near those it's joined to, and apart from its neighbours."""
    x: dict[Node, float] = {}
    for floor in floors:
        total = sum(map(width, floor)) + GAP * (len(floor) - 1)
        at = -total / 2
        for node in floor:
            x[node] = at + width(node) / 2
            at += width(node) + GAP
    for _ in range(60):
        for floor in floors:
            wanted = {}
            for node in floor:
                joined = [x[b] if a == node else x[a] for a, b in pieces if node in (a, b)]
                wanted[node] = sum(joined) / len(joined) if joined else x[node]
            # Pushed apart from the left and from the right; the mean of both is apart too.
            left, right = dict(wanted), dict(wanted)
            for a, b in itertools.pairwise(floor):
                left[b] = max(left[b], left[a] + (width(a) + width(b)) / 2 + GAP)
            for a, b in itertools.pairwise(floor[::-1]):
                right[b] = min(right[b], right[a] - (width(a) + width(b)) / 2 - GAP)
            x |= {node: (left[node] + right[node]) / 2 for node in floor}
    least = min(x[node] - width(node) / 2 for node in x)
    return {node: round(middle - least + MARGIN, 1) for node, middle in x.items()}


# The book's own colours where the page has them; alone, the picture follows the reader's system.
STYLE = """
.mt-house { --box: var(--pst-color-surface, #f6f7f6); --ink: var(--pst-color-text-base, #22272e);
  --soft: var(--pst-color-text-muted, #59636e); --ground: var(--pst-color-background, #ffffff);
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", Arial, sans-serif; }
@media (prefers-color-scheme: dark) { .mt-house {
  --box: var(--pst-color-surface, #1e2329); --ink: var(--pst-color-text-base, #d5dae1);
  --soft: var(--pst-color-text-muted, #98a2ae); --ground: var(--pst-color-background, #15181d); } }
.mt-house .ground { fill: var(--ground); }
.mt-house .box { fill: var(--box); stroke: var(--soft); stroke-width: 1; }
.mt-house a:is(:hover, :focus) .box { stroke: var(--ink); stroke-width: 2; }
.mt-house .arrow { fill: none; stroke: var(--soft); stroke-width: 1; }
.mt-house .head { fill: var(--soft); }
.mt-house text { text-anchor: middle; fill: var(--soft); font-size: 11px; }
.mt-house .name { fill: var(--ink); font-size: 13.5px; font-weight: 600; }
"""


def picture(found: dict[str, Room]) -> str:
    """The rooms as boxes on floors, with arrows to what they import, as SVG."""
    arrows = direct(found)
    floors, pieces = layers(found, arrows)
    untangle(floors, pieces)
    x = place(floors, pieces)
    wide = max(x[node] + width(node) / 2 for node in x) + MARGIN
    tall = FLOOR * (len(floors) - 1) + HEIGHT + 2 * MARGIN
    words = describe(floors)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mt-house" viewBox="0 0 {wide:g} {tall}" '
        f'width="{wide:g}" height="{tall}" role="img" aria-labelledby="house-title house-text">',
        f'<title id="house-title">The rooms of minitext</title><desc id="house-text">{words}</desc>',
        f"<style>{STYLE}</style>",
        '<defs><marker id="house-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path class="head" d="M0 1L8 4L0 7z"/></marker></defs>',
        f'<rect class="ground" width="{wide:g}" height="{tall}"/>',
    ]
    ends = shares(floors, pieces, x)
    for upper, lower in arrows:
        path, at = "", next(n for floor in floors for n in floor if n[0] == upper)
        while at[0] != lower:
            step = next(b for a, b in pieces if a == at and b[0] in (lower, f"{upper}>{lower}"))
            path += curve(at, step, *ends[at, step])
            at = step
        drawn.append(f'<path class="arrow" d="{path}" marker-end="url(#house-head)"/>')
    for name, middle, y in ((n[0], x[n], n[1]) for floor in floors for n in floor):
        if ">" not in name:
            drawn.append(box(found[name], middle, y * FLOOR + MARGIN))
    return "\n".join([*drawn, "</svg>"]) + "\n"


def describe(floors: list[list[Node]]) -> str:
    """The picture in words."""
    names = [", ".join(n[0] for n in floor if ">" not in n[0]) for floor in floors]
    return f"Each floor imports only floors below it. From the top down: {'; '.join(names)}."


def shares(
    floors: list[list[Node]], pieces: list[tuple[Node, Node]], x: dict[Node, float]
) -> dict[tuple[Node, Node], tuple[float, float]]:
    """Where each piece leaves its upper node and enters its lower one: side by side, in the order of the other ends."""
    ends = {piece: [x[piece[0]], x[piece[1]]] for piece in pieces}
    for node in itertools.chain(*floors):
        for side in (0, 1):
            here = sorted((p for p in pieces if p[side] == node), key=lambda p: x[p[1 - side]])
            room = width(node) * 0.7 if width(node) == BOX else 0
            for i, piece in enumerate(here):
                ends[piece][side] += room * ((i + 0.5) / len(here) - 0.5)
    return {piece: (round(a, 1), round(b, 1)) for piece, (a, b) in ends.items()}


def curve(upper: Node, lower: Node, start: float, end: float) -> str:
    """A piece of an arrow: straight past a floor, and a gentle curve between floors."""
    top, foot = upper[1] * FLOOR + MARGIN + HEIGHT, lower[1] * FLOOR + MARGIN
    bend = (foot - top) * 0.5
    past = f"V{foot + HEIGHT}" if ">" in lower[0] else ""
    move = "" if ">" in upper[0] else f"M{start} {top}"
    return f"{move}C{start} {top + bend:g} {end} {foot - bend:g} {end} {foot}{past}"


def box(room: Room, middle: float, y: float) -> str:
    """A room's box, which leads to its paragraph."""
    files = f"{len(room.files)} file" + "s" * (len(room.files) > 1)
    texts = ((19, room.name, ' class="name"'), (34, files, ""), (47, f"{room.lines:,} lines", ""))
    anchor = f"room-{room.name.replace('_', '-')}"  # as Sphinx writes it
    return (
        f'<a href="#{anchor}"><rect class="box" x="{middle - BOX / 2:g}" y="{y:g}" width="{BOX}" '
        f'height="{HEIGHT}" rx="4"/>'
        + "".join(
            f'<text x="{middle:g}" y="{y + down:g}"{kind}>{escape(text)}</text>'
            for down, text, kind in texts
        )
        + "</a>"
    )


# ---------------------------------------------------------------------------- the text


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, as book/generate.py makes them."""
    from generate import table

    return table(header, rows)


def rooms_text(found: dict[str, Room]) -> str:
    """A section for each room: what it's for, and what each file holds."""
    parts = []
    for room in found.values():
        parts.append(f"(room-{room.name})=\n### {room.name}\n\n{room.doc}")
        rows = [[f"`{file}`", doc] for file, doc in room.files.items() if file != "__init__.py"]
        if "__init__.py" in room.files:  # on the ground a room is its one file
            parts.append(table(["File", "What's in it"], rows))
        if room.name != "cli":
            parts.append(f"[Reference: {room.name}](_generated/api/{room.name}.md)")
    return "\n\n".join(parts) + "\n"


def readme_lines() -> list[str]:
    """The lines of Python in the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^( *)```python\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    return [line.removeprefix(block[1]) for line in block[2].rstrip().splitlines()]


def readme_text() -> str:
    """The README's lines, and for each name of ours in them the function and its file."""
    from minitext import _PUBLIC

    lines, rows = readme_lines(), []
    for name in re.findall(r"\bmt\.(\w+)", "\n".join(lines)):
        module = _PUBLIC[name]
        kind = "class" if name[0].isupper() else "func"
        path = f"minitext/{module.replace('.', '/')}.py"
        rows.append([f"{{py:{kind}}}`mt.{name} <minitext.{module}.{name}>`", f"`{path}`"])
    code = "\n".join(lines)
    return f"```python\n{code}\n```\n\n{table(['In these lines', 'Defined in'], rows)}\n"


STAGES = {
    "before_step": "Before the first step",
    "first_step": "With the first step, traced and dispatched",
    "first_save": "Up to the first save",
}


def path_text(results: Path = ROOT / "benchmarks" / "results") -> str:
    """The newest figures of benchmarks/path.py, before the package was moved into rooms and now."""
    newest = {}
    for path in sorted(results.glob("path-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        newest[record["label"]] = record
    rows = [
        [words, "flat" if label else "in rooms"]
        + [str(record["stages"][stage][key]) for key in ("functions", "files", "file_changes", "modules")]
        for stage, words in STAGES.items()
        for label in ("before", "")
        if (record := newest.get(label))
    ]  # fmt: skip
    header = ["", "Package", "Functions", "Files", "Changes of file", "Modules imported"]
    now = newest[""]
    return (
        f"{table(header, rows)}\n\nMeasured by `benchmarks/path.py` on {now['date']} with Python "
        f"{now['machine']['python']} and JAX {now['machine']['versions']['jax']}, running `{now['run']}`.\n"
    )


def parts() -> dict[str, str]:
    """The files that book/house.md includes, by name."""
    found = rooms()
    return {
        "house.svg": picture(found),
        "house_rooms.md": rooms_text(found),
        "house_readme.md": readme_text(),
        "house_path.md": path_text(),
    }
