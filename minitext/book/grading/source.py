"""The source text of exercises: sections, stubs, and the parts of a learner's file that one exercise needs.

A solutions file has its imports, then one section per exercise, which starts with a line `# EXERCISE NN.id`. A
learner's file has the same sections; a notebook has cells instead. In both cases an answer is a list of `Piece`s. An
exercise runs its own pieces, and only the definitions it uses from the others, so an exercise that fails at import
fails alone.
"""

import ast
import dataclasses
import re
import symtable
import textwrap
from collections.abc import Iterable

MARKER = re.compile(r"^# EXERCISE (\S+)[ \t]*$", re.MULTILINE)
SOLUTION = re.compile(
    # A formatter inserts an empty line between a docstring and a function that follows it.
    r"(?:(?<=\"\"\"\n)\n)?^(?P<indent>[ \t]*)# BEGIN SOLUTION[^\n]*\n(?P<body>.*?)^[ \t]*# END SOLUTION[^\n]*\n?",
    re.MULTILINE | re.DOTALL,
)
_IMPORTS = (ast.Import, ast.ImportFrom)
_BLOCKS = (ast.If, ast.Try, ast.For, ast.While, ast.With)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stretch of a learner's source.

    Attributes:
        id: the exercise it belongs to, or "".
        text: the source.
        line: number of its first line in the learner's file (or cell), for messages.
    """

    id: str
    text: str
    line: int = 1

    def parse(self, filename: str = "answer") -> ast.Module:
        """The syntax tree with the learner's own line numbers.

        Raises:
            SyntaxError: if it isn't Python, or is nested too deeply to parse.
        """
        try:
            return ast.parse("\n" * (self.line - 1) + self.text, filename)
        except (ValueError, RecursionError, MemoryError) as error:
            raise SyntaxError(f"cannot be parsed: {error or type(error).__name__}") from None


def split(text: str) -> list[Piece]:
    """The pieces of a file: the text before the first marker (id ""), then the sections."""
    marks = list(MARKER.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    pieces = [Piece("", text[: marks[0].start()] if marks else text)]
    for mark, end in zip(marks, ends, strict=True):
        start = text.find("\n", mark.start()) + 1 or end
        line = text.count("\n", 0, start) + 1
        pieces.append(Piece(mark.group(1), text[start:end], line))
    return pieces


def sections(text: str) -> dict[str, str]:
    """Source of each exercise's section by id, without the marker line or surrounding empty lines."""
    return {piece.id: piece.text.strip("\n") for piece in split(text) if piece.id}


def preamble(text: str) -> str:
    """The text before the first section, without the file's docstring: mostly imports."""
    head = split(text)[0].text
    body = ast.parse(head).body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        head = "\n".join(head.split("\n")[body[0].end_lineno :])
    return head.strip("\n")


def stub(text: str) -> str:
    """A solutions file as the learner gets it: each solution is replaced by a line that raises.

    Raises:
        ValueError: if a solution is outside a section or isn't closed.
    """
    out = []
    for piece in split(text):
        head = f"# EXERCISE {piece.id}\n" if piece.id else ""

        def cut(match: re.Match, name: str = piece.id) -> str:
            indent = match["indent"]
            return f'{indent}# YOUR CODE HERE\n{indent}raise NotImplementedError("{name}")\n'

        cut_text, cuts = SOLUTION.subn(cut, piece.text)
        if re.search(r"# (BEGIN|END) SOLUTION", cut_text):
            raise ValueError(f"{piece.id or 'preamble'}: unpaired BEGIN SOLUTION or END SOLUTION")
        if bool(cuts) != bool(piece.id):
            raise ValueError(f"{piece.id or 'preamble'}: {cuts} solutions marked in this section")
        out.append(head + cut_text)
    return "".join(out)


def same_code(a: str, b: str) -> bool:
    """True if two sources have the same syntax tree; comments and layout don't count."""
    try:
        trees = [Piece("", textwrap.dedent(text)).parse() for text in (a, b)]
    except SyntaxError:
        return False
    return ast.dump(trees[0]) == ast.dump(trees[1])


def compose(pieces: Iterable[Piece], id: str, filename: str) -> ast.Module:
    """One module for one exercise: its own pieces, and the definitions they use from the others.

    If it has no pieces of its own, all pieces without an id are its own.

    Raises:
        SyntaxError: if one of its own pieces isn't Python. Other pieces that aren't are left out.
    """
    pieces = list(pieces)
    own = [piece for piece in pieces if piece.id == id]
    # A file starts with imports that belong to every exercise; a notebook's cells are self-contained.
    own += [piece for piece in (pieces[:1] if own else pieces) if not piece.id]
    statements: list[ast.stmt] = []
    keep: list[bool] = []
    for piece in pieces:
        try:
            body = piece.parse(filename).body
        except SyntaxError:
            if piece in own:
                raise
            continue
        statements += body
        keep += [piece in own] * len(body)
    imported = {n for s in statements if isinstance(s, _IMPORTS) for n in _binds(s, set())}
    bound = [_binds(statement, imported) for statement in statements]
    mine = {name for names, kept in zip(bound, keep, strict=True) if kept for name in names}
    needed = {n for s, kept in zip(statements, keep, strict=True) if kept for n in _uses(s)} - mine
    grew = True
    while grew:  # definitions need definitions in turn
        grew = False
        for index, statement in enumerate(statements):
            if not keep[index] and bound[index] & needed:
                keep[index] = grew = True
                needed |= _uses(statement) - mine
    return ast.Module([s for s, kept in zip(statements, keep, strict=True) if kept], [])


def _uses(statement: ast.stmt) -> set[str]:
    """Global names that a top-level statement reads, including inside nested functions."""

    def walk(table: symtable.SymbolTable) -> set[str]:
        top = table.get_type() == "module"
        names = {
            s.get_name()
            for s in table.get_symbols()
            if s.is_referenced() and (top or s.is_global())
        }
        return names.union(*(walk(child) for child in table.get_children()))

    try:
        return walk(symtable.symtable(ast.unparse(statement), "answer", "exec"))
    except (SyntaxError, ValueError, RecursionError):  # compile() will report it
        return set()


def _binds(statement: ast.stmt, imported: set[str]) -> set[str]:
    """Names that a top-level statement defines or changes (`x = `, `def x`, `x.defvjp(...)`).

    A call of an imported module's function (`plt.show()`) changes nothing.
    """
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, _IMPORTS):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    if isinstance(statement, ast.Assign):
        return {name for target in statement.targets for name in _targets(target)}
    if isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        return _targets(statement.target)
    if isinstance(statement, _BLOCKS):
        heads = [statement.target] if isinstance(statement, ast.For) else []
        if isinstance(statement, ast.With):
            heads = [item.optional_vars for item in statement.items if item.optional_vars]
        bound = {name for head in heads for name in _targets(head)}
        blocks = (getattr(statement, name, []) for name in ("body", "orelse", "finalbody"))
        return bound.union(*(_binds(inner, imported) for block in blocks for inner in block))
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        return _targets(call.func) - imported
    return set()


def _targets(node: ast.AST) -> set[str]:
    """Root names of an assignment's target: a and c for `a.b[0], c`."""
    if isinstance(node, (ast.Tuple, ast.List)):
        return {name for element in node.elts for name in _targets(element)}
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call, ast.Starred)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def forbidden(tree: ast.Module, forbid: Iterable[str]) -> str | None:
    """The first use of a forbidden module or function in a tree, or None.

    Imports and their aliases are followed (`import minitext as mt; mt.models.rope`). A string that names the module,
    as in `importlib.import_module("minitext.models.layers")`, counts as a use.
    """
    names = tuple(forbid)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                aliases[bound] = alias.name if alias.asname else bound
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module or ''}.{alias.name}"
    for node in ast.walk(tree):
        for path in _paths(node, aliases):
            for name in names:
                if path == name or path.startswith(name + "."):
                    return f"{path} (line {getattr(node, 'lineno', '?')})"
    return None


def _paths(node: ast.AST, aliases: dict[str, str]) -> list[str]:
    """Dotted names that a node refers to."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    parts: list[str] = []
    inner: ast.AST = node
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name) and inner.id in aliases:
        return [".".join([aliases[inner.id], *reversed(parts)])]
    return []
