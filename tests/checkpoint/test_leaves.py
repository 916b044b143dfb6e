"""Leaves have the names people use; what can't be stored or doesn't match is told by its name."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from minitext.checkpoint import leaves


def test_names_are_paths_without_the_wrappers():
    params = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    tree = {"params": params, "opt_state": optax.adam(1e-3).init(params), "list": [1, (2.0, None)]}
    names = list(leaves.named(tree))
    assert names == [
        "list.0",
        "list.1.0",
        *("opt_state.0.count", "opt_state.0.mu.bias", "opt_state.0.mu.kernel"),
        *("opt_state.0.nu.bias", "opt_state.0.nu.kernel", "params.bias", "params.kernel"),
    ]
    assert list(leaves.named(jax.eval_shape(lambda: tree))) == names


def test_a_key_named_value_is_not_a_wrapper():
    assert list(leaves.named({"value": 1, "a": {"value": 2}})) == ["a.value", "value"]


@pytest.mark.parametrize("leaf", ["text", b"bytes", object(), np.datetime64("2020-01-01")])
def test_what_is_no_number_is_refused(leaf):
    with pytest.raises(TypeError, match=rf"a\.b is a {type(leaf).__name__}: only"):
        leaves.named({"a": {"b": leaf}})


def test_names_must_differ():
    with pytest.raises(ValueError, match=r"'a\.b'"):
        leaves.named({"a": {"b": 1}, "a.b": 2})


def test_the_layout_says_what_and_where():
    mesh = jax.make_mesh((1,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    tree = {"w": jax.device_put(jnp.zeros((4, 2), jnp.bfloat16), sharding), "n": 3}
    layout = leaves.layout(leaves.named(tree))
    assert layout["mesh"] == {"data": 1} and layout["processes"] == 1
    assert layout["leaves"]["w"]["shape"] == [4, 2] and layout["leaves"]["w"]["dtype"] == "bfloat16"
    assert "data" in layout["leaves"]["w"]["spec"]
    assert layout["leaves"]["n"] == {"shape": [], "dtype": "int64", "spec": "None"}


def test_a_difference_names_the_first_leaf_and_counts_the_others():
    there = leaves.layout(
        leaves.named({"a": jnp.zeros(3), "b": jnp.zeros(2), "k": jax.random.key(0)})
    )
    saved = there["leaves"]

    def difference(partial=False, **tree):
        return leaves.difference(saved, leaves.named(tree), partial)

    same = {"a": jnp.zeros(3), "b": jnp.zeros(2), "k": jax.random.key(1)}
    assert difference(**same) is None
    assert difference(**same | {"b": jnp.zeros(4)}) == "b is float32[2] there and float32[4] here"
    assert difference(**same | {"c": jnp.zeros(4)}) == "c is absent there and float32[4] here"
    other = jax.random.key(0, impl="rbg")
    assert difference(**same | {"k": other}) == "k is key<fry>[] there and key<rbg>[] here"
    more = "b is float32[2] there and absent here (and 1 more)"
    assert difference(a=jnp.zeros(3)) == more
    assert difference(a=jnp.zeros(3), partial=True) is None
    assert "absent there" in (difference(z=jnp.zeros(3), partial=True) or "")


def test_only_what_is_raised_anyway_is_kept_from_the_log(caplog):
    leaves.checkpointer().close()
    asyncio, absl = logging.getLogger("asyncio"), logging.getLogger("absl")
    full = ValueError("RESOURCE_EXHAUSTED: Failed to write [os_error_code='28']")
    asyncio.error("Future exception was never retrieved", exc_info=full)
    assert caplog.records == []
    asyncio.error("Future exception was never retrieved", exc_info=ValueError("another"))
    absl.error("of another library")
    assert len(caplog.records) == 2
