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
from jax.sharding import PartitionSpec as P

from minitext import hardware
from minitext.sharding.rules import STORAGE_AXES, ShardingRules


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

    def back(self, rows_SD: jax.Array) -> jax.Array:
        """Returns [A, D]: for each assignment its slot's row, zero if it has none."""
        return _take(rows_SD, self.slot_A, self.assignment_S[:, None])

    def combine(self, rows_SD: jax.Array, weights_Xk: jax.Array) -> jax.Array:
        """Returns [X, D]: each token's sum of its slots' rows, weighted; an assignment without a slot adds nothing."""
        X, k = weights_Xk.shape
        rows_XkD = jnp.reshape(self.back(rows_SD), (X, k, -1)).astype(jnp.float32)
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

AXIS = "expert"


class Layout(NamedTuple):
    """How a device's tokens and experts lie among those of others.

    Attributes:
      experts: of all devices (E).
      capacity: slots for each expert and row of the batch; None drops nothing.
      rows: of the batch, on this device.
      ways: devices that share the experts.
      tokens: mesh axes along which devices have other tokens.
      features: mesh axes along which devices have other features of the same experts, and results are summed.
    """

    experts: int
    capacity: int | None
    rows: int
    ways: int = 1
    tokens: tuple[str, ...] = ()
    features: tuple[str, ...] = ()

    def total(self, x: jax.Array) -> jax.Array:
        """Returns the sum over the devices that have other tokens."""
        return jax.lax.psum(x, self.tokens) if self.tokens else x


def on_each_device(
    local: Callable[[jax.Array, Any, Layout], tuple[jax.Array, Any]],
    x: jax.Array,
    params: Any,
    axes: Any,
    layout: Layout,
    *,
    rules: ShardingRules,
    regather: bool,
) -> tuple[jax.Array, Any]:
    """Runs a layer of experts on each device's tokens and experts.

    Args:
      local: (tokens, parameters, the device's layout) -> (tokens, something that is the same for all devices). It gets
        parameters whole but for experts and features, in their own type.
      x: [X, D], or [B, T, D] where rows of the batch are split.
      params: pytree of arrays.
      axes: the same tree of their dimensions' names.
      layout: that of one device that has everything.
      rules: where the arrays lie.
      regather: whether the backward pass gathers weights again, as `Linear` does, instead of keeping them; a layer that
        is computed again as a whole does so anyway.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return local(x, params, layout)
    names = ("batch", "act") if x.ndim == 2 else ("batch", "seq", "act")
    spec = rules.spec(names)
    specs = jax.tree.map(rules.spec, axes, is_leaf=lambda names: isinstance(names, tuple))
    tokens = _mesh_axes(spec)
    layout = layout._replace(
        rows=layout.rows // rules.ways("batch"),
        ways=rules.ways(AXIS),
        tokens=tuple(sorted(tokens)),
        features=tuple(sorted(_mesh_axes(rules.spec(("mlp",))))),
    )

    def run(x, params):
        return local(x, jax.tree.map(partial(_whole, tokens=tokens), params, specs), layout)

    if regather:
        run = jax.checkpoint(run, policy=_is_no_weight)
    y, rest = jax.shard_map(run, in_specs=(spec, specs), out_specs=(spec, P()))(
        rules.shard(x, *names), params
    )
    return y if x.ndim == 2 else rules.shard(y, "batch", "residual", "act"), rest


def _mesh_axes(spec: Any) -> set[str]:
    return {a for entry in spec if entry for a in ((entry,) if isinstance(entry, str) else entry)}


def _is_no_weight(primitive: Any, *_args: Any, **_params: Any) -> bool:
    return primitive.name not in ("all_gather", "pvary", "convert_element_type")


def _whole(w: jax.Array, spec: Any, *, tokens: set[str]) -> jax.Array:
    """A device's part of a weight, gathered over the axes that only store it.

    Devices with other tokens have gradients of their own, which are added up: over `fsdp` by a reduce-scatter, and what
    is left of them over the rest.
    """
    w = _vary(w, tuple(tokens - _mesh_axes(spec)))
    for dim, entry in enumerate(spec):
        for axis in STORAGE_AXES & _mesh_axes((entry,)):
            w = jax.lax.all_gather(w, axis, axis=dim, tiled=True)
    return w


def _vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """An x that is the same along these axes as each device's own; its gradient is the sum of theirs."""
    return jax.lax.pcast(x, axes, to="varying") if axes else x


# Of one device: (rows in groups [M, D], rows of each group or None if equal) -> rows [M, D].
Compute = Callable[[jax.Array, jax.Array | None], jax.Array]


def exchange(
    compute: Compute, x: jax.Array, experts: jax.Array, weights: jax.Array, layout: Layout
) -> jax.Array:
    """Sends a device's tokens to their experts, computes, and adds up what comes back.

    Args:
      compute: what a device does with its experts' rows.
      x: [..., D] tokens.
      experts: [..., k] each token's experts.
      weights: [..., k] their weights in float32.
      layout: see there.

    Returns:
      The weighted sums, of x's shape and type.
    """
    k, D = experts.shape[-1], x.shape[-1]
    x_XD = jnp.reshape(_vary(x, layout.features), (-1, D))
    experts_Xk, weights_Xk = (
        jnp.reshape(_vary(a, layout.features), (-1, k)) for a in (experts, weights)
    )
    args = compute, x_XD, experts_Xk, weights_Xk, layout
    C = layout.capacity
    y = _dropless(*args) if C is None else _dropping(*args, C)
    y = jnp.reshape(y, x.shape)
    return jax.lax.psum(y, layout.features) if layout.features else y


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


def _dropping(compute, x_XD, experts_Xk, weights_Xk, layout: Layout, C: int) -> jax.Array:
    (X, k), E = experts_Xk.shape, layout.experts
    rows, ways = layout.rows, layout.ways
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


def _dropless(compute, x_XD, experts_Xk, weights_Xk, layout: Layout) -> jax.Array:
    (X, k), E, ways = experts_Xk.shape, layout.experts, layout.ways
    order_A, sorted_A, sizes_E = _sort(jnp.ravel(experts_Xk), E)
    if ways == 1:
        placement = Placement.of(order_A, jnp.arange(X * k), X * k)
        return placement.combine(compute(placement.dispatch(x_XD, k), sizes_E), weights_Xk)
    # A token's experts differ, so no device gets more assignments of a token than it has experts.
    most = X * min(k, E // ways)
    sizes_WE = jax.lax.all_gather(sizes_E, AXIS)
    exchange = _ragged if hardware.platform() == "tpu" else _padded
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

    here_We = _of_device(sizes_WE, me)
    source, place = jnp.divmod(jnp.arange(W * most), most)
    expert = jnp.sum(place[:, None] >= jnp.cumsum(here_We, axis=1)[source], axis=1)
    filled, expert = expert < E // W, jnp.minimum(expert, E // W - 1)
    sizes_e = jnp.sum(here_We, axis=0)
    first = _before(sizes_e)[expert] + (_before(here_We) - _before(here_We, 1))[source, expert]
    slots = jnp.where(filled, first + place, W * most)
    by_expert = Placement.of(jnp.arange(W * most), slots, W * most)
    rows = compute(by_expert.dispatch(there, 1), sizes_e)
    back = by_expert.back(rows)
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
    A, me = len(order_A), jax.lax.axis_index(AXIS)
    placement = Placement.of(order_A, jnp.arange(A), A)
    there, back = ragged_slices(sizes_WE, me)
    sizes_e = jnp.sum(_of_device(sizes_WE, me), axis=0)
    rows = _send(placement.dispatch(x_XD, weights_Xk.shape[1]), there, back, ways * most)
    return placement.combine(_send(compute(rows, sizes_e), back, there, A), weights_Xk)


def ragged_slices(sizes_WE: jax.Array, me: jax.Array | int) -> tuple[Slices, Slices]:
    """Returns what device `me` sends to the experts' devices and gets, and what it sends back and gets.

    Args:
      sizes_WE: [W, E] rows that each device has for each expert, sorted by expert; device w has experts w*E/W and on.
      me: this device.
    """
    W, E = sizes_WE.shape
    # Where each source's rows for each expert begin, at the source and at the receiver.
    from_WE = _before(sizes_WE, axis=1)
    total_We = jnp.reshape(jnp.sum(sizes_WE, axis=0), (W, E // W))
    to_WE = _before(sizes_WE) + jnp.reshape(_before(total_We, axis=1), (E,))
    sizes, first, at = (jnp.ravel(_of_device(x, me)) for x in (sizes_WE, from_WE, to_WE))
    there = Slices(from_WE[me], sizes_WE[me], to_WE[me], sizes)
    return there, Slices(at, sizes, first, sizes_WE[me])


def _of_device(x_WE: jax.Array, me: jax.Array | int) -> jax.Array:
    """The columns of a device's own experts, [W, E / W]."""
    W, E = x_WE.shape
    return jax.lax.dynamic_slice_in_dim(x_WE, me * (E // W), E // W, axis=1)


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
