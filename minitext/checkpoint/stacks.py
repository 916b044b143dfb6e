"""Layers stored one by one and layers stored as a stack, each read as the other.

This package keeps the leaves of its L layers stacked, `params.blocks.ffn.gate` [L, D, F], whether it runs them by
`lax.scan` or unrolled. Code that keeps a list of layers has `params.blocks.0.ffn.gate` [D, F] and so on. Two names
that differ in one number between dots are taken for these two forms of the same parameter, in the optimizer's state
as well.

A circular pipeline (`minitext.sharding.pipeline`) keeps the L layers as [R, L/R, ...], in the same order. A stored
leaf whose shape says that it is the other form of the wanted one is reshaped.

Chapters: 8.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


class Stack(NamedTuple):
    """A wanted leaf [L, ...] whose layers are stored under names of their own, in their order."""

    layers: tuple[str, ...]


class Layer(NamedTuple):
    """A wanted leaf that is stored as one layer of a stack."""

    stack: str
    number: int


class Regrouped(NamedTuple):
    """A wanted leaf [R, L/R, ...] that is stored as [L, ...], or the reverse."""

    name: str
    shape: tuple[int, ...]
    sharding: Any


def other_forms(stored: Iterable[str], wanted: Iterable[str]) -> dict[str, Stack | Layer]:
    """Finds the wanted names that are stored in the other form; of names stored as wanted it says nothing."""
    stored = set(stored)
    layers: dict[str, dict[int, str]] = {}
    for name in stored:
        for number, stack in _numbers(name):
            layers.setdefault(stack, {})[number] = name
    found: dict[str, Stack | Layer] = {}
    for name in wanted:
        if name in stored:
            continue
        if (by_number := layers.get(name)) and set(by_number) == set(range(len(by_number))):
            found[name] = Stack(tuple(by_number[k] for k in range(len(by_number))))
        for number, stack in _numbers(name):
            if stack in stored:
                found[name] = Layer(stack, number)
    return found


def as_stored(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the wanted leaves in the form in which they are stored: what to read, and onto which shardings.

    Args:
        saved: the "leaves" of the saved `leaves.layout`.
        wanted: named leaves.
    """
    forms, to_read = other_forms(saved, wanted), {}
    for name, leaf in wanted.items():
        match forms.get(name):
            case Stack(layers) if leaf.shape[:1] == (len(layers),):
                piece = _abstract(leaf, leaf.shape[1:], lambda spec: spec[1:])
                to_read |= dict.fromkeys(layers, piece)
            case Layer(stack, number) if number < (saved[stack]["shape"] or [0])[0]:
                shape = (saved[stack]["shape"][0], *leaf.shape)
                to_read[stack] = _abstract(leaf, shape, lambda spec: (None, *spec))
            case _ if name in saved and _is_regrouped(saved[name]["shape"], leaf.shape):
                shape = tuple(saved[name]["shape"])
                # The groups' layers may be too few for the wanted stages.
                first = () if len(shape) < leaf.ndim else (None, None)
                piece = _abstract(leaf, shape, lambda spec, first=first: (*first, *spec[1:]))
                to_read[name] = piece
            case _:
                to_read[name] = leaf
    return to_read


def as_wanted(values: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values read by `as_stored` under their wanted names, stacked or taken apart."""
    forms: dict[str, Stack | Layer | Regrouped] = dict(other_forms(values, wanted))
    for name, leaf in wanted.items():
        if name in values and _is_regrouped(values[name].shape, leaf.shape):
            forms[name] = Regrouped(name, tuple(leaf.shape), getattr(leaf, "sharding", None))
    found = {name: values[name] for name in wanted if name in values and name not in forms}
    on_host = {name for name in forms if not hasattr(wanted[name], "sharding")}
    found |= _convert(values, {name: forms[name] for name in on_host})
    if rest := {name: form for name, form in forms.items() if name not in on_host}:
        # One program for all leaves: of a program for each, compiling would take longest.
        places = {name: wanted[name].sharding for name in rest}
        arrays = {name: values[name] for form in rest.values() for name in _read_by(form)}
        found |= jax.jit(lambda arrays: _convert(arrays, rest), out_shardings=places)(arrays)
    return found


def _convert(
    values: Mapping[str, Any], forms: Mapping[str, Stack | Layer | Regrouped]
) -> dict[str, Any]:
    def one(form: Stack | Layer | Regrouped) -> Any:
        if isinstance(form, Layer):
            return values[form.stack][form.number]
        if isinstance(form, Regrouped):
            return _reshape(form.shape, form.sharding, values[form.name])
        layers = [values[name] for name in form.layers]
        return np.stack(layers) if isinstance(layers[0], np.ndarray) else jnp.stack(layers)

    return {name: one(form) for name, form in forms.items()}


def _read_by(form: Stack | Layer | Regrouped) -> tuple[str, ...]:
    return form.layers if isinstance(form, Stack) else (form[0],)


def in_groups(tree: Any, repeats: int) -> Any:
    """Returns stacked layers [L, ...] as a circular pipeline stores them, [repeats, L / repeats, ...]."""

    def leaf(x: jax.Array) -> jax.Array:
        mesh = jax.sharding.get_abstract_mesh()
        spec = None if mesh.empty else PartitionSpec(None, *jax.typeof(x).sharding.spec)
        shape = (repeats, x.shape[0] // repeats, *x.shape[1:])
        return jax.lax.reshape(x, shape, out_sharding=spec)

    return jax.tree.map(leaf, tree)


def as_one_stack(params: Any) -> Any:
    """Returns a model's parameters, `nnx.Variable`s on one device or the host, with the layers as [L, ...]."""

    def leaf(x):
        value = x.get_value()
        grouped = value.ndim == len(x.axes) + 2
        return x.replace(value.reshape(-1, *value.shape[2:])) if grouped else x

    return jax.tree.map(leaf, params, is_leaf=lambda x: hasattr(x, "axes"))


def _numbers(name: str) -> Iterable[tuple[int, str]]:
    """Yields every number between the dots of a name, with the name that is left without it."""
    words = name.split(".")
    for place, word in enumerate(words):
        if word.isdecimal():
            yield int(word), ".".join(words[:place] + words[place + 1 :])


def _is_regrouped(stored: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether one shape is [L, ...] and the other [R, L/R, ...]; a layer's own parameter has a dimension at least."""
    one, groups = sorted((list(stored), list(wanted)), key=len)
    if len(one) < 2 or len(groups) != len(one) + 1:
        return False
    return [groups[0] * groups[1], *groups[2:]] == one


def _reshape(shape: tuple[int, ...], sharding: Any, x: Any) -> Any:
    return (
        x.reshape(shape) if sharding is None else jax.lax.reshape(x, shape, out_sharding=sharding)
    )


def _abstract(leaf: Any, shape: tuple[int, ...], change: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*change(tuple(sharding.spec))))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
