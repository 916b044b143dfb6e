"""Token vectors on a GPU, with a gradient that is bit-equal in every run.

The gradient of a table's row is the sum over the tokens that looked it up. XLA's program adds them in any order, and
when it is told not to, it sorts every number of the gradient. Here only the tokens are sorted. Then the gradients of a
token are neighbours, and one program adds them (a Pallas kernel that JAX lowers to Triton).

Chapters: 19.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from minitext.kernels.lookup import xla
from minitext.kernels.per_device import on_each_device, split
from minitext.kernels.tiles_gpu import Side, load, side, store, whole

ROWS = 16  # that a program adds at a time, so that a frequent token doesn't keep it long
COLUMNS = 1024


def lookup(table_VD: jax.Array, tokens_BT: jax.Array, _out_sharding=None) -> jax.Array:
    """Computes `minitext.kernels.lookup`. Each device looks up its own tokens."""
    rank = tokens_BT.ndim
    return on_each_device(_lookup, table_VD, tokens_BT, outs=((1, rank),))[0]


def supports(table_VD, tokens_BT, _out_sharding=None) -> str | None:
    """Returns why the kernel can't compute this, or None."""
    if any(split(table_VD)):
        return f"every device needs the whole table: it is split over {split(table_VD)}"
    if 0 in (*table_VD.shape, tokens_BT.size):
        return f"it needs a row, a feature and a token: got {table_VD.shape} and {tokens_BT.shape}"
    return None


@jax.custom_vjp
def _lookup(table_VD, tokens_BT):
    return (xla.lookup(table_VD, tokens_BT),)


def _backward(residuals, grads):
    table_VD, tokens_BT = residuals  # of the table only its shape and type are used
    V, D = table_VD.shape
    tokens_X = jnp.ravel(tokens_BT)
    tokens_X = jnp.where(tokens_X < 0, tokens_X + V, tokens_X)  # as indices count from the end
    order_X = jnp.argsort(tokens_X, stable=True)
    grads_XD = jnp.reshape(grads[0], (-1, D))[order_X]
    firsts = jnp.searchsorted(tokens_X[order_X], jnp.arange(V + 1)).astype(jnp.int32)
    columns = min(COLUMNS, pl.next_power_of_2(D))
    dtable_VD = pl.pallas_call(
        partial(_kernel, columns=columns),
        grid=(V, pl.cdiv(D, columns)),
        in_specs=[whole(firsts), whole(grads_XD)],
        out_specs=whole(table_VD),
        out_shape=jax.ShapeDtypeStruct((V, D), table_VD.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4),
        name="lookup_gradient",
    )(firsts, grads_XD)
    return dtable_VD, None


_lookup.defvjp(lambda *args: (_lookup(*args), args), _backward)


def _kernel(firsts_ref, grads_ref, out_ref, *, columns: int):
    """Adds the gradients of one token, for some of the features."""
    D, token = grads_ref.shape[1], pl.program_id(0)
    low, high = firsts_ref[token], firsts_ref[token + 1]
    features = side(pl.program_id(1), columns, D)

    def step(i, total):
        rows = Side(low + i * ROWS, ROWS, high)
        return total + jnp.sum(load(grads_ref, (), rows, features).astype(jnp.float32), axis=0)

    total = jnp.zeros(columns, jnp.float32)
    total = jax.lax.fori_loop(0, pl.cdiv(high - low, ROWS), step, total)
    store(out_ref, (token,), total, features)
