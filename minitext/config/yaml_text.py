"""YAML that somebody else wrote, parsed once its size is known, so that a small text can't take all memory.

PyYAML shares what an alias names, but whoever walks through the result meets it again and again, and a merge key (`<<`)
copies it: a few hundred bytes become billions of values. So the values are counted with all aliases written out, before
any of them is made.

Chapters: 6.
"""

import re
from typing import Any

import yaml

from minitext.errors import UserError

LIMIT = 1 << 20  # bytes of a file
MOST_VALUES, MOST_LEVELS = 20_000, 20


class _Loader(yaml.SafeLoader):
    """Reads 2020-01-01 as text: no setting is a date, and a run may be called so."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    depth = 0  # nodes around the one being composed; the first one too deep ends it, however many follow

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.depth == MOST_LEVELS:
            raise _too_deep()
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class BadYAML(UserError):
    """A text that can't be used: the message says what it is, such as `is not YAML (...)`, and lacks its subject."""


def _too_deep() -> BadYAML:
    return BadYAML(f"is nested too deep: {MOST_LEVELS} levels are the limit")


def parse(text: str, *, unique: bool = True) -> Any:
    """Returns what a YAML text holds: dicts, lists and plain values.

    Args:
      text: the YAML.
      unique: whether a key may be in a mapping only once; PyYAML alone would take the last.

    Raises:
      BadYAML: it isn't YAML, has a key twice, is too large or nested too deep.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _measure(node, {}, unique)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, AttributeError, TypeError) as error:
        raise BadYAML(f"is not YAML ({_reason(error, text)})") from None


def _reason(error: Exception, text: str) -> str:
    said = " ".join(str(getattr(error, "problem", None) or error).split()).removeprefix("but ")
    said = said.replace("'<stream end>'", "the end")
    if tag := re.search(r"constructor for the tag '(?:tag:yaml.org,2002:)?(.*)'", said):
        said = f"{tag[1][:40]} is not a type that a value can have"
    mark = getattr(error, "problem_mark", None)
    return f"line {mark.line + 1}: {said[:80]}" if mark and "\n" in text.strip() else said[:80]


def _measure(
    node: yaml.Node, known: dict[int, tuple[int, int] | None], unique: bool
) -> tuple[int, int]:
    """Returns the values and levels of a node, aliases written out; `known` has those of others by their id."""
    if id(node) in known:
        if (found := known[id(node)]) is None:  # it's being measured: it contains itself
            raise BadYAML("is nested too deep: an alias contains itself")
        return found
    known[id(node)] = None
    inner: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        if unique:
            _check_keys(node)
        inner = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        inner = node.value
    sizes = [_measure(part, known, unique) for part in inner]
    values, levels = 1 + sum(n for n, _ in sizes), 1 + max((n for _, n in sizes), default=0)
    if values > MOST_VALUES:
        raise BadYAML(f"has more than {MOST_VALUES:,} values, with its aliases written out")
    if levels > MOST_LEVELS:
        raise _too_deep()
    known[id(node)] = values, levels
    return values, levels


def _check_keys(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                line = key.start_mark.line + 1
                raise BadYAML(f"has the key {key.value[:40]} twice (again in line {line})")
            seen.add(key.value)
