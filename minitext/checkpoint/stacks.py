"""Layers stored one by one and layers stored as a stack, each read as the other.

This package keeps the leaves of its L layers stacked, `params.blocks.ffn.gate` [L, D, F], whether it runs them with
`lax.scan` or unrolled. Code that keeps a list of layers has `params.blocks.0.ffn.gate` [D, F] and so on. Two names
that differ only by a number between dots are taken for these two forms of one parameter, in the optimizer's state too.

A circular pipeline (`minitext.sharding.pipeline`) keeps the L layers as [R, L/R, ...], in the same order. If a stored
leaf's shape shows that it's the other form of the wanted one, it is reshaped.

Chapters: 8.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


class Stack(NamedTuple):
    """A wanted leaf [L, ...] whose layers are stored under a name each, in this order."""

    layers: tuple[str, ...]


class Layer(NamedTuple):
    """A wanted leaf that is stored as one layer of a stack."""

    stack: str
    number: int


def other_forms(stored: Iterable[str], wanted: Iterable[str]) -> dict[str, Stack | Layer]:
    """Finds the wanted names that are stored in the other form; leaves out names that are stored as they are."""
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
                to_read |= dict.fromkeys(layers, _abstract(leaf, leaf.shape[1:], 1, ()))
            case Layer(stack, number) if number < (saved[stack]["shape"] or [0])[0]:
                shape = (saved[stack]["shape"][0], *leaf.shape)
                to_read[stack] = _abstract(leaf, shape, 0, (None,))
            case _ if name in saved and _is_regrouped(saved[name]["shape"], leaf.shape):
                shape = tuple(saved[name]["shape"])
                # A group may have too few layers to be split over the wanted stages.
                first = () if len(shape) < leaf.ndim else (None, None)
                to_read[name] = _abstract(leaf, shape, 1, first)
            case _:
                to_read[name] = leaf
    return to_read


def as_wanted(values: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what was read by `as_stored` under the wanted names, stacked, unstacked or reshaped."""
    forms = other_forms(values, wanted)
    found, on_host, on_device = {}, [], []
    for name, leaf in wanted.items():
        if name in forms or (name in values and _is_regrouped(values[name].shape, leaf.shape)):
            (on_device if hasattr(leaf, "sharding") else on_host).append(name)
        elif name in values:
            found[name] = values[name]
    sources = {name: forms.get(name) or name for name in (*on_host, *on_device)}
    found |= {name: _convert(values, sources[name], wanted[name]) for name in on_host}
    if on_device:
        # One program for all leaves: compiling one for each would take longer than all the rest.
        convert = jax.jit(
            lambda values: {n: _convert(values, sources[n], wanted[n]) for n in on_device},
            out_shardings={name: wanted[name].sharding for name in on_device},
        )
        needed = {stored for name in on_device for stored in _names(sources[name])}
        found |= convert({name: values[name] for name in needed})
    return found


def _names(source: Stack | Layer | str) -> tuple[str, ...]:
    if isinstance(source, Stack):
        return source.layers
    return (source.stack if isinstance(source, Layer) else source,)


def _convert(values: Mapping[str, Any], source: Stack | Layer | str, like: Any) -> Any:
    match source:
        case Stack(names):
            layers = [values[name] for name in names]
            return np.stack(layers) if isinstance(layers[0], np.ndarray) else jnp.stack(layers)
        case Layer(stack, number):
            return values[stack][number]
        case name if (sharding := getattr(like, "sharding", None)) is None:
            return values[name].reshape(like.shape)
        case name:
            return jax.lax.reshape(values[name], like.shape, out_sharding=sharding)


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
    """Yields every number between the dots of a name, with the name without that number."""
    words = name.split(".")
    for i, word in enumerate(words):
        if word.isdecimal():
            yield int(word), ".".join(words[:i] + words[i + 1 :])


def _is_regrouped(stored: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether one shape is [L, ...] and the other [R, L/R, ...]; each layer's part has at least one dimension."""
    one, groups = sorted((list(stored), list(wanted)), key=len)
    return len(one) >= 2 and [groups[0] * groups[1], *groups[2:]] == one


def _abstract(
    leaf: Any, shape: tuple[int, ...], drop: int, add: tuple[None, ...]
) -> jax.ShapeDtypeStruct:
    """The leaf with another shape: without the first `drop` entries of its spec, and with `add` before the rest."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(*add, *tuple(sharding.spec)[drop:])
        sharding = NamedSharding(sharding.mesh, spec)
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
