"""Mixture of experts: routers against an oracle, what is dropped, equality of the two ways, gradients, statistics."""

import functools
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from minitext.book.equality import packed_batch
from minitext.config.config import ConfigError
from minitext.config.model import ModelConfig, MoEConfig, SwiGLUConfig
from minitext.errors import UserError
from minitext.kernels.grouped_matmul.cpu import grouped_matmul
from minitext.models import moe
from minitext.models.flops import count_flops, count_params
from minitext.models.transformer import Transformer
from minitext.sharding.check import check_mesh
from minitext.sharding.mesh import make_mesh
from minitext.sharding.rules import RULES
from minitext.training.step import init_state, make_train_step
from tests.conftest import audit_but

MOE = ("model.ffn.kind=moe", "model.ffn.experts=8", "model.mlp=16")


def layer(seed=0, embed=16, mlp=12, **settings):
    cfg = ModelConfig(embed=embed, heads=2, mlp=mlp, layers=3, ffn=MoEConfig(**settings))
    return moe.MoE(cfg, rules=RULES["all"], rngs=nnx.Rngs(seed))


routed = nnx.jit(moe.MoE.routed, static_argnums=2)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


# --- the grouped product


M, K, N, G = 400, 8, 6, 4


@partial(jax.jit, static_argnums=0)
def product_and_gradients(product, sizes_G):
    valid = jnp.arange(M)[:, None] < jnp.sum(sizes_G)
    lhs, rhs, weights = normal(0, M, K), normal(1, G, K, N), normal(2, M, N)

    def loss(lhs, rhs):
        y = product(jnp.where(valid, lhs, 0), rhs, sizes_G)
        return jnp.sum(y * weights), y

    (_, y), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(lhs, rhs)
    return y, *grads


@settings(max_examples=15)
@given(
    st.lists(st.sampled_from([0, 0, 1, 7, 32, 100]) | st.integers(0, 100), min_size=G, max_size=G)
)
def test_blocks_multiply_groups_as_ragged_dot_does(sizes):
    """Empty groups, groups of many blocks and of less than one, and rows past the last."""
    both = [
        product_and_gradients(f, jnp.array(sizes)) for f in (grouped_matmul, jax.lax.ragged_dot)
    ]
    for got, want in zip(*both, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * max(1, np.abs(want).max()))
    assert not np.any(both[0][0][sum(sizes) :])


# --- the router


route = jax.jit(moe.route, static_argnums=1)


def oracle(logits, cfg, bias):
    """One token's experts and weights, in plain loops."""
    logits = logits.astype(np.float64)
    exps = np.exp(logits - logits.max())
    scores = exps / exps.sum() if cfg.router == "softmax" else 1 / (1 + np.exp(-logits))
    # Ties are broken by what the scores are in float32: sigmoid(-1) + sigmoid(1) is 2 sigmoid(0), or nearly.
    as_float32 = jax.nn.softmax if cfg.router == "softmax" else jax.nn.sigmoid
    ranking = np.asarray(as_float32(logits.astype(np.float32))) + bias
    width = cfg.experts // cfg.groups
    groups = [ranking[g * width : (g + 1) * width] for g in range(cfg.groups)]
    value = [np.sort(group)[::-1][:2].sum(dtype=np.float32) for group in groups]
    best = sorted(range(cfg.groups), key=lambda g: -value[g])[: cfg.groups_per_token]
    allowed = [e for e in range(cfg.experts) if e // width in best]
    chosen = sorted(allowed, key=lambda e: -ranking[e])[: cfg.experts_per_token]
    weights = scores[chosen]
    return chosen, cfg.scaling * (weights / weights.sum() if cfg.normalize else weights)


@settings(max_examples=15)
@given(
    router=st.sampled_from(["softmax", "sigmoid"]),
    grouping=st.sampled_from([(1, 1, 3), (4, 2, 3), (2, 1, 4), (8, 3, 3)]),
    normalize=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_router_is_its_definition(router, grouping, normalize, biased, seed):
    groups, groups_per_token, k = grouping
    cfg = MoEConfig(
        experts=8, experts_per_token=k, router=router, groups=groups, groups_per_token=groups_per_token,
        normalize=normalize, scaling=2.5,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    logits = rng.integers(-2, 3, (6, 8)).astype(np.float32)  # many ties
    bias = rng.choice(np.array([0, 0.25, 0.5], np.float32), 8) * biased
    choice = route(jnp.array(logits), cfg, jnp.array(bias) if biased else None)
    for x, (experts, weights) in enumerate(oracle(row, cfg, bias) for row in logits):
        np.testing.assert_array_equal(choice.experts[x], experts)
        np.testing.assert_allclose(choice.weights[x], weights, rtol=1e-6)
    np.testing.assert_allclose(np.sum(choice.shares, -1), 1, rtol=1e-6)


def test_a_bias_chooses_and_never_weighs():
    cfg = MoEConfig(experts=4, experts_per_token=1, normalize=False)
    logits, bias = jnp.array([[0.0, 1.0, 2.0, 3.0]]), jnp.array([9.0, 0, 0, 0])
    choice = moe.route(logits, cfg, bias)
    assert choice.experts[0, 0] == 0
    np.testing.assert_allclose(choice.weights[0, 0], jax.nn.softmax(logits)[0, 0])
    grad = jax.grad(lambda bias: jnp.sum(moe.route(logits, cfg, bias).weights))(bias)
    assert not np.any(grad)


# --- the layer


def find_room(experts_Xk, cfg, slots, rows):
    """Which choices of tokens, in their order, find a slot, and how many tokens of each row choose each expert."""
    counts = np.zeros((rows, cfg.experts), int)
    keep = np.ones(experts_Xk.shape, bool)
    for x, experts in enumerate(np.asarray(experts_Xk)):
        for j, e in enumerate(experts):
            row = x // (len(experts_Xk) // rows)
            keep[x, j] = slots is None or counts[row, e] < slots
            counts[row, e] += 1
    return keep, counts


def by_loop(params, x_XD, cfg, keep):
    """Each token through its experts, in a loop over these: all products are of all tokens, masked afterwards."""
    choice = moe.route(x_XD @ params["router"].get_value(), cfg, None)
    y = jnp.zeros_like(x_XD)
    for e in range(cfg.experts):
        gate, up, down = (params[name].get_value()[e] for name in ("gate", "up", "down"))
        one = (jax.nn.silu(x_XD @ gate) * (x_XD @ up)) @ down
        weight = jnp.sum(jnp.where((choice.experts == e) & keep, choice.weights, 0), axis=-1)
        y = y + weight[:, None] * one
    return y, choice.experts


LOOPED = [*itertools.product([None, 0.6, 1.25], [0.0, 3.0])]


@pytest.mark.parametrize("case", audit_but([(None, 0.0), (0.6, 3.0)], LOOPED))
def test_values_gradients_and_counts_are_those_of_a_loop(case):
    factor, skew = case
    ours = layer(experts=4, capacity_factor=factor)
    # With skew almost all tokens like expert 1 best.
    ours.router.set_value(ours.router.get_value().at[0, 1].add(skew))
    x, weights, rows = normal(1, 24, 16).at[:, 0].set(1.0), normal(2, 24, 16), 3
    graphdef, params = nnx.split(ours, nnx.Param)
    slots = moe.capacity(ours.cfg, 8)

    def mine(params, x):
        y, routing = nnx.merge(graphdef, params).routed(x, rows)
        return jnp.sum(y * weights), (y, routing)

    @partial(jax.jit, static_argnums=0)
    @partial(jax.grad, argnums=(1, 2), has_aux=True)
    def loop(cfg, params, x, keep):
        y, experts = by_loop(params, x, cfg, keep)
        return jnp.sum(y * weights), (y, experts)

    grads, (y, routing) = jax.jit(jax.grad(mine, argnums=(0, 1), has_aux=True))(params, x)
    everything = np.ones((len(x), ours.cfg.experts_per_token), bool)
    keep, counts = find_room(loop(ours.cfg, params, x, everything)[1][1], ours.cfg, slots, rows)
    wanted, (want, _) = loop(ours.cfg, params, x, keep)
    dropped = (~keep).sum()
    np.testing.assert_allclose(y, want, atol=1e-5)
    np.testing.assert_array_equal(routing.load_E, counts.sum(0))
    assert (
        routing.dropped == dropped == (0 if slots is None else np.maximum(counts - slots, 0).sum())
    )
    assert (dropped > 5) == (factor == 0.6 or (factor == 1.25 and skew > 0))
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * max(1, np.abs(want).max()))


@settings(max_examples=2)
@given(
    k=st.integers(1, 3),
    width=st.sampled_from([8, 96, 128]),
    rows=st.sampled_from([1, 4]),
    seed=st.integers(0, 99),
)
def test_dropless_is_dropping_with_room_for_all_bit_for_bit(k, width, rows, seed):
    """So are the gradients of tokens and router; an expert's are sums over rows, with empty slots between them."""
    shape = {"experts": 6, "experts_per_token": k, "embed": width, "mlp": 2 * width}
    x, weights = normal(seed, 48, width), normal(seed + 1, 48, width)

    def value_and_gradients(factor):
        graphdef, params = nnx.split(layer(seed, capacity_factor=factor, **shape), nnx.Param)

        def loss(params, x):
            y, routing = nnx.merge(graphdef, params).routed(x, rows)
            return jnp.sum(y * weights) + routing.loss, (y, routing)

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)

    dropless, roomy = value_and_gradients(None), value_and_gradients(6.0)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(dropless), jax.tree.leaves(roomy), strict=True
    ):
        if any(name in jax.tree_util.keystr(path) for name in ("gate", "up", "down")):
            np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("factor", [None, 0.5])
def test_later_tokens_and_other_rows_change_nothing(factor):
    """With room for half, what is dropped depends on earlier tokens of the row alone."""
    ours, x, t = layer(experts=4, capacity_factor=factor), normal(1, 32, 16), 20
    y, routing = routed(ours, x, 2)
    assert (routing.dropped > 0) == (factor is not None)
    changed = routed(ours, x.at[t].set(normal(2, 16)), 2)[0] != y
    rows = np.flatnonzero(np.asarray(changed).any(-1))
    assert rows[0] == t  # and of the second row, which begins at 16, none before
    assert factor is not None or list(rows) == [t]


def test_shared_experts_see_every_token():
    ours, x = layer(experts=4, shared_experts=2), normal(1, 12, 16)
    assert ours.shared.gate.w.shape == (16, 24)
    alone = routed(ours, x, 1)[0] - ours.shared(x)
    ours.shared.down.w.set_value(0 * ours.shared.down.w.get_value())
    np.testing.assert_allclose(routed(ours, x, 1)[0], alone, atol=1e-6)


# --- statistics and balancing


def test_losses_are_their_definitions():
    """Even shares cost 1, all tokens at the same k experts E / k; z is of the log-normalizer."""
    even = layer(experts=4, experts_per_token=2, balance_loss=0.5, z_loss=0.25, embed=4)
    even.router.set_value(jnp.eye(4))
    x = 50.0 * jnp.array([[1.0, 1, 0, 0], [0, 0, 1, 1]])
    routing = routed(even, x, 1)[1]
    np.testing.assert_array_equal(routing.load_E, [1, 1, 1, 1])
    np.testing.assert_allclose(routing.balance, 1)
    np.testing.assert_allclose(routing.z, (50 + np.log(2)) ** 2, rtol=1e-6)
    np.testing.assert_allclose(routing.loss, 0.5 * routing.balance + 0.25 * routing.z)
    routing = routed(even, x[:1], 1)[1]
    np.testing.assert_array_equal(routing.load_E, [1, 1, 0, 0])
    np.testing.assert_allclose(routing.balance, 2)


def test_biases_move_towards_the_even_share():
    params: Any = nnx.State(
        {"blocks": {"ffn": {"bias": nnx.Param(jnp.zeros((2, 3)), axes=(None,))}}}
    )
    load = jnp.array([[3, 2, 1], [0, 6, 0]])
    cfg = ModelConfig(layers=2, ffn=MoEConfig(experts=3, bias_rate=0.1))
    new: Any = moe.update_bias(params, load, cfg)
    new = new["blocks"]["ffn"]["bias"].get_value()
    np.testing.assert_allclose(new, [[-0.1, 0, 0.1], [0.1, -0.1, 0.1]])
    assert not np.any(params["blocks"]["ffn"]["bias"].get_value())


@functools.cache
def run(tiny, mesh, *settings, steps=2):
    more = "model.ffn.bias_rate=0.01", "model.ffn.capacity_factor=1.0", "model.layers=1"
    cfg = tiny(*MOE, *more, *settings)
    state, step, lines = init_state(cfg, mesh), make_train_step(cfg, mesh), []
    for seed in range(steps):
        state, metrics = step(state, packed_batch(cfg, mesh, seed))
        lines.append(jax.device_get(metrics))
    return lines, jax.device_get(state)


def test_a_step_reports_its_experts_and_moves_their_biases(tiny, one_device):
    lines, state = run(tiny, one_device)
    for line in lines:
        assert line["expert_load_min"] < 1 < line["expert_load_max"] <= 4
        assert 0 < line["dropped"] < 0.6 and 0.9 < line["balance_loss"] < 4
        assert line["router_z_loss"] > 0
    bias = np.abs(state.params["blocks"]["ffn"]["bias"].get_value())
    assert bias.shape == (1, 8) and set(np.round(bias, 4).ravel()) <= {
        0,
        0.01,
        0.02,
        np.float32(0.01),
        np.float32(0.02),
    }
    assert bias.any()


def test_parts_of_a_batch_report_the_whole(tiny, one_device):
    """Loads are counted over all microbatches; the rest is their mean, weighted by targets."""
    (whole, _), _ = run(tiny, one_device)
    (parts,), _ = run(tiny, one_device, "train.microbatches=4", steps=1)
    for name in ("expert_load_max", "expert_load_min", "dropped"):
        np.testing.assert_allclose(parts[name], whole[name])
    np.testing.assert_allclose(parts["router_z_loss"], whole["router_z_loss"], rtol=0.05)


def test_descending_the_balance_loss_balances():
    ours, x = layer(experts=4), normal(1, 64, 16).at[:, 0].set(1.0)
    params: Any
    graphdef, params = nnx.split(ours, nnx.Param)
    params["router"] = params["router"].replace(params["router"].get_value().at[0, 1].add(2.0))

    @jax.jit
    def descend(params):
        def balance(params):
            routing = nnx.merge(graphdef, params).routed(x, 1)[1]
            return routing.balance, routing.load_E

        grads, load_E = jax.grad(balance, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), load_E

    loads = []
    for _ in range(20):
        params, load_E = descend(params)
        loads.append(int(load_E.max()))
    assert loads[0] > 55 and loads[-1] < 45  # of 128 assignments, 32 each


# --- configuration, counts


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.ffn.experts_per_token=9", "model.ffn.experts_per_token=9 is more than model.ffn.experts=8"),
        ("model.ffn.groups=3", "model.ffn.groups=3: choose model.ffn.groups among 1, 2, 4, 8"),
        ("model.ffn.groups_per_token=2", "model.ffn.groups_per_token=2 is more than"),
        ("model.ffn.groups=8", "model.ffn.groups_per_token=1 of 1 experts each"),
        ("model.ffn.experts=1", "model.ffn.experts=1"),
        ("model.ffn.capacity_factor=0", "model.ffn.capacity_factor=0"),
        ("model.ffn.kind=swiglu", "model.ffn.experts=8"),
        ("model.ffn.kind=mixture", "model.ffn.kind=mixture"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together_are_one_line(tiny, override, named):
    with pytest.raises(ConfigError) as error:
        tiny(*MOE[1:], "model.ffn.kind=moe", override)
    (line,) = [line for line in str(error.value).splitlines() if named in line]
    assert "model.ffn" in line


def test_another_kind_takes_nothing_of_the_layers_below(tiny):
    cfg = tiny(*MOE).replace({"model.ffn.kind": "swiglu"})
    assert cfg.model.ffn == SwiGLUConfig()
    assert tiny("model.ffn.experts=4", "model.ffn.kind=moe").model.ffn.experts == 4


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["mesh.expert=8", "model.ffn.experts=4"], "model.ffn.experts=4 is not divisible by mesh.expert=8"),
        (["mesh.stage=2", "mesh.data=4"], "mesh.stage=2"),
        (["mesh.context=2", "mesh.data=4", "model.ffn.capacity_factor=1.0"], "model.ffn.capacity_factor=1.0"),
    ],
)  # fmt: skip
def test_a_mesh_that_experts_cannot_use_is_refused(tiny, overrides, named):
    cfg = tiny(*MOE, *overrides)
    with pytest.raises(UserError, match=named):
        check_mesh(cfg, make_mesh(cfg.mesh))


@pytest.mark.parametrize(
    ("mesh", "named"),
    [("mesh.expert=8", "model.ffn.experts=4 is not"), ("mesh.stage=2", "mesh.stage=2 cannot")],
)
def test_experts_in_some_layers_are_checked_too(tiny, mesh, named):
    cfg = tiny("model.layers=4", "model.period=[{}, {ffn: {kind: moe, experts: 4}}]", mesh)
    with pytest.raises(UserError, match=named):
        check_mesh(cfg, make_mesh(cfg.mesh))


@pytest.mark.parametrize("more", [{}, {"shared_experts": 2, "bias_rate": 0.1}])
def test_parameters_are_counted(more):
    cfg = ModelConfig(embed=16, heads=2, mlp=12, layers=3, ffn=MoEConfig(experts=4, **more))
    params = nnx.state(nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0))), nnx.Param)
    assert sum(x.size for x in jax.tree.leaves(params)) == count_params(cfg)
    others = 3 * (4 - 2) * 3 * 16 * 12 + 3 * 4 * bool(more)
    assert count_params(cfg, active=True) == count_params(cfg) - others


def test_flops_are_those_of_the_experts_that_a_token_meets():
    few, many = (ModelConfig(embed=16, heads=2, mlp=12, ffn=MoEConfig(experts=E)) for E in (4, 64))
    assert count_flops(many, 10, 8) - count_flops(few, 10, 8) == 3 * 10 * 2 * 4 * 16 * 60  # routers
