"""Rounding for inputs that are seen, against rounding to the nearest number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minitext.models.gptq import store_calibrated
from minitext.models.quantized_storage import restore, store
from tests.conftest import audit_but


def inputs(width):
    """Inputs whose features depend on each other and differ in size."""
    mix = jax.random.normal(jax.random.key(0), (width, width)) / width**0.5
    sizes = jnp.exp(jax.random.normal(jax.random.key(1), (width,)))
    return jax.random.normal(jax.random.key(2), (4 * width, width)) @ (mix * sizes)


@pytest.mark.parametrize(
    ("kind", "block"),
    [
        ("int4", 32),
        pytest.param("int4", None, marks=pytest.mark.audit),
        ("nf4", 24),
        ("int8", None),
    ],
)
@pytest.mark.parametrize("width", audit_but([75], [64, 75]))  # the second isn't whole blocks
def test_outputs_are_nearer_than_with_nearest_weights(kind, block, width):
    x_XD, w_DF = inputs(width), jax.random.normal(jax.random.key(3), (width, 40))
    moments_DD = x_XD.T @ x_XD
    found, nearest = (
        store_calibrated(w_DF, moments_DD, kind=kind, block=block),
        store(w_DF, kind, block),
    )
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, nearest)
    assert jax.tree.map(jnp.result_type, found) == jax.tree.map(jnp.result_type, nearest)

    def error(stored):
        return float(jnp.linalg.norm(x_XD @ (w_DF - restore(stored, kind, width, block))))

    assert error(found) < 0.8 * error(nearest)


def test_inputs_that_do_not_depend_on_each_other_change_nothing_but_the_scale():
    """Then there is nothing to pass on: every weight is the nearest number of its own scale."""
    w_DF = jax.random.normal(jax.random.key(3), (64, 8))
    found = store_calibrated(w_DF, jnp.eye(64), kind="int4", block=32)
    back = np.asarray(restore(found, "int4", 64, 32))
    step = np.repeat(np.asarray(found.scale.astype(jnp.float32))[:, 0], 32, axis=0)
    inside = np.abs(w_DF) <= 7 * step
    assert np.all(np.abs(back - w_DF)[inside] <= 0.5 * step[inside] * (1 + 1e-5))


def test_an_input_that_is_always_zero_does_no_harm():
    w_DF = jax.random.normal(jax.random.key(3), (32, 8))
    moments_DD = jnp.eye(32).at[5, 5].set(0)
    for moments in (moments_DD, jnp.zeros((32, 32))):
        found = store_calibrated(w_DF, moments, kind="int4", block=16)
        assert np.all(np.isfinite(restore(found, "int4", 32, 16)))


def test_an_error_is_passed_on_to_later_blocks():
    """The second block sees nearly what the first sees, and so takes back most of its error."""
    half_XB = jax.random.normal(jax.random.key(0), (256, 32))
    x_XD = jnp.concatenate([half_XB, half_XB + 1e-3 * half_XB[::-1]], axis=1)
    w_DF = (
        jax.random.normal(jax.random.key(3), (64, 40))
        * jnp.where(jnp.arange(64) < 32, 1, 0.1)[:, None]
    )
    found = store_calibrated(w_DF, x_XD.T @ x_XD, kind="int4", block=32)
    nearest = store(w_DF, "int4", 32)

    def error(stored):
        return float(jnp.linalg.norm(x_XD @ (w_DF - restore(stored, "int4", 64, 32))))

    assert error(found) < 0.5 * error(nearest), (error(found), error(nearest))
