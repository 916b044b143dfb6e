"""Tokens to the devices that hold their experts, and back.

Token-choice routing gives every token k assignments to experts. An assignment is placed in a slot of a buffer that is
sorted by expert; the experts multiply what is in their slots, and each token adds up what comes back. Two ways to make
the buffer:

- *dropless*: as many slots as assignments, and groups of as many rows as each expert got (Gale et al. 2022). Nothing
  is lost, and how much one device computes depends on the router.
- *dropping*: C slots for each expert and row of the batch (Lepikhin et al. 2020, whose groups are rows here). All
  sizes are known when the program is compiled, and what finds no slot is dropped.

Where the mesh axis `expert` splits the experts, it splits the batch too, so that no device computes anything twice,
and slots travel by an all-to-all over that axis, there and back.

Chapters: 18.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from minitext import kernels
from minitext.sharding import STORAGE_AXES, ShardingRules

AXIS = "expert"
GATHERED = "gathered_experts"


class Placement(NamedTuple):
    """A one-to-one map between A assignments and the slots of a buffer, with places left over on both sides.

    Attributes:
      slot_A: [A] each assignment's slot; the number of slots where it has none.
      assignment_S: [S] each slot's assignment; the number of assignments where it is empty.
    """

    slot_A: jax.Array
    assignment_S: jax.Array

    @staticmethod
    def of(assignments: jax.Array, slots: jax.Array, size: int) -> "Placement":
        """Places assignment `assignments[i]`, all A of them in any order, in slot `slots[i]` of `size`, if below."""
        A = len(assignments)
        empty = jnp.zeros_like(slots, shape=(size,)) + A
        return Placement(
            jnp.zeros_like(slots).at[assignments].set(slots),
            empty.at[slots].set(assignments, mode="drop"),
        )

    def dispatch(self, x_XD: jax.Array, k: int) -> jax.Array:
        """Returns [S, D]: in each slot its token's vector, zero in an empty one; assignment a is of token a // k."""
        return _take(x_XD, self.assignment_S // k, jnp.reshape(self.slot_A, (-1, k)))

    def combine(self, rows_SD: jax.Array, weights_Xk: jax.Array) -> jax.Array:
        """Returns [X, D]: each token's sum of its slots' rows, weighted; an assignment without a slot adds nothing."""
        X, k = weights_Xk.shape
        rows_AD = _take(rows_SD, self.slot_A, self.assignment_S[:, None])
        rows_XkD = jnp.reshape(rows_AD, (X, k, -1)).astype(jnp.float32)
        return jnp.sum(rows_XkD * weights_Xk[..., None], axis=1).astype(rows_SD.dtype)


# Autodiff's gradient of a gather is a scatter, a loop over rows on a CPU and slow on a TPU. The map is one-to-one, so
# the gradient is a gather, too.
@jax.custom_vjp
def _take(x_ND: jax.Array, from_M: jax.Array, to_NK: jax.Array) -> jax.Array:
    """Row `from_M[m]` of x in row m, zeros where there is no such row; `to_NK` has the m of which that is true."""
    return x_ND.at[from_M].get(mode="fill", fill_value=0)


_take.defvjp(
    lambda x_ND, from_M, to_NK: (_take(x_ND, from_M, to_NK), to_NK),
    lambda to_NK, grad_MD: (
        jnp.sum(grad_MD.at[to_NK].get(mode="fill", fill_value=0), axis=1),
        None,
        None,
    ),
)


class Layout(NamedTuple):
    """What is known of an expert layer when it is compiled.

    Attributes:
      experts: all of them (E).
      capacity: slots for each expert and row of the batch; None drops nothing.
      rows: of the batch, on all devices.
      rules: where the arrays lie.
    """

    experts: int
    capacity: int | None
    rows: int
    rules: ShardingRules


# Of one device: (rows in groups [M, D], rows of each group or None if equal, weights) -> rows [M, D].
Compute = Callable[[jax.Array, jax.Array | None, Any], jax.Array]


def run_experts(
    compute: Compute,
    x: jax.Array,
    experts_Xk: jax.Array,
    weights_Xk: jax.Array,
    params: Any,
    axes: Any,
    layout: Layout,
) -> jax.Array:
    """Sends tokens to their experts, computes, and adds up what comes back.

    Args:
      compute: what a device does with its experts' rows.
      x: [X, D], or [B, T, D] where rows of the batch are split.
      experts_Xk: [X, k] or [B, T, k] each token's experts.
      weights_Xk: likewise, their weights in float32.
      params: pytree of the experts' parameters [E, ...].
      axes: the same tree of their dimensions' names.
      layout: see there.

    Returns:
      The weighted sums, of x's shape and type.
    """
    rules, mesh = layout.rules, jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        params = jax.tree.map(lambda w: w.astype(x.dtype), params)
        return _on_device(compute, x, experts_Xk, weights_Xk, params, layout, 1)
    names = ("batch",) if x.ndim == 2 else ("batch", "seq")
    tokens = rules.spec((*names, "act"))
    is_names = lambda names: isinstance(names, tuple)  # noqa: E731
    specs = jax.tree.map(rules.spec, axes, is_leaf=is_names)
    used = _mesh_axes(tokens) | set().union(*(map(_mesh_axes, jax.tree.leaves(specs))))
    summed = tuple(axis for axis in rules.table["mlp"] if axis in used)

    def local(x, experts, weights, params):
        # What every device along an axis has the same of becomes each one's own: gradients are then summed, once.
        x, experts, weights = (_vary(a, used - _mesh_axes(tokens)) for a in (x, experts, weights))
        params = jax.tree.map(partial(_whole, used=used, dtype=x.dtype), params, specs)
        y = _on_device(compute, x, experts, weights, params, layout, rules.ways(AXIS))
        return jax.lax.psum(y, summed) if summed else y

    if any(STORAGE_AXES & _mesh_axes(spec) for spec in jax.tree.leaves(specs)):
        # Kept for the backward pass is what is stored: weights are gathered again, as `Linear` does.
        policy = jax.checkpoint_policies.save_anything_except_these_names(GATHERED)
        local = jax.checkpoint(local, policy=policy)
    x, experts_Xk, weights_Xk = (rules.shard(a, *names, "act") for a in (x, experts_Xk, weights_Xk))
    inside = (tokens, tokens, tokens, specs)
    y = jax.shard_map(local, in_specs=inside, out_specs=tokens)(x, experts_Xk, weights_Xk, params)
    return y if x.ndim == 2 else rules.shard(y, "batch", "residual", "act")


def _mesh_axes(spec: Any) -> set[str]:
    return {a for entry in spec if entry for a in ((entry,) if isinstance(entry, str) else entry)}


def _vary(x: jax.Array, axes: set[str]) -> jax.Array:
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def _whole(w: jax.Array, spec: Any, *, used: set[str], dtype: Any) -> jax.Array:
    """A device's weight in the compute type, gathered over the axes that only store it."""
    w = _vary(w.astype(dtype), used - _mesh_axes(spec))
    for dim, entry in enumerate(spec):
        for axis in STORAGE_AXES & _mesh_axes((entry,)):
            w = jax.lax.all_gather(w, axis, axis=dim, tiled=True)
    return checkpoint_name(w, GATHERED)


def _on_device(compute, x, experts, weights, params, layout: Layout, ways: int) -> jax.Array:
    """The layer on one device of `ways` that share the experts."""
    k, D = experts.shape[-1], x.shape[-1]
    x_XD = jnp.reshape(x, (-1, D))
    experts_Xk, weights_Xk = (jnp.reshape(a, (-1, k)) for a in (experts, weights))
    run = _dropless if layout.capacity is None else _dropping
    y_XD = run(partial(compute, params), x_XD, experts_Xk, weights_Xk, layout, ways)
    return jnp.reshape(y_XD, x.shape)


def _sort(experts_A: jax.Array, experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns assignments in the order of their experts, else in their own; these experts; and how many each has."""
    order_A = jnp.argsort(experts_A, stable=True)
    sorted_A = experts_A[order_A]
    ends_E = jnp.searchsorted(sorted_A, jnp.arange(experts), side="right").astype(jnp.int32)
    return order_A, sorted_A, jnp.diff(ends_E, prepend=0)


def _before(x: jax.Array, axis: int = 0) -> jax.Array:
    """Sums of all entries before each."""
    return jnp.cumsum(x, axis=axis) - x


# --- dropping: every expert has as many slots as every other


def _dropping(compute, x_XD, experts_Xk, weights_Xk, layout: Layout, ways: int) -> jax.Array:
    (X, k), E, C = experts_Xk.shape, layout.experts, layout.capacity
    rows = layout.rows // layout.rules.ways("batch")
    order_A, sorted_A, _ = _sort(jnp.ravel(experts_Xk), E)
    # In this order, those of one expert and row follow each other: by position in the row, so that what is dropped
    # depends on earlier tokens alone, and of one token by weight.
    group_A = sorted_A * rows + order_A // (X // rows * k)
    rank_A = jnp.arange(X * k) - jnp.searchsorted(group_A, group_A, side="left")
    size = E * rows * C
    placement = Placement.of(order_A, jnp.where(rank_A < C, group_A * C + rank_A, size), size)
    sent_SD = placement.dispatch(x_XD, k)
    if ways == 1:
        return placement.combine(compute(sent_SD, None), weights_Xk)
    there = _all_to_all(sent_SD)  # by source, then expert
    rows_SD = _swap(there, (ways, E // ways))
    back = _swap(compute(rows_SD, None), (E // ways, ways))
    return placement.combine(_all_to_all(back), weights_Xk)


def _swap(rows_SD: jax.Array, sizes: tuple[int, int]) -> jax.Array:
    """Rows that are sorted by a first number and then a second, sorted by the second and then the first."""
    apart = jnp.reshape(rows_SD, (*sizes, -1, rows_SD.shape[1]))
    return jnp.reshape(jnp.swapaxes(apart, 0, 1), rows_SD.shape)


def _all_to_all(rows_SD: jax.Array) -> jax.Array:
    """Part d of each device's rows goes to device d, and comes to stand in part s, s being where it came from."""
    return jax.lax.all_to_all(rows_SD, AXIS, 0, 0, tiled=True)


# --- dropless: every expert has as many slots as it needs


def _dropless(compute, x_XD, experts_Xk, weights_Xk, layout: Layout, ways: int) -> jax.Array:
    (X, k), E = experts_Xk.shape, layout.experts
    order_A, sorted_A, sizes_E = _sort(jnp.ravel(experts_Xk), E)
    if ways == 1:
        placement = Placement.of(order_A, jnp.arange(X * k), X * k)
        return placement.combine(compute(placement.dispatch(x_XD, k), sizes_E), weights_Xk)
    # A token's experts differ, so no device gets more assignments of a token than it has experts.
    most = X * min(k, E // ways)
    sizes_WE = jax.lax.all_gather(sizes_E, AXIS)
    exchange = _ragged if kernels.platform() == "tpu" else _padded
    return exchange(compute, x_XD, weights_Xk, (order_A, sorted_A, sizes_WE), ways, most)


def _padded(compute, x_XD, weights_Xk, plan, ways: int, most: int) -> jax.Array:
    """Sends each device as many slots as it could need; what arrives is sorted by expert there."""
    order_A, sorted_A, sizes_WE = plan
    k, (W, E), me = weights_Xk.shape[1], sizes_WE.shape, jax.lax.axis_index(AXIS)
    to_A = sorted_A // (E // W)
    first_W = _before(jnp.sum(jnp.reshape(sizes_WE[me], (W, E // W)), axis=1))
    slots_A = to_A * most + jnp.arange(len(to_A)) - first_W[to_A]
    placement = Placement.of(order_A, slots_A, W * most)
    there = _all_to_all(placement.dispatch(x_XD, k))

    here_We = jax.lax.dynamic_slice_in_dim(sizes_WE, me * (E // W), E // W, axis=1)
    source, place = jnp.divmod(jnp.arange(W * most), most)
    expert = jnp.sum(place[:, None] >= jnp.cumsum(here_We, axis=1)[source], axis=1)
    filled, expert = expert < E // W, jnp.minimum(expert, E // W - 1)
    sizes_e = jnp.sum(here_We, axis=0)
    first = _before(sizes_e)[expert] + (_before(here_We) - _before(here_We, 1))[source, expert]
    slots = jnp.where(filled, first + place, W * most)
    by_expert = Placement.of(jnp.arange(W * most), slots, W * most)
    rows = compute(by_expert.dispatch(there, 1), sizes_e)
    back = _take(rows, by_expert.slot_A, by_expert.assignment_S[:, None])
    return placement.combine(_all_to_all(back), weights_Xk)


class Slices(NamedTuple):
    """Runs of rows that one device sends to others and gets from them, one for each expert: `ragged_all_to_all`."""

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array
    recv_sizes: jax.Array


def _ragged(compute, x_XD, weights_Xk, plan, ways: int, most: int) -> jax.Array:
    """Sends what there is, each expert's rows to where they belong in the receiver's groups: nothing is sorted there.

    The receiver's buffer has room for the worst case.
    """
    order_A, _, sizes_WE = plan
    (W, E), A, me = sizes_WE.shape, len(order_A), jax.lax.axis_index(AXIS)
    placement = Placement.of(order_A, jnp.arange(A), A)
    # Where each source's rows for each expert begin, at the source and at the receiver.
    from_WE = _before(sizes_WE, axis=1)
    total_We = jnp.reshape(jnp.sum(sizes_WE, axis=0), (W, E // W))
    to_WE = _before(sizes_WE) + jnp.reshape(_before(total_We, axis=1), (E,))

    def of_mine(x_WE):
        return jnp.ravel(jax.lax.dynamic_slice_in_dim(x_WE, me * (E // W), E // W, axis=1))

    there = Slices(from_WE[me], sizes_WE[me], to_WE[me], of_mine(sizes_WE))
    back = Slices(of_mine(to_WE), of_mine(sizes_WE), of_mine(from_WE), sizes_WE[me])
    rows = _send(placement.dispatch(x_XD, weights_Xk.shape[1]), there, back, ways * most)
    return placement.combine(_send(compute(rows, total_We[me]), back, there, A), weights_Xk)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _send(rows_AD: jax.Array, there: Slices, back: Slices, size: int) -> jax.Array:
    """Returns what arrives, [size, D], zeros where nothing does; the gradient takes the way back."""
    empty = jnp.zeros_like(rows_AD, shape=(size, rows_AD.shape[1]))
    return jax.lax.ragged_all_to_all(rows_AD, empty, *there, axis_name=AXIS)


_send.defvjp(
    lambda rows_AD, there, back, size: (
        _send(rows_AD, there, back, size),
        (there, back, len(rows_AD)),
    ),
    lambda size, kept, grad: (_send(grad, kept[1], kept[0], kept[2]), None, None),
)
