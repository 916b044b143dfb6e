"""Quantized products against exact ones, on one device and several, and in programs for TPUs."""

import functools
import importlib.util
import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import minitext as mt
from minitext import kernels
from minitext.cli import main
from minitext.config.model import ModelConfig
from minitext.config.quantization import QuantizationRule
from minitext.config.sections import MeshConfig
from minitext.errors import UserError
from minitext.inference.cpu_decode import split_projections, unstack_layers
from minitext.kernels.linear.xla import Specs
from minitext.models import quantization
from minitext.models.layers import Linear
from minitext.models.quantization import FORMATS, quantize, quantized_modules
from minitext.models.transformer import Transformer
from minitext.perf import comms, memory, product_types, roofline, serving
from minitext.perf.product_types import find_products
from minitext.sharding.mesh import make_mesh
from minitext.sharding.rules import RULES
from minitext.training.step import (
    abstract_batch,
    abstract_state,
    init_state,
    make_train_step,
    make_value_and_grad,
)
from tests.conftest import audit_but

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
NOWHERE = Specs(None, None, None)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def cosine(a, b):
    a, b = np.ravel(np.float64(a)), np.ravel(np.float64(b))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def half_step(kind, q):
    """Half the distance of the format's numbers around each value of q, in units of the scale."""
    if kind in ("int8", "int4"):
        return np.full(q.shape, 0.5)
    mantissa, least = {"e4m3": (3, -6), "e5m2": (2, -14)}[kind]
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(q), 2.0**least))), least)
    return 2.0 ** (exponent - mantissa - 1)


# --- one array


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("axes", [None, (0,), (1,)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (64, 33)], ids=str)
def test_a_round_trip_is_within_half_a_step(kind, axes, shape):
    x = normal(0, *shape) * 10.0 ** normal(1, *shape)  # many orders of magnitude
    q = quantize(x, kind, axes)
    assert q.values.dtype == FORMATS[kind].dtype
    assert q.scale.shape == tuple(
        1 if axes is None or i in axes else n for i, n in enumerate(shape)
    )
    exact = np.float64(x) / np.float64(q.scale)
    error = np.abs(np.float64(q.values.astype(jnp.float32)) - exact)
    assert np.all(error <= half_step(kind, exact) * (1 + 1e-5) + 1e-6)
    # The largest number of each scale is stored as the format's limit.
    largest = np.max(np.abs(np.float32(q.values.astype(jnp.float32))), axis=axes)
    np.testing.assert_array_equal(largest, FORMATS[kind].limit)


@pytest.mark.parametrize("kind", FORMATS)
def test_zeros_stay_zeros_and_what_is_not_finite_makes_its_row_nan(kind):
    x = normal(0, 5, 8).at[1].set(0.0).at[2, 3].set(jnp.inf).at[3, 0].set(jnp.nan)
    back = np.asarray(quantize(x, kind, (1,)).dequantized())
    np.testing.assert_array_equal(back[1], 0.0)
    assert np.all(np.isnan(back[2:4]))
    assert np.all(np.isfinite(back[[0, 4]]))


def test_tiny_numbers_do_not_become_infinite():
    x = jnp.asarray([[1e-38, -1e-38, 0.0]])
    assert np.all(np.isfinite(quantize(x, "int8", (1,)).dequantized()))


def test_stochastic_rounding_is_right_on_average_and_never_a_step_off():
    x = jnp.linspace(-1.0, 1.0, 101)[:, None] * jnp.ones((1, 4096))
    q = quantize(x, "int8", stochastic=True)
    steps = np.float64(q.values) - np.float64(x / q.scale)
    assert np.abs(steps).max() < 1 + 1e-4
    # 4096 draws with a standard deviation of at most half a step: 5 sigma.
    assert np.abs(steps.mean(axis=1)).max() < 5 * 0.5 / 4096**0.5
    nearest = quantize(x, "int8")
    assert np.abs(np.mean(np.float64(nearest.values) - np.float64(x / q.scale), axis=1)).max() > 0.3


# --- one product

RULES_TRIED = [
    {"dtype": "int8"},
    {"dtype": "int8", "granularity": "tensor"},
    {"dtype": "int8", "granularity": "block", "block": 8},
    {"dtype": "int8", "stochastic": True},
    {"dtype": "fp8"},
    {"dtype": "fp8", "granularity": "block", "block": 8},
    {"dtype": "fp8", "gradients": "e5m2"},
]
rules_tried = pytest.mark.parametrize("options", RULES_TRIED, ids=str)
some_rules_tried = pytest.mark.parametrize("options", audit_but(RULES_TRIED[2::4], RULES_TRIED))


def products(fn, x, w, probe):
    y, pull = jax.vjp(fn, x, w)
    return dict(zip(("y", "x", "w"), (y, *pull(probe)), strict=True))


@rules_tried
@pytest.mark.parametrize(
    "sizes",
    audit_but(
        [((2, 17), 33, 24)], [((48,), 40, 24), ((5,), 7, 3), ((2, 17), 33, 1), ((2, 17), 33, 24)]
    ),
)
def test_a_projection_and_its_gradients_are_nearly_those_of_the_exact_product(options, sizes):
    tokens, D, F = sizes
    x, w, probe = normal(0, *tokens, D), normal(1, D, F), normal(2, *tokens, F)
    rule = QuantizationRule(**options)
    got = jax.jit(
        lambda: products(lambda x, w: quantization.linear(x, w, NOWHERE, rule), x, w, probe)
    )()
    want = products(lambda x, w: jnp.einsum("...D,DF->...F", x, w), x, w, probe)
    # Both factors have a relative error of a normal number in the format: 1/254 of a maximum near 3 sigma is 0.7%,
    # 3 bits of mantissa are 2.6%, and 2 bits are 5.3%, which alone is a cosine of 0.9986.
    least = 0.998 if options.get("gradients") == "e5m2" else 0.999
    for name in want:
        assert got[name].dtype == want[name].dtype
        if want[name].size > 500:
            assert cosine(got[name], want[name]) > least, name
        assert cosine(got[name], want[name]) > 0.99, name


def test_a_channel_with_large_numbers_does_not_hurt_the_others():
    x, w = normal(0, 64, 32).at[3].mul(1e4), normal(1, 32, 16).at[:, 5].mul(1e4)
    exact, errors = x @ w, {}
    for granularity in ("tensor", "channel"):
        rule = QuantizationRule(granularity=granularity)
        error = jnp.abs(quantization.linear(x, w, NOWHERE, rule) - exact) / jnp.abs(exact)
        errors[granularity] = float(jnp.median(error))
    assert errors["channel"] < 0.02 < 0.5 < errors["tensor"]


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_products_are_sums_of_integers_times_scales(granularity):
    """Numbers that int8 stores exactly give exact products."""
    x = jnp.round(50 * normal(0, 24, 16)).clip(-127, 127).at[:, 0].set(127).at[0, :].set(127)
    w = jnp.round(50 * normal(1, 16, 8)).clip(-127, 127).at[0, :].set(127).at[:, 0].set(-127)
    x, w = x.at[:, 8].set(127), w.at[8, :].set(127)  # in both blocks
    rule = QuantizationRule(
        granularity=granularity, **({"block": 8} if granularity == "block" else {})
    )
    np.testing.assert_allclose(quantization.linear(x, w, NOWHERE, rule), x @ w, rtol=1e-6)


def test_sums_of_int8_longer_than_int32_holds_are_divided():
    length = 2 * quantization.LONGEST + 3
    x, w = jnp.ones((1, length)), jnp.ones((length, 1))
    got = jax.jit(lambda: quantization.linear(x, w, NOWHERE, QuantizationRule()))()
    np.testing.assert_allclose(got, length, rtol=1e-6)


# --- groups, as experts have them


@pytest.mark.parametrize(
    "options",
    audit_but(RULES_TRIED[:5:4], [o for o in RULES_TRIED if o.get("granularity") != "block"]),
)
def test_a_grouped_product_is_nearly_the_exact_one(options):
    sizes = jnp.asarray([20, 0, 37, 3], jnp.int32)
    lhs, rhs, probe = normal(0, 64, 24), normal(1, 4, 24, 16), normal(2, 64, 16)
    lhs = lhs.at[60:].set(jnp.nan)  # rows of no group
    rule = QuantizationRule(**options)

    def exact(x, w):
        return kernels.grouped_matmul(x, w, sizes)

    def ours(x, w):
        return quantization.grouped_matmul(x, w, sizes, rule)

    got, want = (jax.jit(lambda fn=fn: products(fn, lhs, rhs, probe))() for fn in (ours, exact))
    for name in want:
        assert cosine(got[name], want[name]) > 0.998, name
    for name in ("y", "x"):
        np.testing.assert_array_equal(got[name][60:], 0.0)
    np.testing.assert_array_equal(got["w"][1], 0.0)


@some_rules_tried
def test_equal_groups_are_a_batch_of_products(options):
    lhs, rhs, probe = normal(0, 64, 24), normal(1, 4, 24, 16), normal(2, 64, 16)
    rule = QuantizationRule(**options)
    got = jax.jit(
        lambda: products(
            lambda x, w: quantization.grouped_matmul(x, w, None, rule), lhs, rhs, probe
        )
    )()
    sizes = jnp.full((4,), 16, jnp.int32)
    want = products(lambda x, w: kernels.grouped_matmul(x, w, sizes), lhs, rhs, probe)
    for name in want:
        assert cosine(got[name], want[name]) > 0.998, name


# --- on several devices

MESHES = {
    "dp": {"data": 8},
    "fsdp": {"data": 1, "fsdp": 8},
    "tp": {"data": 4, "tensor": 2},
    "fsdp_tp": {"data": 1, "fsdp": 4, "tensor": 2},
    "tp_seq": {"data": 1, "fsdp": 1, "tensor": 8},
    "cp": {"data": 1, "fsdp": 2, "context": 4},
}


@pytest.mark.parametrize("preset", audit_but(["fsdp_tp"], MESHES))
@pytest.mark.parametrize("axes", [("embed", "mlp"), ("mlp", "embed")], ids=str)
@pytest.mark.parametrize("options", audit_but(RULES_TRIED[:4:2], RULES_TRIED[:5]))
def test_products_on_a_mesh_are_those_of_one_device(preset, axes, options):
    rules, (B, T), D, F = RULES[preset], (8, 16), 32, 64
    block = options.get("granularity") == "block"
    whole = preset in ("tp_seq", "cp")  # rows of [B, T, D] that devices share
    x, probe = normal(0, B, T, D), normal(2, B, T, F)
    if not whole:
        x, probe = jnp.reshape(x, (B * T, D)), jnp.reshape(probe, (B * T, F))
    tokens = ("batch", "seq") if whole else ("batch",)
    out = "act" if axes[1] == "embed" else "mlp"
    results = []
    for devices in (1, 8):
        mesh = make_mesh(
            MeshConfig(**(MESHES[preset] if devices > 1 else {"data": 1})),
            devices=jax.devices()[:devices],
        )
        with jax.set_mesh(mesh):
            layer = Linear(D, F, axes, key=jax.random.key(1), rules=rules)
            layer.quantization = QuantizationRule(**options)
            graphdef, params = nnx.split(layer)
            placed = rules.shard(x, *tokens, "act" if axes[0] == "embed" else "mlp")
            w = jax.sharding.reshard(params["w"].get_value(), rules.spec(axes))
            residual = tuple("residual" if n == "seq" and out == "act" else n for n in tokens)
            grad = rules.shard(probe, *residual, out)

            def run(x, w, graphdef=graphdef, params=params):
                params = {"w": params["w"].replace(w)}
                return nnx.merge(graphdef, nnx.State(params))(x, out)

            found = jax.jit(lambda x, w, g, run=run: products(run, x, w, g))(placed, w, grad)
            if devices > 1:
                assert jax.typeof(found["w"]).sharding.spec == rules.spec(axes)
                assert jax.typeof(found["x"]).sharding.spec == jax.typeof(placed).sharding.spec
            results.append({k: np.asarray(v) for k, v in found.items()})
    one, eight = results
    for name in one:
        if block:  # a block ends where a device's part does
            assert cosine(one[name], eight[name]) > 0.9995, name
        else:
            np.testing.assert_allclose(
                one[name], eight[name], rtol=1e-5, atol=1e-5 * np.abs(one[name]).max()
            )


# --- models

SMALL = [
    "model.layers=2", "model.embed=64", "model.heads=4", "model.kv_heads=2", "model.mlp=128", "model.vocab=320",
    "data.seq_len=32", "train.global_batch=16", "train.sample_tokens=0", "data.source=grammar",
    "model.scan_layers=true",
]  # fmt: skip
ALL_LAYERS = "model.quantization=[{{module: blocks/.*, {}}}]"


def batch_of(cfg):
    B, T, V = cfg.train.global_batch, cfg.data.seq_len, cfg.model.vocab
    tokens = jax.random.randint(jax.random.key(5), (B, T + 1), 0, V)
    ones = jnp.ones((B, T))
    return {
        "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": jnp.broadcast_to(jnp.arange(T), (B, T)),
        "segment_ids": ones.astype(jnp.int32), "loss_mask": ones,
    }  # fmt: skip


@functools.cache
def gradients(*settings):
    """Returns the loss per token and the gradients, flat, on the first devices of the mesh's size."""
    cfg = mt.load_config("laptop", [*SMALL, *settings])
    count = int(np.prod(list(cfg.mesh.sizes().values())))
    mesh = make_mesh(cfg.mesh, devices=jax.devices()[:count])
    with jax.set_mesh(mesh):
        state, step = init_state(cfg, mesh), jax.jit(make_value_and_grad(cfg, mesh))
        (loss, _), grads = step(state.params, batch_of(cfg))
    flat = {
        "/".join(map(str, path)): np.asarray(leaf.get_value())
        for path, leaf in nnx.to_flat_state(grads)
    }
    return float(loss) / (cfg.train.global_batch * cfg.data.seq_len), flat


def by_layer(flat):
    """The gradients of each layer's parameters, as one vector a layer."""
    stacked = [np.reshape(g, (len(g), -1)) for path, g in flat.items() if path.startswith("blocks")]
    return np.concatenate(stacked, axis=1)


# An fp8 product's own error is a cosine of 0.9993 (two factors with 2.6%), and a gradient passes through several.
@pytest.mark.parametrize(
    ("options", "least"),
    [
        ("dtype: int8", 0.999),
        pytest.param("dtype: fp8", 0.996, marks=pytest.mark.audit),
        pytest.param("dtype: fp8, gradients: e5m2", 0.994, marks=pytest.mark.audit),
    ],
)
def test_the_gradient_of_each_layer_points_where_the_exact_one_does(options, least):
    exact_loss, exact = gradients("mesh.data=1")
    loss, found = gradients("mesh.data=1", ALL_LAYERS.format(options))
    assert 0 < abs(loss - exact_loss) < 1e-3
    for got, want in zip(by_layer(found), by_layer(exact), strict=True):
        assert cosine(got, want) > least


@pytest.mark.audit
@pytest.mark.parametrize(
    ("preset", "options"), [("tp_seq", "dtype: fp8"), ("fsdp_tp", "dtype: int8")]
)
def test_a_model_on_a_mesh_is_that_of_one_device(preset, options):
    one_loss, one = gradients("mesh.data=1", ALL_LAYERS.format(options))
    sizes = [f"mesh.{axis}={n}" for axis, n in MESHES[preset].items() if axis != "tensor"]
    loss, found = gradients(
        *sizes, "mesh.tensor=2", f"sharding.rules={preset}", ALL_LAYERS.format(options)
    )
    assert abs(loss - one_loss) < 2e-5
    # Sums in another order make a few numbers round the other way, by a whole step.
    for got, want in zip(by_layer(found), by_layer(one), strict=True):
        assert cosine(got, want) > 0.9999


def test_without_a_rule_nothing_changes():
    """The step's program is the same, letter for letter."""

    def program(*settings):
        cfg = mt.load_config("laptop", [*SMALL, *settings])
        mesh = make_mesh(MeshConfig(data=1), devices=jax.devices()[:1])
        with jax.set_mesh(mesh):
            step = make_train_step(cfg, mesh)
            return step.lower(abstract_state(cfg, mesh), abstract_batch(cfg, mesh)).as_text()

    plain = program()
    assert "i8" not in plain
    assert program("model.quantization=[{dtype: none}]") == plain
    assert "i8" in program("model.quantization=[{module: blocks/ffn/up}]")


def test_the_first_rule_that_matches_counts():
    rules = [
        {"module": ".*/(q|k)", "dtype": "none"}, {"module": "blocks/attention/.*"},
        {"module": "unembed", "dtype": "fp8"},
    ]  # fmt: skip
    cfg = ModelConfig(layers=2, embed=32, heads=2, mlp=48, vocab=64, quantization=rules)
    model = Transformer(cfg, rngs=nnx.Rngs(0))
    assert {path: rule.dtype for path, rule in quantized_modules(model)} == {
        "blocks/attention/v": "int8", "blocks/attention/o": "int8", "unembed": "fp8",
    }  # fmt: skip


def test_a_tied_output_layer_is_quantized_and_its_lookup_is_not():
    sizes = {"layers": 1, "embed": 32, "heads": 2, "mlp": 48, "vocab": 64, "tie_embeddings": True}
    plain = Transformer(ModelConfig(**sizes), rngs=nnx.Rngs(0))
    ours = Transformer(ModelConfig(**sizes, quantization=[{"module": "embed"}]), rngs=nnx.Rngs(0))
    tokens = jnp.arange(16)[None]
    np.testing.assert_array_equal(ours.hidden(tokens)[0], plain.hidden(tokens)[0])
    got, want = ours(tokens), plain(tokens)
    assert 0 < float(jnp.abs(got - want).max()) < 0.05 * float(jnp.abs(want).max())


def test_projections_split_for_a_cpu_stay_quantized():
    rules = [{"module": "blocks/.*"}]
    cfg = ModelConfig(layers=2, embed=32, heads=2, mlp=48, vocab=64, quantization=rules)
    model = Transformer(cfg, rngs=nnx.Rngs(0))
    want = model(tokens := jnp.arange(16)[None])
    np.testing.assert_allclose(split_projections(unstack_layers(model), 2)(tokens), want, atol=1e-4)


@pytest.mark.parametrize(
    "more",
    [(), ("model.ffn.capacity_factor=2.0",)],
    ids=str,
)
@pytest.mark.audit
def test_experts_on_a_mesh_are_nearly_those_of_one_device(more):
    """Each device has scales of its own tokens and features."""
    moe = ("model.ffn.kind=moe", "model.ffn.experts=4", *more)
    _, exact = gradients("mesh.data=1", *moe)
    loss, one = gradients("mesh.data=1", *moe, ALL_LAYERS.format("dtype: int8"))
    shape = ("mesh.data=1", "mesh.expert=2", "mesh.fsdp=2", "mesh.tensor=2", "sharding.rules=all")
    mesh_loss, eight = gradients(*shape, *moe, ALL_LAYERS.format("dtype: int8"))
    assert abs(mesh_loss - loss) < 1e-3
    # The router's choice is discrete, and a token near a tie may change its expert.
    experts = [f"blocks/ffn/{name}" for name in ("gate", "up", "down")]
    for name in experts:
        assert cosine(one[name], exact[name]) > 0.995, name
        assert cosine(eight[name], one[name]) > 0.995, name


# --- what would silently stay as it is


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.quantization=[{module: layers/.*}]"], r"\.module=layers/\.\* matches no module .*blocks/ffn/up"),
        (["model.quantization=[{}, {module: unembed}]"], r"quantization\[1\]\.module=unembed matches no module"),
        (["model.quantization=[{module: embed}]"], "module=embed matches no module"),
        (
            ["model.kv_heads=null", "model.attention.kind=mla", "model.quantization=[{}]"],
            "matches blocks/attention/k_up, .*head by head",
        ),
        (
            ["model.ffn.kind=moe", "model.quantization=[{granularity: block}]"],
            "matches blocks/ffn, .*set granularity=channel",
        ),
        (
            ["train.loss_impl=pallas_tpu", "model.quantization=[{}]"],
            "names unembed, .*set train.loss_impl=xla",
        ),
    ],
)  # fmt: skip
def test_a_rule_that_would_have_no_effect_is_refused(settings, message):
    cfg = mt.load_config("laptop", [*SMALL, *settings])
    mesh = make_mesh(MeshConfig(data=1), devices=jax.devices()[:1])
    with jax.set_mesh(mesh), pytest.raises(UserError, match=message) as caught:
        jax.eval_shape(
            make_train_step(cfg, mesh), abstract_state(cfg, mesh), abstract_batch(cfg, mesh)
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("module: '*'", r"module=\* is not a regular expression"),
        ("block: 64", "block=64 has no effect"),
        ("dtype: fp8, stochastic: true", "stochastic=true has no effect"),
        ("gradients: e5m2", "gradients=e5m2 has no effect"),
        ("dtype: int3", "int3"),
    ],
)
def test_a_setting_without_effect_is_a_problem(rule, message):
    with pytest.raises(UserError, match=message):
        mt.load_config("laptop", [f"model.quantization=[{{{rule}}}]"])


def test_predictions_that_know_no_quantized_products_refuse():
    cfg = mt.load_config("laptop", [*SMALL, "model.quantization=[{module: blocks/.*}]"])
    mesh = make_mesh(MeshConfig(data=1), devices=jax.devices()[:1])
    for predict in (
        lambda: memory.predict(cfg, mesh, "tpu"),
        lambda: comms.predict(cfg, mesh, "tpu"),
        lambda: roofline.predict_step(cfg),
        lambda: serving.predict_serving(cfg, "v5e:1x1", texts=1, context=32, prompt=8),
    ):
        with pytest.raises(UserError, match=r"model\.quantization: the formulas for"):
            predict()


# --- programs for TPUs

TPU = [
    "model.layers=2", "model.embed=256", "model.heads=4", "model.kv_heads=2", "model.head_dim=128", "model.mlp=512",
    "model.vocab=512", "data.seq_len=128", "train.global_batch=8", "model.dtype=bfloat16", "model.scan_layers=true",
    "data.source=grammar",
]  # fmt: skip
FSDP_TP = ["mesh.data=1", "mesh.fsdp=2", "mesh.tensor=2"]
MOE = ["mesh.data=-1", "model.ffn.kind=moe", "model.ffn.experts=4"]


COMPILED = {}


def find_once(cfg, target):
    """The products of a step for a target; each step is compiled once."""
    key = cfg.model_dump_json(), target
    if key not in COMPILED:
        COMPILED[key] = find_products(cfg, target)
    return COMPILED[key]


def compiled_products(target, *settings):
    return find_once(mt.load_config("laptop", [*TPU, *settings]), target).products


@pytest.mark.audit
@needs_libtpu
@pytest.mark.parametrize(
    ("target", "settings", "options", "narrow"),
    [
        ("v5e:2x2", FSDP_TP, "dtype: int8", "s8"),
        pytest.param("v5e:2x2", MOE, "dtype: int8", "s8", marks=pytest.mark.audit),
        pytest.param(
            "v5e:2x2",
            [*MOE, "model.ffn.capacity_factor=1.5"],
            "dtype: int8",
            "s8",
            marks=pytest.mark.audit,
        ),
        pytest.param("v6e:2x2", FSDP_TP, "dtype: fp8", "f8e4m3fn", marks=pytest.mark.audit),
        pytest.param(
            "tpu7x:2x2x1", ["mesh.data=-1"], "dtype: fp8", "f8e4m3fn", marks=pytest.mark.audit
        ),
    ],
)
def test_a_tpu_multiplies_the_narrow_type_in_all_three_products(target, settings, options, narrow):
    found = compiled_products(target, *settings, ALL_LAYERS.format(options))
    backward = ["transpose" in p.where for p in found if p.types == (narrow, narrow)]
    # Seven weights: each is in one product of the forward pass and in two of the backward pass, of a loop's body.
    assert Counter(backward) == {False: 7, True: 14}
    assert all(p.runs == 2 for p in found if p.types == (narrow, narrow))
    # The rest: the output layer's three, and the router's.
    others = [p for p in found if p.types != (narrow, narrow)]
    assert all("logits" in p.where or "DE->" in p.where for p in others)


@needs_libtpu
def test_the_command_lists_products_with_their_types(monkeypatch, capsys):
    rule = ALL_LAYERS.format("dtype: int8")
    words = ["minitext", "quantized", "laptop", *TPU, *FSDP_TP, rule, "target=v5e:2x2"]
    monkeypatch.setattr(product_types, "find_products", find_once)

    def printed(*more):
        monkeypatch.setattr("sys.argv", [*words, *more])
        with pytest.raises(SystemExit) as stop:
            main.main()
        assert not stop.value.code
        return capsys.readouterr().out

    found = json.loads(printed("--json"))
    assert (found["runs"], found["narrow_runs"]) == (3 + 2 * 21, 2 * 21)
    forward = [p for p in found["products"] if p["narrow"] and p["pass"] == "forward"]
    assert [p["types"] for p in forward] == [["s8", "s8"]] * 7
    text = printed()
    assert "s8 x s8" in text and "42 of 45 products in a step multiply 8-bit numbers" in text


# --- training


@pytest.mark.audit
def test_training_follows_that_of_bfloat16():
    losses = {}
    for name, setting in {
        "bfloat16": "model.quantization=[]",
        "int8": ALL_LAYERS.format("dtype: int8"),
        "fp8": ALL_LAYERS.format("dtype: fp8"),
    }.items():
        cfg = mt.load_config("laptop", [
            *SMALL, "model.dtype=bfloat16", "train.steps=60", "optim.warmup_steps=5",
            "mesh.data=1", setting,
        ])  # fmt: skip
        mesh = make_mesh(cfg.mesh, devices=jax.devices()[:1])
        with jax.set_mesh(mesh):
            state, step = init_state(cfg, mesh), make_train_step(cfg, mesh)
            batches, found = (
                iter(
                    mt.make_batches(
                        cfg.data, mesh, vocab=cfg.model.vocab, global_batch=cfg.train.global_batch
                    )
                ),
                [],
            )
            for _ in range(cfg.train.steps):
                state, metrics = step(state, next(batches))
                found.append(float(metrics["loss"]))
        losses[name] = found
    assert losses["bfloat16"][-1] < losses["bfloat16"][0] - 1
    for name in ("int8", "fp8"):
        np.testing.assert_allclose(
            np.mean(losses[name][-10:]), np.mean(losses["bfloat16"][-10:]), rtol=0.01
        )
