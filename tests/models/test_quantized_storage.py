"""Weights stored in 4 and 8 bits: round trips, the products that read them, and models made of them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minitext.config.model import ModelConfig
from minitext.config.quantization import STORAGE_PRESETS, QuantizationRule, StorageRule
from minitext.config.sections import MeshConfig
from minitext.errors import UserError
from minitext.models.quantized_storage import (
    NF4,
    in_blocks,
    pack,
    restore,
    store,
    stored_weights,
    unpack,
)
from minitext.models.transformer import Transformer
from minitext.sharding.mesh import make_mesh
from minitext.sharding.rules import RULES, tree_shardings
from tests.conftest import audit_but

KINDS = ("int8", "fp8", "int4", "nf4")
SMALL = ModelConfig(vocab=97, layers=2, embed=48, heads=4, mlp=70)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def half_step(kind, scaled):
    """Half the distance between the format's numbers around each number that is divided by its scale."""
    size = np.abs(scaled)
    if kind in ("int8", "int4"):
        return np.full(size.shape, 0.5)
    if kind == "fp8":
        return 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(size, 2.0**-6))), -6) - 4)
    levels = np.asarray(NF4)
    above = np.clip(np.searchsorted(levels, scaled), 1, 15)
    return (levels[above] - levels[above - 1]) / 2


# --- one array

ROUND_TRIPS = [*itertools.product([(1, 1), (13, 7), (64, 33), (3, 37, 5)], [None, 32, 5, 1])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", audit_but([((13, 7), None), ((3, 37, 5), 5)], ROUND_TRIPS))
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_round_trip_is_within_half_a_step(kind, case, axis):
    shape, block = case
    w = normal(0, *shape) * 10.0 ** normal(1, *shape)  # many orders of magnitude
    stored = store(w, kind, block, axis)
    back = restore(stored, kind, shape[axis], block, axis)
    assert back.shape == shape and back.dtype == jnp.float32
    scale = np.float64(stored.scale.astype(jnp.float32))
    exact = np.float64(in_blocks(w, block, axis)) / scale
    found = np.float64(in_blocks(back, block, axis)) / scale
    # A scale in bfloat16 may be rounded down by 2**-9: then the largest number is a little beyond the format's.
    assert np.all(np.abs(found - exact) <= half_step(kind, exact) * (1 + 1e-4) + 2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_a_number(kind):
    w = normal(0, 256, 48)
    bits = 8 * sum(x.nbytes for x in store(w, kind, 32)) / w.size
    assert bits == (8.5 if kind in ("int8", "fp8") else 4.5)
    bits = 8 * sum(x.nbytes for x in store(w, kind)) / w.size
    assert bits == (8 if kind in ("int8", "fp8") else 4) + 32 / 256


@pytest.mark.parametrize("count", [1, 2, 7, 8])
@pytest.mark.parametrize("axis", [-1, -2])
def test_packing_keeps_every_number(count, axis):
    shape = (3, count, 5) if axis == -2 else (3, 5, count)
    codes = jnp.asarray(np.random.default_rng(count).integers(0, 16, shape), jnp.uint8)
    packed = pack(codes, axis)
    assert packed.dtype == jnp.uint8 and packed.shape[axis] == -(-count // 2)
    np.testing.assert_array_equal(unpack(packed, count, axis), codes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [None, 4], ids=str)
def test_zeros_stay_zeros_and_what_is_not_finite_stays_in_its_block(kind, block):
    w = normal(0, 8, 6).at[:, 2].set(0).at[0, 3].set(jnp.nan).at[0, 4].set(jnp.inf)
    back = restore(store(w, kind, block), kind, 8, block)
    np.testing.assert_array_equal(back[:, 2], 0)
    end = 8 if block is None else block
    assert not np.any(np.isfinite(back[:end, 3:5]))
    assert np.all(np.isfinite(back[end:, 3:5])) and np.all(np.isfinite(back[:, [0, 1, 5]]))


def test_the_levels_of_nf4_are_stored_exactly():
    levels = jnp.asarray(NF4)
    np.testing.assert_array_equal(
        restore(store(levels[:, None], "nf4", 16), "nf4", 16, 16)[:, 0], levels
    )


# --- models


def logits(cfg, params=None):
    model = Transformer(cfg, rngs=nnx.Rngs(0))
    tokens_BT = jax.random.randint(jax.random.key(1), (2, 9), 0, cfg.vocab)
    return model, nnx.jit(lambda model: model(tokens_BT))(model)


def float_twin(model):
    """The model with each stored weight in float32, in a parameter's place."""
    cfg = model.cfg.model_copy(update={"storage": ()})
    twin = Transformer(cfg, rngs=nnx.Rngs(0))
    found = dict(stored_weights(model))
    for path, module in nnx.iter_modules(twin):
        for name in getattr(module, "storable", ()):
            weight = found.get("/".join(map(str, (*path, name))))
            if weight is not None:
                setattr(module, name, nnx.Param(weight.get_value(), axes=weight.axes))
    return twin


VARIANTS = {
    "untied": {},
    "tied": {"tie_embeddings": True, "scan_layers": False},
    "moe": {"ffn": {"kind": "moe", "experts": 4}},
    "mla": {"attention": {"kind": "mla", "kv_rank": 24}},
}
QUICK = [*zip(VARIANTS, ("int8", "nf4", "int4", "fp8"), strict=True)]


@pytest.mark.parametrize(
    "case", audit_but(QUICK[2:], [*itertools.product(VARIANTS, STORAGE_PRESETS)])
)
def test_a_stored_model_computes_what_its_restored_weights_compute(case):
    more, kind = VARIANTS[case[0]], case[1]
    cfg = ModelConfig.model_validate(SMALL.model_dump() | more | {"storage": STORAGE_PRESETS[kind]})
    model, found = logits(cfg)
    tokens_BT = jax.random.randint(jax.random.key(1), (2, 9), 0, cfg.vocab)
    want = nnx.jit(lambda model: model(tokens_BT))(float_twin(model))
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-5 * float(jnp.max(jnp.abs(want))))
    wide = cfg.model_copy(update={"storage": ()})
    plain = nnx.state(nnx.eval_shape(lambda: Transformer(wide, rngs=nnx.Rngs(0))))
    sizes = [
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(s))
        for s in (nnx.state(model), plain)
    ]
    assert sizes[0] < sizes[1] / 3


def test_scanned_and_unrolled_layers_read_the_same_numbers():
    cfgs = [
        SMALL.model_copy(update={"storage": STORAGE_PRESETS["int4"], "scan_layers": scan})
        for scan in (True, False)
    ]
    scanned, unrolled = (logits(cfg)[1] for cfg in cfgs)
    np.testing.assert_allclose(scanned, unrolled, rtol=0, atol=1e-5)


def test_rules_choose_the_first_match_and_leave_the_rest():
    rules = (
        StorageRule(module="blocks/attention/.*", dtype="none"),
        StorageRule(module="blocks/.*", dtype="int4", block=16),
    )
    model = Transformer(SMALL.model_copy(update={"storage": rules}), rngs=nnx.Rngs(0))
    found = {path: weight.kind for path, weight in stored_weights(model)}
    assert found == {f"blocks/ffn/{name}/w": "int4" for name in ("gate", "up", "down")}


def test_a_rule_that_matches_nothing_is_refused():
    rules = (StorageRule(module="blocks/mlp/.*"),)
    with pytest.raises(
        UserError, match=r"model.storage\[0\].module=blocks/mlp/.* matches no module"
    ):
        Transformer(SMALL.model_copy(update={"storage": rules}), rngs=nnx.Rngs(0))


def test_a_weight_is_not_quantized_twice():
    both = {"storage": (StorageRule(),), "quantization": (QuantizationRule(module=".*/ffn/.*"),)}
    with pytest.raises(UserError, match="whose products model.quantization quantizes"):
        Transformer(SMALL.model_copy(update=both), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("kind", audit_but(["nf4"], STORAGE_PRESETS))
def test_four_devices_compute_what_one_computes(kind):
    cfg = ModelConfig(vocab=96, layers=2, embed=256, heads=8, mlp=512, tie_embeddings=True)
    cfg = cfg.model_copy(update={"storage": STORAGE_PRESETS[kind]})
    model, want = logits(cfg)
    mesh, rules = make_mesh(MeshConfig(tensor=4), jax.devices()[:4]), RULES["tp"]
    params = jax.device_put(nnx.state(model), tree_shardings(nnx.state(model), mesh, rules))
    tokens_BT = jax.random.randint(jax.random.key(1), (2, 9), 0, cfg.vocab)
    with jax.set_mesh(mesh):
        there = nnx.graphdef(
            nnx.eval_shape(lambda: Transformer(cfg, rules=rules, rngs=nnx.Rngs(0)))
        )
        found = jax.jit(lambda params: nnx.merge(there, params)(tokens_BT))(params)
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-5)
    down = params["blocks"]["ffn"]["down"]["w"]
    assert len({str(shard.index) for shard in down["values"].get_value().addressable_shards}) == 4
