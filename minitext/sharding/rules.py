"""Sharding rules: from the names of an array's dimensions to the axes of the mesh.

Parameters and activations name their dimensions once (`("embed", "mlp")`, `("batch", "seq", "embed")`); a frozen
`ShardingRules` maps each name to mesh axes. Changing the parallelism changes the rules and the mesh's shape, never
the model. The idea and most names are MaxText's (`logical_axis_rules` in its base.yml).

Chapters: 9, 11.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from minitext.config.sections import ShardingConfig
from minitext.sharding.mesh import BATCH_AXES

Names = Sequence[str | None]

# Axes over which parameters are sharded for storage only: a layer gathers its weights over them before use.
STORAGE_AXES = frozenset({"fsdp"})


@dataclass(frozen=True)
class ShardingRules:
    """Maps logical dimension names to tuples of mesh axes.

    Attributes:
      table: name -> mesh axes; a dimension with an empty tuple isn't split.
      optimizer: entries that differ for the optimizer's state (ZeRO).
      scatter: whether gradients take the optimizer's sharding after each microbatch, not only after the last (ZeRO-2).
      gather_dtype: `sharding.gather_dtype`.
    """

    table: Mapping[str, tuple[str, ...]]
    optimizer: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scatter: bool = False
    gather_dtype: str = "auto"

    def __post_init__(self):
        for name in ("table", "optimizer"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __hash__(self):
        tables = (*sorted(self.table.items()), *sorted(self.optimizer.items()))
        return hash((tables, self.scatter, self.gather_dtype))

    @property
    def of_optimizer(self) -> "ShardingRules":
        """The rules of the optimizer's state."""
        return ShardingRules({**self.table, **self.optimizer}) if self.optimizer else self

    def spec(
        self,
        names: Names,
        mesh: Mesh | AbstractMesh | None = None,
        *,
        drop: frozenset[str] = frozenset(),
    ) -> PartitionSpec:
        """Returns the PartitionSpec of an array whose dimensions have these names.

        Args:
          names: one logical name per dimension; None for a dimension that isn't split.
          mesh: by default the current mesh; its axes of size one are left out.
          drop: mesh axes to leave out.

        Raises:
          ValueError: for a name the rules don't know, or a mesh axis that two dimensions claim.
        """
        mesh = mesh or jax.sharding.get_abstract_mesh()
        # Inside a pipeline stage, `stage` is a manual axis and can't appear in specs.
        drop = (
            drop | {axis for axis, size in mesh.shape.items() if size == 1} | set(mesh.manual_axes)
        )
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

    def out(self, *names: str | None, drop: frozenset[str] = frozenset()) -> PartitionSpec | None:
        """Returns the spec for an operation's `out_sharding=`, or None where no mesh is set."""
        empty = jax.sharding.get_abstract_mesh().empty
        return None if empty else self.spec(names, drop=drop)

    def shard(self, x: jax.Array, *names: str | None) -> jax.Array:
        """Reshards an activation as its dimension names say; without a mesh, does nothing."""
        return _reshard(x, names, self.spec(names))

    def gather(self, w: jax.Array, *names: str | None) -> jax.Array:
        """Gathers a parameter over the storage axes (FSDP's all-gather); without a mesh, does nothing."""
        return _reshard(w, names, self.spec(names, drop=STORAGE_AXES))

    def splits(self, *names: str) -> bool:
        """Whether the current mesh splits any of these dimensions."""
        return any(self.ways(name) > 1 for name in names)

    def ways(self, name: str, mesh: Mesh | AbstractMesh | None = None) -> int:
        """Returns the number of devices that a mesh (by default the current one) splits a dimension over."""
        sizes = (mesh or jax.sharding.get_abstract_mesh()).shape
        return math.prod(sizes.get(axis, 1) for axis in self.table[name])

    def axes(self) -> frozenset[str]:
        """Returns the mesh axes that any dimension uses."""
        tables = (self.table, self.optimizer)
        return frozenset(axis for table in tables for axes in table.values() for axis in axes)


_WHOLE = dict.fromkeys(
    ("act", "embed", "expert", "head_dim", "heads", "kv_heads", "layers", "mlp", "one", "rank", "residual", "seq",
     "taps", "vocab"), ()
)  # fmt: skip
_DP = _WHOLE | {"batch": BATCH_AXES}
_FSDP = {"embed": ("fsdp",)}
_TP = dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), ("tensor",))
# Embedding and output layer don't belong to one stage: every stage has part of the vocabulary (Yeung et al. 2024).
_PP = {"layers": ("stage",), "vocab": ("stage", "tensor")}
_CP = dict.fromkeys(("seq", "residual"), ("context",))

RULES: Mapping[str, ShardingRules] = MappingProxyType(
    {
        # The batch is split, every device holds all parameters, gradients are summed.
        "dp": ShardingRules(_DP),
        # ... and the optimizer's state is split (Rajbhandari et al. 2020).
        "zero1": ShardingRules(_DP, optimizer=_FSDP),
        # ... and so are the gradients, as soon as they are computed.
        "zero2": ShardingRules(_DP, optimizer=_FSDP, scatter=True),
        # ... and so are the parameters: each layer gathers its own while it needs them (ZeRO's third stage).
        "fsdp": ShardingRules(_DP | _FSDP),
        # Heads and feed-forward features are split (Shoeybi et al. 2019); each device holds its part of the weights.
        "tp": ShardingRules(_DP | _TP),
        # ... and so is the sequence between the products, where nothing mixes tokens (Korthikanti et al. 2022).
        "tp_seq": ShardingRules(_DP | _TP | {"residual": ("tensor",)}),
        "fsdp_tp": ShardingRules(_DP | _FSDP | _TP),
        # The sequence is split everywhere, and attention fetches the keys and values it needs (Liu et al. 2023).
        "cp": ShardingRules(_DP | _FSDP | _CP),
        # Layers are split into stages (Huang et al. 2019).
        "pp": ShardingRules(_DP | _FSDP | _TP | _PP),
        # Experts are split.
        "ep": ShardingRules(_DP | _FSDP | {"expert": ("expert",)}),
        # Every axis does what its name says; axes of size one do nothing.
        "all": ShardingRules(_DP | _FSDP | _TP | _CP | _PP | {"expert": ("expert",)}),
    }
)


def rules_of(cfg: ShardingConfig) -> ShardingRules:
    """Returns the rules that a configuration names, with how layers gather their weights."""
    return replace(RULES[cfg.rules], gather_dtype=cfg.gather_dtype)


def _reshard(x: jax.Array, names: Names, spec: PartitionSpec) -> jax.Array:
    # A spec longer than the array's rank is accepted silently inside jit, so ranks are compared here.
    if len(names) != x.ndim:
        raise ValueError(
            f"an array of shape {x.shape} has {x.ndim} dimensions and got names {tuple(names)}"
        )
    return x if jax.sharding.get_abstract_mesh().empty else jax.sharding.reshard(x, spec)


def param_spec(
    rules: ShardingRules, variable: Any, mesh: Mesh | AbstractMesh | None = None
) -> PartitionSpec:
    """Returns the spec of an `nnx.Variable` from its `axes` metadata.

    A stacked variable has a leading dimension `layers`; a circular pipeline puts groups of layers before that.
    Variables without `axes`, and optimizer state that no longer has its parameter's rank, are replicated.
    """
    ndim = variable.get_value().ndim
    names = getattr(variable, "axes", None)
    if names is not None and 0 < (more := ndim - len(names)) <= 2:
        names = (*(None, "layers")[-more:], *names)
    return rules.spec(names, mesh) if names is not None and len(names) == ndim else PartitionSpec()


def reshard_tree(tree: Any, rules: ShardingRules) -> Any:
    """Reshards the `nnx.Variable`s of a pytree as the rules say; without a mesh, does nothing."""

    def leaf(x):
        if not isinstance(x, nnx.Variable):
            return x
        return x.replace(jax.sharding.reshard(x.get_value(), param_spec(rules, x)))

    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.tree.map(leaf, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def tree_shardings(tree: Any, mesh: Mesh | AbstractMesh, rules: ShardingRules) -> Any:
    """Returns a pytree, abstract or concrete, with a NamedSharding in place of every array.

    An `nnx.Variable` is sharded by its dimension names (`param_spec`); plain arrays are replicated.
    """

    def leaf(x):
        if isinstance(x, nnx.Variable):
            return x.replace(NamedSharding(mesh, param_spec(rules, x, mesh)))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree.map(leaf, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def flatten_tokens(x: jax.Array, rules: ShardingRules, *names: str | None) -> jax.Array:
    """Reshapes [B, T, ...] to [B*T, ...] unless rows are split over devices.

    A device's tokens would then be strided in B*T, which no sharding can describe. `names` are those of the dimensions
    after T; without names these aren't split.
    """
    if rules.splits("seq", "residual"):
        return x
    shape = (x.shape[0] * x.shape[1], *x.shape[2:])
    rest = names or (None,) * (x.ndim - 2)
    return jax.lax.reshape(x, shape, out_sharding=rules.out("batch", *rest))


def unflatten_tokens(
    x: jax.Array, batch: int, *names: str | None, sizes: tuple[int, ...], rules: ShardingRules
) -> jax.Array:
    """Reshapes [B*T, ...] or [B, T, ...] to [B, T, *sizes], whose trailing dimensions have these names."""
    length = x.shape[1] if rules.splits("seq", "residual") else x.shape[0] // batch
    return jax.lax.reshape(
        x, (batch, length, *sizes), out_sharding=rules.out("batch", "seq", *names)
    )
