"""Adapters are what their formula says: nothing at the start, a product of low rank later, on every mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import minitext as mt
from minitext.config.sections import MeshConfig
from minitext.errors import UserError
from minitext.inference.cpu_decode import split_projections, unstack_cache, unstack_layers
from minitext.models import lora
from minitext.models.flops import count_adapters, count_flops, count_params
from minitext.models.layers import Linear
from minitext.models.transformer import Transformer, make_cache
from minitext.sharding.mesh import make_mesh
from minitext.sharding.rules import RULES, tree_shardings
from tests.conftest import audit_but
from tests.models.test_transformer import dot_flops

TINY = [
    "model.layers=2", "model.embed=32", "model.heads=4", "model.kv_heads=2", "model.mlp=64", "model.vocab=64",
]  # fmt: skip
KINDS = {
    "gqa": [],
    "mla": ["model.attention.kind=mla", "model.kv_heads=null", "model.attention.q_rank=16"],
    "deltanet": ["model.attention.kind=deltanet"],
    "moe": ["model.ffn.kind=moe", "model.ffn.shared_experts=1"],
    "period": ["model.period=[{}, {attention.window: 4}]", "model.dense_layers=0"],
    "int8": ["model.storage=[{dtype: int8}]"],
    "nf4": ["model.storage=[{module: embed|unembed, dtype: int8}, {dtype: nf4, block: 16}]"],
}
EVERYWHERE = "model.lora.modules=.*(attention|ffn|unembed).*"
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 12))


def settings(kind, *more, rank=4):
    lines = [*TINY, *KINDS[kind], *([f"model.lora.rank={rank}", EVERYWHERE] if rank else []), *more]
    return mt.load_config("laptop", lines).model


def trained(cfg, seed=0, **options):
    """A model whose adapters do something."""
    model = Transformer(cfg, rngs=nnx.Rngs(0), **options)
    state = nnx.state(model, nnx.LoRAParam)
    leaves, treedef = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    nnx.update(model, jax.tree.unflatten(treedef, drawn))
    return model


call = nnx.jit(lambda model, tokens: model(tokens))


@pytest.mark.parametrize("kind", audit_but(["moe"], KINDS))
def test_nothing_changes_at_the_start_and_merging_changes_nothing(kind):
    plain = Transformer(settings(kind, rank=0), rngs=nnx.Rngs(0))
    cfg = settings(kind)
    expected = call(plain, TOKENS)
    assert (call(Transformer(cfg, rngs=nnx.Rngs(0)), TOKENS) == expected).all()
    model = trained(cfg)
    with_adapters = call(model, TOKENS)
    assert np.abs(with_adapters - expected).max() > 0.1
    lora.merge(model)
    assert not any(map(lora.is_adapter, jax.tree.leaves(nnx.state(model), is_leaf=lora.is_adapter)))
    np.testing.assert_allclose(call(model, TOKENS), with_adapters, atol=1e-5)
    merged = Transformer(lora.merged_config(cfg), rngs=nnx.Rngs(1))
    nnx.update(merged, nnx.state(model))  # the merged model is that of its configuration
    np.testing.assert_allclose(call(merged, TOKENS), with_adapters, atol=1e-5)


def test_a_projection_and_its_gradients_are_those_of_the_formula():
    """In float64, by hand: y = x W + s x A B, dA = s x^T g B^T, dB = s (x A)^T g, dx = g (W + s A B)^T."""
    rng, s = np.random.default_rng(1), 8.0 / 3
    w, a, b, x, g = (rng.normal(size=n) for n in ((10, 7), (10, 3), (3, 7), (5, 10), (5, 7)))
    linear = Linear(10, 7, ("embed", "mlp"), key=jax.random.key(0), rules=RULES["all"])
    linear.w = nnx.Param(jnp.float32(w), axes=("embed", "mlp"))
    linear.adapter = lora.Adapter(jnp.float32(a), jnp.float32(b), linear.axes, s, linear.rules)
    graphdef, params = nnx.split(linear)

    def summed(params, x):
        return jnp.sum(nnx.merge(graphdef, params)(x, "mlp") * jnp.float32(g))

    y = linear(jnp.float32(x), "mlp")
    grads, grad_x = jax.grad(summed, (0, 1))(params, jnp.float32(x))
    adapter = grads["adapter"]
    for got, want in (
        (y, x @ w + s * (x @ a @ b)),
        (adapter["a"][...], s * x.T @ g @ b.T),
        (adapter["b"][...], s * (x @ a).T @ g),
        (grad_x, g @ (w + s * a @ b).T),
    ):
        # Where terms cancel, the rounding is theirs.
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())


def test_gradients_reach_adapters_through_stored_weights():
    """They are those beside a float32 base of the numbers that the stored weights stand for."""
    cfg = settings("nf4", "model.layers=1")
    stored = trained(cfg)
    floats = trained(cfg.model_copy(update={"storage": ()}))
    pairs = dict(nnx.iter_modules(floats))
    for path, module in nnx.iter_modules(stored):
        for name in getattr(module, "storable", ()):
            setattr(
                pairs[path],
                name,
                nnx.Param(getattr(module, name).get_value(), axes=getattr(pairs[path], name).axes),
            )

    def gradient(model):
        graphdef, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)

        def loss(adapters):
            logits = nnx.merge(graphdef, adapters, rest)(TOKENS)
            return -jnp.mean(jax.nn.log_softmax(logits)[..., 3])

        return jax.tree.leaves(jax.jit(jax.grad(loss))(adapters))

    for got, want in zip(gradient(stored), gradient(floats), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
        assert np.abs(want).max() > 1e-6


@pytest.mark.parametrize("scan", audit_but([False], [True, False]))
@pytest.mark.parametrize("remat", audit_but(["full"], ["none", "full", "dots"]))
def test_scan_and_remat_change_nothing(scan, remat):
    def gradient(*more):
        graphdef, params = nnx.split(trained(settings("gqa", *more)))
        return jax.tree.leaves(
            jax.jit(jax.grad(lambda p: jnp.sum(jnp.square(nnx.merge(graphdef, p)(TOKENS)))))(params)
        )

    first = gradient("model.scan_layers=true", "model.remat=none")
    second = gradient(f"model.scan_layers={str(scan).lower()}", f"model.remat={remat}")
    for want, got in zip(first, second, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    "kind", audit_but(["mla"], ["gqa", "mla", "deltanet", "period", "int8", "nf4"])
)
def test_a_cache_gives_the_logits_of_the_whole_row(kind):
    """With stacked layers, and with layers in a list whose projections are divided."""
    cfg = settings(kind)
    model = trained(cfg)
    whole = call(model, TOKENS)
    apart = split_projections(unstack_layers(model), 2)

    def later(net, change):
        cache = change(make_cache(cfg, 2, 12))
        found, step = [], nnx.jit(lambda net, tokens, cache: net(tokens, cache=cache))
        for t in range(0, 12, 4):
            logits, new = step(net, TOKENS[:, t : t + 4], cache)
            cache = cache.append(new)
            found.append(logits)
        return jnp.concatenate(found, 1)

    np.testing.assert_allclose(later(model, lambda c: c), whole, atol=2e-4)
    if kind in ("gqa", "mla"):  # int8 of tokens, and padding, are those of chapters 24 and 25
        np.testing.assert_allclose(later(apart, unstack_cache), whole, atol=2e-4)


MESHES = {
    "dp": MeshConfig(data=8), "fsdp": MeshConfig(fsdp=8), "tp": MeshConfig(tensor=2, data=4),
    "tp_seq": MeshConfig(tensor=2, data=4), "fsdp_tp": MeshConfig(fsdp=4, tensor=2),
    "cp": MeshConfig(fsdp=2, context=4), "ep": MeshConfig(fsdp=2, expert=4),
    "all": MeshConfig(data=2, fsdp=2, tensor=2),
}  # fmt: skip


@pytest.mark.audit  # test_base has a whole step of adapters on a mesh in `make test`
@pytest.mark.parametrize("rules", MESHES)
def test_eight_devices_give_the_gradients_of_one(rules):
    kind = "moe" if rules == "ep" else "gqa"
    cfg = settings(kind, *(["model.ffn.experts=4"] if rules == "ep" else []))
    tokens = np.random.default_rng(0).integers(0, 64, (8, 16))
    model = trained(cfg)

    def gradient(rules):
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: trained(cfg, rules=rules)))

        def loss(params):
            return jnp.mean(
                jnp.square(
                    nnx.merge(graphdef, params)(rules.shard(jnp.asarray(tokens), "batch", "seq"))
                )
            )

        return jax.jit(jax.value_and_grad(loss))

    params = nnx.state(model)
    want, want_grads = gradient(RULES["all"])(params)
    mesh = make_mesh(MESHES[rules])
    placed = jax.device_put(params, tree_shardings(params, mesh, RULES[rules]))
    with jax.set_mesh(mesh):
        got, got_grads = gradient(RULES[rules])(placed)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for one, two in zip(jax.tree.leaves(want_grads), jax.tree.leaves(got_grads), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-3, atol=1e-5)


def test_merging_on_a_mesh_is_merging_on_one_device():
    cfg = settings("gqa")
    model = trained(cfg)
    rules, mesh = RULES["fsdp_tp"], make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
    placed = jax.device_put(nnx.state(model), tree_shardings(nnx.state(model), mesh, rules))
    with jax.set_mesh(mesh):
        there = nnx.graphdef(
            nnx.eval_shape(lambda: Transformer(cfg, rules=rules, rngs=nnx.Rngs(0)))
        )
        got = jax.jit(lambda params: _merged(nnx.merge(there, params)))(placed)
    for one, two in zip(*map(jax.tree.leaves, (_merged(model), got)), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)


def _merged(model):
    lora.merge(model)
    return nnx.state(model)


@pytest.mark.parametrize("kind", audit_but(["period"], ["gqa", "deltanet", "period", "int8"]))
@pytest.mark.parametrize("count", [3, 20])
def test_a_bank_gives_each_token_its_own_adapter(kind, count):
    """Few tokens gather their matrices, many are multiplied with all: both give what merged models give."""
    cfg = settings(kind)
    models = [Transformer(cfg, rngs=nnx.Rngs(0)), *(trained(cfg, seed) for seed in (1, 2, 3))]
    numbers = np.asarray([3, 0, 1, 2, 1])
    rows = np.random.default_rng(0).integers(0, 64, (5, 3))
    banked = unstack_layers(models[0])
    lora.use_banks(banked, count)
    parts = [unstack_layers(model) for model in models]
    for path, module in nnx.iter_modules(banked):
        if isinstance(module, lora.Bank):
            for i, part in enumerate(parts):
                own = dict(nnx.iter_modules(part))[path]
                module.a.set_value(module.a.get_value().at[i].set(own.a.get_value()))
                module.b.set_value(module.b.get_value().at[i].set(own.b.get_value()))
    lora.choose_adapters(banked, jnp.repeat(jnp.asarray(numbers), 3))
    got = call(banked, rows)
    for row, number in enumerate(numbers):
        np.testing.assert_allclose(got[row], call(models[number], rows)[row], atol=2e-5)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["model.lora.rank=17"], "rank=17 is more than blocks/attention/k, which projects 32 features to 16"),
        (["model.lora.rank=1000000000"], "choose 16 at most"),
        (["model.lora.rank=2", "model.lora.modules=blocks/atention/.*"], "choose among blocks/attention/k, "),
        (["model.lora.rank=2", "model.lora.modules=embed"], "matches no projection"),
    ],
)  # fmt: skip
def test_adapters_that_the_model_cannot_have(lines, says):
    cfg = mt.load_config("laptop", [*TINY, *lines]).model
    with pytest.raises(UserError, match=re.escape(says)) as error:
        Transformer(cfg, rngs=nnx.Rngs(0))
    assert "\n" not in str(error.value)


def test_a_bank_does_not_serve_projections_that_are_used_by_head():
    model = unstack_layers(Transformer(settings("mla"), rngs=nnx.Rngs(0)))
    with pytest.raises(UserError, match="k_up is also multiplied head by head"):
        lora.use_banks(model, 2)


def test_parameters_and_operations_are_counted():
    cfg = settings("gqa", "model.scan_layers=true")
    model = trained(cfg)
    assert count_params(cfg) == sum(x.size for x in jax.tree.leaves(nnx.state(model)))
    adapters = nnx.state(model, nnx.LoRAParam)
    assert count_adapters(cfg) == sum(x.size for x in jax.tree.leaves(adapters))
    graphdef, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)

    def loss(adapters):
        return jnp.sum(jnp.square(nnx.merge(graphdef, adapters, rest)(TOKENS)))

    jaxpr = jax.make_jaxpr(jax.grad(loss))(adapters)
    assert dot_flops(jaxpr.jaxpr) == count_flops(cfg, TOKENS.size, 12, causal=False)
