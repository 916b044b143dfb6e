"""Sections with variants, such as `model.attention`: the key `kind` chooses one of several classes.

Chapters: 6.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from minitext.config.section import Section

Kinds = dict[str, type[Section]]
Tree = dict[str, Any]


def sections_of(field: FieldInfo) -> list[type[Section]]:
    """Returns the section classes a field may hold; none for a plain value or a list of sections."""
    choice = get_origin(field.annotation) in (Union, UnionType)
    kinds = get_args(field.annotation) if choice else [field.annotation]
    return [
        k for k in kinds if isinstance(k, type) and get_origin(k) is None and issubclass(k, Section)
    ]


def find(section: type[Section], prefix: str = "") -> dict[str, Kinds]:
    """Returns the sections with variants below `section`: dotted key -> kind -> class, the default kind first."""
    found = {}
    for name, field in section.model_fields.items():
        sections = sections_of(field)
        if len(sections) > 1:
            found[prefix + name] = _by_kind(sections)
        for kind in sections:
            found |= find(kind, f"{prefix}{name}.")
    return found


def choice_of(sections: Sequence[type[Section]]) -> FieldInfo:
    """Returns one `kind` field with the kinds of all `sections`, each of which has only its own."""
    kinds = _by_kind(sections)
    described = [f"{kind}: {s.model_fields['kind'].description}" for kind, s in kinds.items()]
    choice: Any = Literal[tuple(kinds)]
    return FieldInfo(annotation=choice, default=next(iter(kinds)), description="; ".join(described))


def change_kinds(
    root: type[Section], tree: Tree, origin: dict[str, str], values: Mapping[str, Any]
) -> None:
    """Where `values` choose another kind, drops from `tree` and `origin` the settings that kind doesn't have."""
    for key, kinds in find(root).items():
        section, kind = _at(tree, key), values.get(f"{key}.kind")
        if isinstance(kind, str) and kind in kinds and kind != section.get("kind"):
            for name in set(section) - set(kinds[kind].model_fields):
                del section[name]
                origin.pop(f"{key}.{name}", None)


def check_kinds(
    root: type[Section], tree: Tree, origin: Mapping[str, str], show: Callable[[Any], str]
) -> Iterator[str]:
    """Fills in default kinds, and yields a problem for each unknown kind and each key of another variant."""
    for key, kinds in find(root).items():
        section = _at(tree, key)
        kind = section.setdefault("kind", next(iter(kinds)))
        known = isinstance(kind, str) and kind in kinds
        for name in sorted(set(section) - set(kinds[kind].model_fields)) if known else ["kind"]:
            where = f"{key}.{name}={show(section[name])} ({origin.get(f'{key}.{name}', 'default')})"
            if known:
                others = [other for other, s in kinds.items() if name in s.model_fields]
                use = f"{key}.kind={' or '.join(others)}"
                yield f"{where} has no effect with {key}.kind={kind}: set {use}"
            else:
                yield f"{where}: choose {' or '.join(kinds)}"


def _by_kind(sections: Sequence[type[Section]]) -> Kinds:
    return {section.model_fields["kind"].default: section for section in sections}


def _at(tree: Tree, key: str) -> Tree:
    for part in key.split("."):
        tree = tree.setdefault(part, {})
    return tree
