"""Sharding rules: from the names of an array's dimensions to the axes of the mesh.

Parameters and activations name their dimensions once (`("embed", "mlp")`, `("batch", "seq", "embed")`); a frozen
`ShardingRules` maps each name to mesh axes. Changing the parallelism changes the rules and the mesh's shape, never
the model. The idea and most names are MaxText's (`logical_axis_rules` in its base.yml).

Chapters: 9, 11.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Names = Sequence[str | None]

# Axes over which parameters are sharded for storage only: a layer gathers its weights over them before use.
STORAGE_AXES = frozenset({"fsdp"})


@dataclass(frozen=True)
class ShardingRules:
    """Maps logical dimension names to tuples of mesh axes.

    Attributes:
      table: name -> mesh axes; an empty tuple leaves the dimension whole.
    """

    table: Mapping[str, tuple[str, ...]]

    def __post_init__(self):
        object.__setattr__(self, "table", MappingProxyType(dict(self.table)))

    def __hash__(self):
        return hash(tuple(sorted(self.table.items())))

    def spec(self, names: Names, *, drop: frozenset[str] = frozenset()) -> PartitionSpec:
        """Returns the PartitionSpec of an array whose dimensions have these names.

        Args:
          names: one logical name per dimension; None leaves a dimension whole.
          drop: mesh axes to leave out.

        Raises:
          ValueError: for a name the rules don't know, or a mesh axis that two dimensions claim.
        """
        entries, taken = [], {}
        for name in names:
            if name is not None and name not in self.table:
                raise ValueError(
                    f"unknown dimension name {name!r}; these rules know {', '.join(sorted(self.table))}"
                )
            axes = tuple(a for a in (self.table[name] if name is not None else ()) if a not in drop)
            for axis in axes:
                if axis in taken:
                    raise ValueError(
                        f"dimensions {taken[axis]!r} and {name!r} of {tuple(names)} both claim mesh axis {axis!r}"
                    )
                taken[axis] = name
            entries.append(axes[0] if len(axes) == 1 else axes or None)
        return PartitionSpec(*entries)

    def out(self, *names: str | None) -> PartitionSpec | None:
        """Returns the spec for an operation's `out_sharding=`, or None where no mesh is set."""
        return None if jax.sharding.get_abstract_mesh().empty else self.spec(names)

    def shard(self, x: jax.Array, *names: str | None) -> jax.Array:
        """Reshards an activation to where its dimension names belong; without a mesh, does nothing."""
        return _reshard(x, names, self.spec(names))

    def gather(self, w: jax.Array, *names: str | None) -> jax.Array:
        """Gathers a parameter over the storage axes (FSDP's all-gather); without a mesh, does nothing."""
        return _reshard(w, names, self.spec(names, drop=STORAGE_AXES))

    def axes(self) -> frozenset[str]:
        """Returns the mesh axes that any dimension uses."""
        return frozenset(axis for axes in self.table.values() for axis in axes)


_BATCH = {"batch": ("data", "fsdp"), "seq": (), "act": ()}
_WEIGHTS = ("embed", "vocab", "heads", "kv_heads", "head_dim", "mlp", "layers")

RULES: Mapping[str, ShardingRules] = MappingProxyType(
    {
        # The batch is split, every device holds all parameters, gradients are summed.
        "dp": ShardingRules(_BATCH | dict.fromkeys(_WEIGHTS, ())),
        # The batch is split the same way, and parameters are stored split along `embed` (Rajbhandari et al. 2020).
        "fsdp": ShardingRules(_BATCH | dict.fromkeys(_WEIGHTS, ()) | {"embed": ("fsdp",)}),
    }
)


def _reshard(x: jax.Array, names: Names, spec: PartitionSpec) -> jax.Array:
    # A spec longer than the array's rank is accepted silently inside jit, so ranks are compared here.
    if len(names) != x.ndim:
        raise ValueError(
            f"an array of shape {x.shape} has {x.ndim} dimensions and got names {tuple(names)}"
        )
    return x if jax.sharding.get_abstract_mesh().empty else jax.sharding.reshard(x, spec)


def param_spec(rules: ShardingRules, variable: Any) -> PartitionSpec:
    """Returns the spec of an `nnx.Variable` from its `axes` metadata; a stacked one has `layers` in front.

    Variables without `axes`, and optimizer state that no longer has its parameter's rank, are replicated.
    """
    ndim = variable.get_value().ndim
    names = getattr(variable, "axes", None)
    if names is not None and len(names) == ndim - 1:
        names = ("layers", *names)
    return rules.spec(names) if names is not None and len(names) == ndim else PartitionSpec()


def tree_shardings(tree: Any, mesh: Mesh | AbstractMesh, rules: ShardingRules) -> Any:
    """Returns the NamedSharding of every leaf of a pytree of `nnx.Variable`s and plain arrays.

    Args:
      tree: abstract or concrete; variables carry their dimension names as `axes`, plain arrays are replicated.
      mesh: the mesh.
      rules: the rules.

    Returns:
      A tree of the same structure with a NamedSharding in place of every array.
    """
    from flax import nnx

    def leaf(x):
        if isinstance(x, nnx.Variable):
            return x.replace(NamedSharding(mesh, param_spec(rules, x)))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree.map(leaf, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
