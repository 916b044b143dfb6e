"""What `minitext.perf.cost` counts: FLOPs of products, however they are wrapped, and bytes of arrays in memory."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from minitext.config.config import load_config
from minitext.perf import cost
from minitext.perf.roofline import count_step

F32 = jnp.float32


def shape(*dims, dtype=F32):
    return jax.ShapeDtypeStruct(dims, dtype)


def product_flops(fn, *args):
    return sum(op.runs * op.flops for op in cost.count(fn, *args) if op.is_product)


def moved(fn, *args):
    return sum(op.runs * op.bytes for op in cost.count(fn, *args))


def test_a_product_is_counted_exactly():
    (op,) = cost.count(jnp.matmul, shape(3, 5, dtype=jnp.bfloat16), shape(5, 7, dtype=jnp.bfloat16))
    assert (op.flops, op.bytes) == (2 * 3 * 5 * 7, 2 * (3 * 5 + 5 * 7 + 3 * 7))
    assert (op.result, op.dtype, op.runs, op.part) == ("bf16[3,7]", "bfloat16", 1, "optimizer")
    assert op.intensity == op.flops / op.bytes


@given(
    sizes=st.fixed_dictionaries({letter: st.integers(2, 6) for letter in "abcde"}),
    left=st.permutations("abcd"),
    right=st.permutations("bcde"),
    out=st.sets(st.sampled_from("abcde"), min_size=1),
)
def test_products_of_any_form_count_as_the_compiler_counts_them(sizes, left, right, out):
    subscripts = f"{''.join(left)},{''.join(right)}->{''.join(sorted(out))}"
    args = [shape(*(sizes[letter] for letter in side)) for side in (left, right)]
    # Letters that only one operand has, and the result hasn't, are summed before the product.
    letters = set(left) & (set(right) | out) | set(right) & (set(left) | out)
    counted = product_flops(functools.partial(jnp.einsum, subscripts), *args)
    contracted = set(left) & set(right) - out
    assert counted == 2 * math.prod(sizes[letter] for letter in letters) or not contracted


def test_loops_count_as_often_as_they_run():
    w, x = shape(6, 8, 8), shape(4, 8)

    def scanned(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    def unrolled(w, x):
        for i in range(6):
            x = jnp.tanh(x @ w[i])
        return x

    once = 2 * 4 * 8 * 8
    assert product_flops(scanned, w, x) == product_flops(unrolled, w, x) == 6 * once
    compiled = jax.jit(scanned).lower(w, x).compile().cost_analysis()
    assert compiled["flops"] < 2 * once + 1000  # why the compiler isn't asked
    total = lambda f: lambda w, x: jnp.sum(f(w, x))  # noqa: E731
    for f in (scanned, unrolled):
        # Of x no gradient is asked for, so the first layer's isn't computed, except in a loop.
        backward = 2 * 6 - (f is unrolled)
        assert product_flops(jax.grad(total(f)), w, x) == (6 + backward) * once


def test_recomputation_counts_and_belongs_to_the_backward_pass():
    w, x = shape(8, 8), shape(4, 8)

    def loss(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))

    once = 2 * 4 * 8 * 8
    plain, again = jax.value_and_grad(loss), jax.value_and_grad(jax.checkpoint(loss))
    assert product_flops(plain, w, x) == 5 * once
    assert product_flops(again, w, x) == 7 * once
    assert (
        product_flops(lambda w, x: again(w, x)[1], w, x) == 5 * once
    )  # nobody needs the forward pass
    parts = [op.part for op in cost.count(again, w, x) if op.is_product]
    assert parts == ["forward"] * 2 + ["backward"] * 5


def test_per_device_code_counts_on_all_devices():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x, w = shape(16, 4), shape(4, 4)
    split = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    with jax.set_mesh(mesh):
        assert product_flops(split, x, w) == product_flops(jnp.matmul, x, w) == 2 * 16 * 4 * 4


def test_a_kernel_counts_at_every_point_of_its_grid():
    def multiply(a, b):
        def body(a_ref, b_ref, o_ref):
            @pl.when(pl.program_id(2) == 0)
            def _():
                o_ref[...] = jnp.zeros_like(o_ref)

            o_ref[...] += jnp.dot(a_ref[...], b_ref[...])

        return pl.pallas_call(
            body,
            grid=(2, 3, 4),
            in_specs=[
                pl.BlockSpec((8, 16), lambda i, j, k: (i, k)),
                pl.BlockSpec((16, 8), lambda i, j, k: (k, j)),
            ],
            out_specs=pl.BlockSpec((8, 8), lambda i, j, k: (i, j)),
            out_shape=shape(16, 24),
        )(a, b)

    (op,) = cost.count(multiply, shape(16, 64), shape(64, 24))
    assert op.is_product and op.flops == 2 * 16 * 64 * 24
    assert op.bytes == 24 * 4 * (8 * 16 + 16 * 8 + 8 * 8)


def test_products_of_groups_count_each_row_once_and_so_do_their_gradients():
    rows, matrices, sizes = shape(64, 16), shape(4, 16, 48), shape(4, dtype=jnp.int32)
    once = 2 * 64 * 16 * 48
    assert product_flops(jax.lax.ragged_dot, rows, matrices, sizes) == once
    loss = lambda *args: jnp.sum(jax.lax.ragged_dot(*args) ** 2)  # noqa: E731
    for which in (0, 1):  # of the rows, of the matrices; beside the product itself
        assert product_flops(jax.grad(loss, which), rows, matrices, sizes) == 2 * once


def test_an_elementwise_chain_is_read_and_written_once():
    x = shape(1000)
    chain = lambda x: jnp.tanh(x * 2 + 1) / 3  # noqa: E731
    assert moved(chain, x) == 2 * 4000
    assert moved(jax.jit(chain), x) == 2 * 4000
    assert moved(lambda x: jnp.sum(chain(x)), x) == 4000 + 4
    for fuses in jax.lax.stop_gradient, lambda y: jax.lax.reduce_precision(y, 8, 7):
        assert moved(lambda x, f=fuses: jnp.tanh(f(x * 2)), x) == 2 * 4000
    assert moved(lambda x: jnp.exp(jnp.stack([x, x + 1])), x) == 3 * 4000
    assert (
        moved(lambda x: jnp.sum(jnp.ones(1000)) + x, x) < 2 * 4000 + 16
    )  # ones are made on the way
    # An array that enters a product must exist, and what nobody needs is never computed.
    m = shape(10, 10)
    assert moved(lambda m: jnp.tanh(m) @ m, m) == 2 * 400 + 3 * 400
    assert moved(lambda m: (jnp.exp(m) @ m, m + 1)[1], m) == 2 * 400


def test_slices_gathers_and_updates_move_what_they_touch():
    table, ids, rows = shape(1000, 8), shape(5, dtype=jnp.int32), shape(5, 8)
    assert moved(lambda t, i: t[i], table, ids) < 1000
    assert moved(lambda t: t[3:5] * 2, table) == 2 * 2 * 32
    update = lambda t, r: jax.lax.dynamic_update_slice(t, r, (0, 0))  # noqa: E731
    assert moved(update, table, rows) == 2 * 160


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["model.scan_layers=true", "model.layers=7", "model.tie_embeddings=true"],
        ["model.heads=4", "model.kv_heads=2", "model.head_dim=16", "train.microbatches=4"],
        ["model.dtype=bfloat16", "data.seq_len=1024", "train.global_batch=2", "train.z_loss=1e-4"],
        ["model.attention.impl=xla", "model.embed=96", "model.heads=3", "model.mlp=512", "model.vocab=1000"],
        ["model.scan_layers=true", "model.remat=full"],
    ],
    ids=lambda settings: " ".join(settings) or "laptop",
)  # fmt: skip
def test_a_train_step_counts_what_the_closed_formula_says(settings):
    cfg = load_config("laptop", ["model.layers=2", *settings])
    m, T = cfg.model, cfg.data.seq_len
    tokens = cfg.train.global_batch * T
    blocks = 1 if m.attention.impl == "xla" else 2 if T < 512 else 4
    square = (1 + 1 / blocks) / 2  # what blocks compute of attention's square
    attention = m.layers * 4 * m.heads * m.H * T * square
    layers = 2 * m.layers * (m.embed * m.H * (2 * m.heads + 2 * m.K) + 3 * m.embed * m.mlp)
    # A layer's last product isn't needed again.
    again = layers + attention - 2 * m.layers * m.mlp * m.embed if m.remat == "full" else 0
    expected = tokens * (3 * (layers + attention + 2 * m.vocab * m.embed) + again)
    counted = sum(op.runs * op.flops for op in count_step(cfg) if op.is_product)
    assert counted == pytest.approx(expected, rel=0.01)
