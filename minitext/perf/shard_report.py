"""How every parameter is sharded: its dimensions' names, the mesh axes that split them, and its bytes on each device.

The mesh is abstract, so listing the parameters of a large model on a large mesh takes a second and no devices.

Chapters: 9, 11.
"""

import math
from dataclasses import dataclass

import jax
from flax import nnx

from minitext.checkpoint import leaves
from minitext.config.config import Config
from minitext.sharding.check import check_mesh
from minitext.sharding.mesh import abstract_mesh, factors_across
from minitext.terminal import print_tables, show_bytes, table
from minitext.training.step import abstract_state


@dataclass(frozen=True)
class Parameter:
    """One parameter, or one array of the optimizer's state.

    Attributes:
      name: its path.
      axes: its dimensions' names, `layers` first in a stack; empty if it has none.
      shape: shape of the whole array.
      spec: for each dimension, the mesh axes that it is split over.
      shard: shape of one device's part.
      bytes: bytes of the whole array.
      device_bytes: bytes of one device's part.
    """

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...]
    shard: tuple[int, ...]
    bytes: int
    device_bytes: int


def parameters(cfg: Config) -> list[Parameter]:
    """Lists a configuration's parameters and its optimizer's state, in order.

    Raises:
      UserError: if the mesh does not suit the model.
    """
    mesh = abstract_mesh(cfg.mesh)
    factors_across(cfg.mesh, dict(mesh.shape), math.prod(cfg.mesh.dcn.factors().values()))
    check_mesh(cfg, mesh)
    state, found = abstract_state(cfg, mesh), []
    for part in ("params", "opt_state"):
        tree = getattr(state, part)
        arrays = leaves.named({part: tree}).items()
        variables = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
        for (name, leaf), variable in zip(arrays, variables, strict=True):
            axes = getattr(variable, "axes", ())
            axes = ("layers", *axes) if len(axes) == leaf.ndim - 1 else axes
            spec = (*leaf.sharding.spec, *[None] * (leaf.ndim - len(leaf.sharding.spec)))
            spec = tuple((entry,) if isinstance(entry, str) else entry or () for entry in spec)
            shard, size = leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize
            sizes = leaf.size * size, math.prod(shard) * size
            found.append(Parameter(name, axes, leaf.shape, spec, shard, *sizes))
    return found


def print_parameters(cfg: Config, found: list[Parameter]) -> None:
    """Prints a row for each parameter, and sums of parameters and optimizer state, on stdout."""
    rows = [
        (
            p.name.removeprefix("params."),
            " ".join(f"{n}={d}" for n, d in zip(p.axes, p.shape, strict=True)),
            " ".join("+".join(axes) or "-" for axes in p.spec),
            "x".join(map(str, p.shard)),
            show_bytes(p.bytes),
            show_bytes(p.device_bytes),
        )
        for p in found
        if p.name.startswith("params.")
    ]
    sums = []
    for part, what in (("params.", "parameters"), ("opt_state.", "optimizer state")):
        of = [p for p in found if p.name.startswith(part)]
        whole, each = sum(p.bytes for p in of), sum(p.device_bytes for p in of)
        replicated = sum(p.bytes for p in of if p.bytes == p.device_bytes)
        sums.append((what, show_bytes(whole), show_bytes(each), show_bytes(replicated)))
    mesh = abstract_mesh(cfg.mesh)
    sizes = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
    factors = cfg.mesh.dcn.factors()
    crossing = ", ".join(f"mesh.dcn.{axis}={factor}" for axis, factor in factors.items())
    where = f" in {math.prod(factors.values())} slices, {crossing}" if factors else ""
    heads = ("parameter", "dimensions", "split over", "each device has", "bytes", "on one device")
    print_tables(
        f"{sizes or 'one device'}: {mesh.size:,} device(s){where}, sharding.rules={cfg.sharding.rules}",
        table(heads, rows, right=(4, 5)),
        table(("", "bytes", "on one device", "replicated"), sums, right=(1, 2, 3)),
    )
