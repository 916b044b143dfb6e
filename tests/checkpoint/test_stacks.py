"""Layers stored one by one and stacked: whichever was saved, the other is read, on any devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from minitext.checkpoint import leaves
from minitext.checkpoint.checkpointer import Checkpointer
from minitext.checkpoint.stacks import Layer, Stack, other_forms
from minitext.config.config import load_config
from minitext.errors import UserError
from minitext.sharding.mesh import make_mesh
from minitext.training.step import abstract_state, init_state


def stacked(layers, width=8, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "embedding": rng.normal(size=(16, width)).astype(np.float32),
        "blocks": {
            "ffn": {"gate": rng.normal(size=(layers, width, 24)).astype(np.float32)},
            "norm": rng.normal(size=(layers, width)).astype(np.float32),
        },
    }


def unrolled(params):
    layers = len(params["blocks"]["norm"])
    blocks = [jax.tree.map(lambda x, k=k: x[k], params["blocks"]) for k in range(layers)]
    return {**params, "blocks": blocks}


def save(directory, state):
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(7, state, {}, wait=True)


def restore(directory, wanted, **kwargs):
    with Checkpointer(directory) as checkpointer:
        restored = checkpointer.restore(wanted, **kwargs)
    assert restored is not None
    return restored.state


def assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert a.dtype == b.dtype


@given(layers=st.integers(1, 12), seed=st.integers(0, 99))
@settings(max_examples=8)
def test_either_form_is_read_as_the_other(tmp_path_factory, layers, seed):
    directory = tmp_path_factory.mktemp("forms")
    forms = stacked(layers, seed=seed), unrolled(stacked(layers, seed=seed))
    for i, saved in enumerate(forms):
        save(directory / str(i), saved)
        for wanted in forms:
            assert_equal(restore(directory / str(i), wanted), wanted)
            abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), wanted)
            got = restore(directory / str(i), abstract)
            assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(got))
            assert_equal(got, wanted)


def test_the_optimizer_s_state_changes_its_form_too(tmp_path):
    params = stacked(3)
    states = []
    for form in (params, unrolled(params)):
        state = optax.adamw(1e-3).init(form)
        grads = jax.tree.map(lambda x: jnp.asarray(x) * 2, form)
        _, state = optax.adamw(1e-3).update(grads, state, form)
        states.append({"params": form, "opt_state": state})
    for i, saved in enumerate(states):
        save(tmp_path / str(i), saved)
        assert_equal(restore(tmp_path / str(i), states[1 - i]), states[1 - i])


def test_both_ways_across_meshes(tmp_path):
    params = stacked(4, width=32)
    wide = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Explicit,))
    narrow = jax.sharding.Mesh(
        np.array(jax.devices()[:2]), ("fsdp",), axis_types=(jax.sharding.AxisType.Explicit,)
    )

    def place(tree, mesh, abstract=False):
        def one(x):
            spec = PartitionSpec(*[None] * (x.ndim - 1), "fsdp")
            sharding = NamedSharding(mesh, spec)
            if abstract:
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            return jax.device_put(x, sharding)

        return jax.tree.map(one, tree)

    forms = params, unrolled(params)
    for i, saved in enumerate(forms):
        save(tmp_path / str(i), place(saved, wide))
        wanted = place(forms[1 - i], narrow, abstract=True)
        got = restore(tmp_path / str(i), wanted)
        assert_equal(got, forms[1 - i])
        for leaf, want in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            assert leaf.sharding == want.sharding


def test_a_run_reads_layers_that_another_code_kept_in_a_list(tmp_path):
    cfg = load_config("laptop").replace(
        {"model.embed": 16, "model.heads": 2, "model.mlp": 16, "model.layers": 3}
    )
    mesh = make_mesh(cfg.mesh)
    state = init_state(cfg, mesh)
    params = leaves.named(jax.device_get(state.params))
    one_by_one = {}
    for name, value in params.items():
        kind, _, rest = name.partition(".")
        pieces = value if kind == "blocks" else [value]
        for k, piece in enumerate(pieces):
            one_by_one[f"{kind}.{k}.{rest}" if kind == "blocks" else name] = np.asarray(piece)
    assert len(one_by_one) > 2 * len(params)
    save(tmp_path, _nested({"params." + name: value for name, value in one_by_one.items()}))
    got = restore(tmp_path, {"params": abstract_state(cfg, mesh).params}, partial=True)
    assert_equal(jax.device_get(got["params"]), jax.device_get(state.params))


def _nested(flat):
    tree = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        node = tree
        for word in path:
            node = node.setdefault(word, {})
        node[last] = value
    return tree


def test_a_part_of_the_layers_is_read_alone(tmp_path):
    params = stacked(5)
    save(tmp_path, params)
    wanted = {"blocks": {"3": {"norm": params["blocks"]["norm"][3]}}}
    assert_equal(restore(tmp_path, wanted, partial=True), wanted)


@pytest.mark.parametrize(
    ("saved", "wanted", "told"),
    [
        (unrolled(stacked(3)), stacked(4), r"blocks.*\(and \d more\)"),
        (stacked(3), unrolled(stacked(4)), "blocks"),
        (unrolled(stacked(3)), stacked(3, width=16), "float32"),
    ],
)
def test_another_number_of_layers_is_refused(tmp_path, saved, wanted, told):
    save(tmp_path, saved)
    with pytest.raises(UserError, match=told):
        restore(tmp_path, wanted)


def test_a_list_with_a_layer_missing_is_no_stack():
    assert other_forms({"a.0.w", "a.2.w"}, ["a.w"]) == {}
    assert other_forms({"a.1.w", "a.0.w"}, ["a.w", "a.0.w"]) == {"a.w": Stack(("a.0.w", "a.1.w"))}
    assert other_forms({"o.0.mu.w"}, ["o.0.mu.w", "o.0.mu.4.w"]) == {
        "o.0.mu.4.w": Layer("o.0.mu.w", 4)
    }
