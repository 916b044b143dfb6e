"""The tiled matrix product in the strict simulator: values and gradients, any shape, any order of parallel tiles."""

import contextlib
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from minitext.errors import UserError
from minitext.kernels import block_shapes
from minitext.kernels.matmul.tpu import ACTIVATIONS, matmul, supports


def strict(seed=0):
    """Races, NaN in memory that nobody wrote, reads out of bounds, parallel steps in any order."""
    return pltpu.force_tpu_interpret_mode(
        pltpu.InterpretParams(
            detect_races=True,
            out_of_bounds_reads="raise",
            uninitialized_memory="nan",
            num_cores_or_threads=2,
            random_seed=seed,
        )
    )


def factors(seed, M, K, N, dtype):
    rng = np.random.default_rng(seed)
    x, w, bias = rng.normal(size=(M, K)), rng.normal(size=(K, N)) / np.sqrt(K), rng.normal(size=N)
    return tuple(jnp.asarray(a, dtype) for a in (x, w, bias))


@given(
    seed=st.integers(0, 99), M=st.sampled_from([8, 40, 72]), K=st.sampled_from([128, 200, 300]),
    N=st.sampled_from([128, 136, 256]), tiles=st.sampled_from([(32, 128, 128), (48, 128, 256), (512, 512, 512)]),
    activation=st.sampled_from(list(ACTIVATIONS)), has_bias=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)  # fmt: skip
@settings(max_examples=2)
def test_it_is_the_product_and_its_gradient(seed, M, K, N, tiles, activation, has_bias, dtype):
    *xw, bias = factors(seed, M, K, N, dtype)
    args = (*xw, bias) if has_bias else tuple(xw)
    probe = jnp.asarray(np.random.default_rng(seed + 1).normal(size=(M, N)), jnp.float32)

    def loss(multiply):
        def probed(*args):
            out = multiply(*args)
            return jnp.sum(probe * out.astype(jnp.float32)), out

        return jax.value_and_grad(probed, tuple(range(len(args))), has_aux=True)

    def plain(x, w, bias=0.0):
        with jax.default_matmul_precision("highest"):
            return ACTIVATIONS[activation](x @ w + bias)

    def tiled(*args):
        return matmul(*args, activation=activation, tiles=tiles)

    exact = jax.tree.map(lambda a: a.astype(jnp.float32), args)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), strict(seed):
        # The function is a new one: JAX would keep that of an earlier simulator.
        (_, out), grads = loss(tiled)(*args)
        jax.block_until_ready(grads)
    assert "RACE" not in printed.getvalue()
    assert out.dtype == dtype and all(g.dtype == dtype for g in grads)
    # Factors in bfloat16 are exact; the result, and the gradient that reaches the sum, are rounded to 8 bits.
    rounding = 2e-5 if dtype == "float32" else 2e-2
    (_, want_out), want = jax.jit(loss(plain))(*exact)
    np.testing.assert_allclose(np.float32(out), want_out, atol=rounding * 4)
    for got, expected in zip(grads, want, strict=True):
        np.testing.assert_allclose(
            np.float32(got), expected, atol=rounding * np.abs(expected).max()
        )


def test_it_says_what_it_needs():
    x, w, bias = factors(0, 64, 256, 256, "bfloat16")
    assert supports(x, w, bias, tiles=(16, 128, 256)) is None
    assert "tile m=8 is neither a multiple of 16" in supports(x, w, tiles=(8, 128, 128))
    assert "tile k=100" in supports(x, w, tiles=(16, 100, 128))
    assert "expected [M, K] and [K, N]" in supports(x, w[:9])
    assert "needs a row, a column and a sum" in supports(x[:0], w)
    assert "expected both" in supports(x, w.astype("float32"))
    assert "256 columns" in supports(x, w, bias[:7])
    with pytest.raises(UserError, match=r"unknown activation 'tanh'"):
        matmul(x, w, activation="tanh")


def test_the_table_of_block_shapes_is_written_as_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(block_shapes, "BLOCKS", dict(block_shapes.BLOCKS))
    monkeypatch.setattr(block_shapes, "FILE", tmp_path / "block_shapes.json")
    block_shapes.write("matmul", "v6e", {"m": 8, "k": 128, "n": 256})
    table = json.loads((tmp_path / "block_shapes.json").read_text())
    read = {(op, chip): row for op, chips in table.items() for chip, row in chips.items()}
    assert read == block_shapes.BLOCKS
    assert block_shapes.BLOCKS["matmul", "v6e"] == {"m": 8, "k": 128, "n": 256}
    with jax.sharding.use_abstract_mesh(mesh_of("TPU v6 lite")):
        assert block_shapes.find("matmul")["n"] == 256
    with jax.sharding.use_abstract_mesh(mesh_of("TPU v5")):
        assert block_shapes.find("matmul") == block_shapes.BLOCKS["matmul", "v5p"]


def mesh_of(kind):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="tpu")
    return jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device)
