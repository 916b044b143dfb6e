"""Products of 8-bit numbers, forward and backward, for the modules that `model.quantization` names.

A number x is stored as q, 8 bits, with x = scale * q. Numbers that share a scale share it along what a product sums
over, so the product is one of 8-bit numbers times the factors' scales. Forward and backward sum over different
dimensions, and a factor is therefore quantized anew for each of the three products: nothing but the stored factors is
kept between them.

Scales are those of the largest number (absmax), computed anew in each step. A row of zeros gives zeros. An infinity or
NaN makes its scale, and with it all results that use this scale, NaN.

Chapters: 25.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from minitext.config.quantization import QuantizationRule
from minitext.errors import UserError
from minitext.kernels.linear.xla import Specs, gather_factors

LONGEST = 2**17  # products of int8 whose sum int32 surely holds: 127 * 127 * 2**17 < 2**31


class Format(NamedTuple):
    """A storage type.

    Attributes:
      dtype: the type.
      limit: the largest number that it is used for.
      sums: the type in which its products are added up.
    """

    dtype: Any
    limit: float
    sums: Any


FORMATS = {
    "int8": Format(jnp.int8, 127.0, jnp.int32),
    "int4": Format(jnp.int4, 7.0, jnp.int32),
    "e4m3": Format(jnp.float8_e4m3fn, 448.0, jnp.float32),
    "e5m2": Format(jnp.float8_e5m2, 57344.0, jnp.float32),
}


class Quantized(NamedTuple):
    """An array as 8-bit `values` times `scale`, float32 with size 1 along the dimensions that share a scale."""

    values: jax.Array
    scale: jax.Array

    def dequantized(self) -> jax.Array:
        """Returns the numbers that it stands for, in float32."""
        return self.values.astype(jnp.float32) * self.scale


def quantize(
    x: jax.Array,
    kind: str,
    axes: Sequence[int] | None = None,
    *,
    stochastic: bool = False,
    scale: jax.Array | None = None,
) -> Quantized:
    """Quantizes numbers with the scale of the largest one.

    Args:
      x: any float type and shape.
      kind: one of `FORMATS`.
      axes: the dimensions along which numbers share a scale; None: all.
      stochastic: integers: round up or down at random, with the exact number as the mean.
      scale: the scales, if they are given.
    """
    form = FORMATS[kind]
    x = x.astype(jnp.float32)
    if scale is None:
        scale = absmax_scale(x, form.limit, axes)
    steps = x / scale
    if jnp.issubdtype(form.dtype, jnp.integer):
        steps = jnp.floor(steps + _noise(x)) if stochastic else jnp.round(steps)
    return Quantized(jnp.clip(steps, -form.limit, form.limit).astype(form.dtype), scale)


def absmax_scale(
    x: jax.Array, limit: float, axes: Sequence[int] | None = None, dtype: Any = jnp.float32
) -> jax.Array:
    """Returns the scales, in `dtype`, with which the largest of the numbers that share one becomes `limit`.

    Args:
      x: numbers in float32.
      limit: the largest number of a format.
      axes: the dimensions along which numbers share a scale, which have size 1 in the result; None: all.
      dtype: a float type with float32's range, to which the scales are rounded.
    """
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
    # Of zeros the scale is the smallest normal number, and 0 / scale is 0.
    return jnp.maximum(largest / limit, jnp.finfo(jnp.float32).tiny).astype(dtype)


def _noise(x: jax.Array) -> jax.Array:
    """Returns numbers in [0, 1), drawn from each number's own bits and position: no key, and equal on every mesh."""
    where = jax.typeof(x).sharding
    out = None if where.mesh.empty else where
    hashed = jax.lax.bitcast_convert_type(x, jnp.uint32)
    for axis in range(x.ndim):
        index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis, out_sharding=out)
        hashed = _mixed(hashed ^ (index * jnp.uint32(0x9E3779B1)))
    return (hashed >> 8).astype(jnp.float32) * 2.0**-24


def _mixed(h: jax.Array) -> jax.Array:
    """Returns 32 bits of which each depends on all of h's: the end of MurmurHash3 (Appleby 2011)."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


class Factor(NamedTuple):
    """A factor of a product.

    Attributes:
      array: its numbers.
      names: one letter per dimension.
      spec: how it is sharded, one entry per dimension; None where no mesh is set.
      kind: one of `FORMATS`.
      stochastic: see `quantize`.
    """

    array: jax.Array
    names: str
    spec: tuple[Any, ...] | None
    kind: str
    stochastic: bool = False


def contract(
    a: Factor, b: Factor, out: str, out_sharding: Any, rule: QuantizationRule, dtype: Any
) -> jax.Array:
    """Multiplies two quantized factors and sums over the letters that `out` doesn't have.

    Where devices share a sum, each multiplies its own part, and the parts are added up as numbers of `dtype`.

    Args:
      a: the first factor.
      b: the second; what both sum over is sharded equally.
      out: the letters of the result; a letter of all three is a batch dimension.
      out_sharding: the result's sharding.
      rule: which numbers share a scale.
      dtype: the type of the result.
    """
    summed = [name for name in a.names if name in b.names and name not in out]
    parts = "".join(name.lower() for name in summed if _ways(a, name) > 1)
    sizes = [a.array.shape[a.names.index(name)] // _ways(a, name) for name in summed]
    longest = LONGEST if a.kind == "int8" else math.prod(sizes)
    block = max(1, longest // math.prod(sizes[:-1]))
    if rule.granularity == "block":
        block = min(block, rule.block)
    where = _spec(parts + out, (a, b), None if parts else out_sharding)

    def multiply(a: Factor, b: Factor) -> jax.Array:
        q, r = _quantized(a, summed, rule), _quantized(b, summed, rule)
        left, right = (
            _split(x._replace(array=each.values), summed) for x, each in ((a, q), (b, r))
        )
        y = jnp.einsum(
            f"{left.names},{right.names}->{parts}{out}", left.array, right.array,
            preferred_element_type=FORMATS[a.kind].sums, out_sharding=where,
        ).astype(jnp.float32)  # fmt: skip
        y = y * _along(q.scale, a.names, parts + out, where)
        return y * _along(r.scale, b.names, parts + out, where)

    if block >= sizes[-1]:
        # Devices that share a sum also share its scales, as one device would have them.
        y = multiply(a, b)
    else:
        a, b = (_blocks(_split(x, summed), summed[-1], block) for x in (a, b))

        def of_block(pieces: tuple[jax.Array, jax.Array]) -> jax.Array:
            return multiply(a._replace(array=pieces[0]), b._replace(array=pieces[1]))

        first, others = (a.array[0], b.array[0]), (a.array[1:], b.array[1:])
        y = jax.lax.scan(lambda y, pieces: (y + of_block(pieces), None), of_block(first), others)[0]
    y = y.astype(dtype)
    return jax.lax.reduce_sum(y, range(len(parts)), out_sharding=out_sharding) if parts else y


def _quantized(x: Factor, summed: Sequence[str], rule: QuantizationRule) -> Quantized:
    axes = [i for i, name in enumerate(x.names) if name in summed]
    axes = None if rule.granularity == "tensor" else axes
    return quantize(x.array, x.kind, axes, stochastic=x.stochastic)


def _along(scale: jax.Array, names: str, out: str, where: Any) -> jax.Array:
    """Returns a factor's scales with the dimensions of the result, in its sharding."""
    gone = [i for i, name in enumerate(names) if name not in out]
    kept = [name for name in names if name in out]
    scale = jnp.transpose(jnp.squeeze(scale, gone), [kept.index(n) for n in out if n in kept])
    scale = jnp.expand_dims(scale, [i for i, name in enumerate(out) if name not in kept])
    if where is None:
        return scale
    entries = (e if n > 1 else None for e, n in zip(where, scale.shape, strict=True))
    return jax.sharding.reshard(scale, PartitionSpec(*entries))


def _ways(x: Factor, name: str) -> int:
    """Returns how many devices share a dimension."""
    entry = x.spec[x.names.index(name)] if x.spec is not None else None
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[axis] for axis in _axes(entry))


def _axes(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def _split(x: Factor, summed: Sequence[str]) -> Factor:
    """Divides each summed dimension that devices share into their parts, under a small letter, and what a part has."""
    for name in summed:
        if (ways := _ways(x, name)) > 1:
            i, shape, spec = x.names.index(name), x.array.shape, x.spec or ()
            shape = (*shape[:i], ways, shape[i] // ways, *shape[i + 1 :])
            spec = (*spec[: i + 1], None, *spec[i + 1 :])
            array = jax.lax.reshape(x.array, shape, out_sharding=PartitionSpec(*spec))
            names = x.names.replace(name, name.lower() + name)
            x = x._replace(array=array, names=names, spec=spec)
    return x


def _blocks(x: Factor, name: str, size: int) -> Factor:
    """Divides a dimension that no devices share into blocks, in front; the array has a dimension more than names."""
    i, shape = x.names.index(name), x.array.shape
    count = -(-shape[i] // size)
    padding = [(0, count * size - shape[i] if axis == i else 0) for axis in range(len(shape))]
    shape = (*shape[:i], count, size, *shape[i + 1 :])
    spec = None if x.spec is None else PartitionSpec(*x.spec[:i], None, *x.spec[i:])
    apart = jax.lax.reshape(jnp.pad(x.array, padding), shape, out_sharding=spec)
    return x._replace(array=jnp.moveaxis(apart, i, 0))


def _spec(out: str, factors: tuple[Factor, Factor], given: Any) -> Any:
    """Returns the sharding of a result as the one that is given, or as the factors have its dimensions."""
    if factors[0].spec is None:
        return None
    if given is not None:
        return PartitionSpec(*given, *[None] * (len(out) - len(given)))
    found = {}
    for x in factors:
        found |= dict(zip(x.names, x.spec or (), strict=True))
    # A small letter is a devices' part of a dimension: see `_split`.
    return PartitionSpec(*(found[name.upper()] for name in out))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def linear(x: jax.Array, w_DF: jax.Array, specs: Specs, rule: QuantizationRule) -> jax.Array:
    """Computes `minitext.kernels.linear` with quantized products, forward and backward.

    Args:
      x: [X, D] or [B, T, D], in the compute type.
      w_DF: [D, F] float32; it is sent in x's type, and quantized where it is used.
      specs: how the factors and the result are sharded.
      rule: how they are quantized.

    Returns:
      [X, F] or [B, T, F] in x's type.
    """
    x_whole, w_whole = _factors(x, w_DF, specs, rule)
    out = x_whole.names.replace("D", "F")
    return contract(x_whole, w_whole, out, specs.y, rule, x.dtype)


def _factors(
    x: jax.Array, w_DF: jax.Array, specs: Specs, rule: QuantizationRule
) -> tuple[Factor, Factor]:
    kind = _kinds(rule)[0]
    names = "XD" if x.ndim == 2 else "BTD"
    arrays = gather_factors(x, w_DF, specs)
    return (
        Factor(arrays[0], names, _entries(specs.x, x.ndim), kind),
        Factor(arrays[1], "DF", _entries(specs.w, 2), kind),
    )


def _kinds(rule: QuantizationRule) -> tuple[str, str]:
    """Returns the formats of stored factors and of gradients."""
    return ("e4m3", rule.gradients) if rule.dtype == "fp8" else (rule.dtype, rule.dtype)


def _entries(spec: PartitionSpec | None, ndim: int) -> tuple[Any, ...] | None:
    return None if spec is None else (*spec, *[None] * (ndim - len(spec)))


def _backward(specs, rule, kept, grad):
    x, w_DF = kept
    x_whole, w_whole = _factors(x, w_DF, specs, rule)
    names, spec = x_whole.names[:-1] + "F", None
    if x_whole.spec is not None and w_whole.spec is not None:
        # Tokens as the inputs have them, features as the weight has them.
        spec = (*x_whole.spec[:-1], w_whole.spec[1])
        grad = jax.sharding.reshard(grad, PartitionSpec(*spec))
    g = Factor(grad, names, spec, _kinds(rule)[1], rule.stochastic)
    on_mesh = spec is not None
    grad_x = contract(
        g, w_whole, x_whole.names, jax.typeof(x).sharding.spec if on_mesh else None, rule, x.dtype
    )
    grad_w = contract(
        x_whole, g, "DF", jax.typeof(w_DF).sharding.spec if on_mesh else None, rule, x.dtype
    )
    return grad_x, grad_w.astype(w_DF.dtype)


linear.defvjp(lambda x, w, specs, rule: (linear(x, w, specs, rule), (x, w)), _backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(
    lhs_MK: jax.Array, rhs_GKN: jax.Array, group_sizes_G: jax.Array | None, rule: QuantizationRule
) -> jax.Array:
    """Computes `minitext.kernels.grouped_matmul` on one device with quantized products, forward and backward.

    Args:
      lhs_MK: [M, K] rows sorted by group.
      rhs_GKN: [G, K, N] one matrix per group.
      group_sizes_G: the number of each group's rows; None if all have M / G.
      rule: how they are quantized.

    Returns:
      [M, N] in the type of `lhs_MK`. Rows that no group owns give zeros and get no gradient.
    """
    kind = _kinds(rule)[0]
    return _by_group(lhs_MK, rhs_GKN, group_sizes_G, rule, (kind, kind))


def _by_group(
    lhs_MK, rhs_GKN, sizes_G, rule: QuantizationRule, kinds: tuple[str, str], stochastic=False
) -> jax.Array:
    (M, K), (G, _, N) = lhs_MK.shape, rhs_GKN.shape
    left, right = kinds
    if sizes_G is None:
        lhs = Factor(jnp.reshape(lhs_MK, (G, M // G, K)), "GMK", None, left, stochastic)
        y_GMN = contract(lhs, Factor(rhs_GKN, "GKN", None, right), "GMN", None, rule, lhs_MK.dtype)
        return jnp.reshape(y_GMN, (M, N))
    whole = rule.granularity == "tensor"
    owned_M1 = _owned(M, sizes_G)
    lhs = quantize(
        jnp.where(owned_M1, lhs_MK, 0), left, None if whole else (1,), stochastic=stochastic
    )
    rhs = quantize(rhs_GKN, right, None if whole else (1,))
    y_MN = jax.lax.ragged_dot(
        lhs.values, rhs.values, sizes_G,
        preferred_element_type=FORMATS[left].sums, out_sharding=_on_one_device(),
    ).astype(jnp.float32)  # fmt: skip
    group_M = jnp.searchsorted(jnp.cumsum(sizes_G), jnp.arange(M), side="right")
    scale = rhs.scale[0] if whole else rhs.scale[jnp.minimum(group_M, G - 1), 0]
    return jnp.where(owned_M1, y_MN * lhs.scale * scale, 0).astype(lhs_MK.dtype)


def _owned(rows: int, sizes_G: jax.Array) -> jax.Array:
    return jnp.arange(rows)[:, None] < jnp.sum(sizes_G)


def _on_one_device() -> PartitionSpec | None:
    """Returns the sharding of a grouped product, which JAX doesn't infer; a device's own program has none."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.manual_axes else PartitionSpec()


_ROWS = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def _grouped_backward(rule, kept, grad_MN):
    lhs_MK, rhs_GKN, sizes_G = kept
    kind, grad_kind = _kinds(rule)
    transposed, kinds = jnp.swapaxes(rhs_GKN, 1, 2), (grad_kind, kind)
    grad_lhs = _by_group(grad_MN, transposed, sizes_G, rule, kinds, rule.stochastic)
    (M, K), (G, _, N) = lhs_MK.shape, rhs_GKN.shape
    if sizes_G is None:
        lhs = Factor(jnp.reshape(lhs_MK, (G, M // G, K)), "GMK", None, kind)
        grad = Factor(jnp.reshape(grad_MN, (G, M // G, N)), "GMN", None, kinds[0], rule.stochastic)
        return grad_lhs, contract(lhs, grad, "GKN", None, rule, rhs_GKN.dtype), None
    owned_M1, axes = _owned(M, sizes_G), None if rule.granularity == "tensor" else (0,)
    lhs = quantize(jnp.where(owned_M1, lhs_MK, 0), kind, axes)
    grad = quantize(jnp.where(owned_M1, grad_MN, 0), grad_kind, axes, stochastic=rule.stochastic)
    y_GKN = jax.lax.ragged_dot_general(
        lhs.values, grad.values, sizes_G, _ROWS,
        preferred_element_type=FORMATS[kind].sums, out_sharding=_on_one_device(),
    ).astype(jnp.float32)  # fmt: skip
    return grad_lhs, (y_GKN * lhs.scale.T * grad.scale).astype(rhs_GKN.dtype), None


grouped_matmul.defvjp(lambda *args: (grouped_matmul(*args), args[:3]), _grouped_backward)


def apply_rules(
    modules: Iterable[tuple[tuple[Any, ...], Any]], rules: Sequence[QuantizationRule]
) -> None:
    """Gives each module whose products can be quantized the first rule that its path matches.

    Args:
      modules: paths and modules, as of `nnx.iter_modules`. Those with an attribute `quantization` can be quantized.
      rules: of `model.quantization`.

    Raises:
      UserError: if a rule matches nothing, or a module that can't be quantized.
    """
    known = {"/".join(map(str, path)): module for path, module in modules}
    able = {path: m for path, m in known.items() if hasattr(m, "quantization")}
    for path, number in match_rules(able, rules, "model.quantization").items():
        rule, module = rules[number], able[path]
        if rule.dtype != "none":
            if reason := module.cannot_quantize(rule):
                raise UserError(
                    f"model.quantization[{number}] matches {path}, which can't be quantized: {reason}"
                )
            module.quantization = rule


def match_rules(paths: Iterable[str], rules: Sequence[Any], key: str) -> dict[str, int]:
    """Returns the number of the first rule that each module's path matches, for the paths that match one.

    Args:
      paths: of the modules that rules may name.
      rules: with a regular expression `module` each.
      key: the setting that has them, for the message.

    Raises:
      UserError: if a rule matches nothing.
    """
    paths, found = list(paths), {}
    for path in paths:
        for number, rule in enumerate(rules):
            if re.fullmatch(rule.module, path):
                found[path] = number
                break
    for number, rule in enumerate(rules):
        if number not in found.values():
            raise UserError(
                f"{key}[{number}].module={rule.module} matches no module that an earlier rule leaves: "
                f"choose among {', '.join(paths)}"
            )
    return found


def quantized_modules(model: nnx.Module) -> Iterator[tuple[str, QuantizationRule]]:
    """Yields the path and the rule of each module that is quantized."""
    for path, module in nnx.iter_modules(model):
        if (rule := getattr(module, "quantization", None)) is not None:
            yield "/".join(map(str, path)), rule
