"""Sections of which there are variants, such as `model.attention`: one of several, which its key `kind` chooses.

Chapters: 6.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from minitext.config.section import Section

Kinds = dict[str, type[Section]]


def sections_of(field: FieldInfo) -> list[type[Section]]:
    """Returns the section, or the choice of sections, that a field is; of a list of sections, the list is the key."""
    choice = get_origin(field.annotation) in (Union, UnionType)
    kinds = get_args(field.annotation) if choice else [field.annotation]
    return [
        k for k in kinds if isinstance(k, type) and get_origin(k) is None and issubclass(k, Section)
    ]


def find(section: type[Section], prefix: str = "") -> dict[str, Kinds]:
    """Returns the choices below a section: dotted key -> kind -> section, the default one first."""
    found = {}
    for name, field in section.model_fields.items():
        sections = sections_of(field)
        if len(sections) > 1:
            found[prefix + name] = _by_kind(sections)
        for kind in sections:
            found |= find(kind, f"{prefix}{name}.")
    return found


def choice_of(sections: Sequence[type[Section]]) -> FieldInfo:
    """Returns the field that chooses among sections: each has a `kind` of one value, and this one has all of them."""
    kinds = _by_kind(sections)
    told = [f"{kind}: {s.model_fields['kind'].description}" for kind, s in kinds.items()]
    choice: Any = Literal[tuple(kinds)]
    return FieldInfo(annotation=choice, default=next(iter(kinds)), description="; ".join(told))


def change_kinds(
    root: type[Section], tree: dict[str, Any], origin: dict[str, str], values: Mapping[str, Any]
) -> None:
    """Takes what lower layers set for a variant out of a tree of settings, where `values` replace it by another."""
    for key, kinds in find(root).items():
        section, kind = _at(tree, key), values.get(f"{key}.kind")
        if isinstance(kind, str) and kind in kinds and kind != section.get("kind"):
            for name in set(section) - set(kinds[kind].model_fields):
                del section[name]
                origin.pop(f"{key}.{name}", None)


def check_kinds(
    root: type[Section],
    tree: dict[str, Any],
    origin: Mapping[str, str],
    show: Callable[[Any], str],
) -> Iterator[str]:
    """Fills in the kinds that nobody set, and yields a fault for each unknown one and each key of another variant."""
    for key, kinds in find(root).items():
        section = _at(tree, key)
        kind = section.setdefault("kind", next(iter(kinds)))

        def told(name: str, key: str = key, section: dict[str, Any] = section) -> str:
            where = origin.get(f"{key}.{name}", "default")
            return f"{key}.{name}={show(section[name])} ({where})"

        if not isinstance(kind, str) or kind not in kinds:
            yield f"{told('kind')}: choose {' or '.join(kinds)}"
            continue
        for name in sorted(set(section) - set(kinds[kind].model_fields)):
            others = [other for other, s in kinds.items() if name in s.model_fields]
            yield f"{told(name)} has no use with {key}.kind={kind}: set {key}.kind={' or '.join(others)}"


def _by_kind(sections: Sequence[type[Section]]) -> Kinds:
    return {section.model_fields["kind"].default: section for section in sections}


def _at(tree: dict[str, Any], key: str) -> dict[str, Any]:
    for part in key.split("."):
        tree = tree.setdefault(part, {})
    return tree
