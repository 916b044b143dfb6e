"""Mixture of experts: a router sends every token through a few of many feed-forward layers (Shazeer et al. 2017).

Chapters: 18.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from minitext import hardware, kernels
from minitext.config.model import ModelConfig, MoEConfig
from minitext.config.quantization import QuantizationRule
from minitext.kernels.grouped_matmul.xla import plain_grouped_matmul
from minitext.models import quantization
from minitext.models.ffn import SwiGLU, gated
from minitext.models.layers import is_qwixed, make_param
from minitext.models.quantized_gather import gather_part
from minitext.models.quantized_storage import StoredWeight
from minitext.sharding.expert_parallel import Layout, exchange, on_each_device
from minitext.sharding.rules import ShardingRules

# A layer's parameters that its experts use, in the compute type, and those of its router, in float32.
EXPERTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
ROUTER = ("router", "router_bias", "bias")


class Routing(NamedTuple):
    """Statistics of a layer's router over the tokens of all devices; stacked for several layers.

    Attributes:
      loss: the weighted losses that the layer adds to the loss of each target token.
      balance: the balance loss without its weight: 1 if all experts get the same, E/k if the same k get everything.
      z: the mean squared logsumexp of the router's logits.
      load_E: [E] int32, number of assignments to each expert, including dropped ones.
      dropped: int32, number of dropped assignments.
    """

    loss: jax.Array
    balance: jax.Array
    z: jax.Array
    load_E: jax.Array
    dropped: jax.Array


class Choice(NamedTuple):
    """A router's choice for each token.

    Attributes:
      experts: [..., k] int32, best first; the lower number wins a tie.
      weights: [..., k] float32.
      shares: [..., E] float32, scores that sum to 1.
    """

    experts: jax.Array
    weights: jax.Array
    shares: jax.Array


def route(logits: jax.Array, cfg: MoEConfig, bias_E: jax.Array | None = None) -> Choice:
    """Chooses each token's k experts.

    Scores are a softmax or sigmoids. A bias affects only the choice, not the weights (Wang et al. 2024). With groups,
    only experts of the `groups_per_token` best groups can be chosen; a group's score is the sum of its two best experts
    (DeepSeek-AI 2024, section 2.1.2 and their code).

    Args:
      logits: [..., E] float32.
      cfg: the router's settings.
      bias_E: [E] float32, or None.
    """
    E, k = cfg.experts, cfg.experts_per_token
    scores = jax.nn.softmax(logits) if cfg.router == "softmax" else jax.nn.sigmoid(logits)
    ranking = jax.lax.stop_gradient(scores)
    if bias_E is not None:
        ranking = ranking + jax.lax.stop_gradient(bias_E)
    if cfg.groups > 1:
        grouped = jnp.reshape(ranking, (*ranking.shape[:-1], cfg.groups, E // cfg.groups))
        value = jnp.sum(jax.lax.top_k(grouped, min(2, E // cfg.groups))[0], axis=-1)
        best = jax.lax.top_k(value, cfg.groups_per_token)[1]
        allowed = jnp.any(best[..., None] == jnp.arange(cfg.groups), axis=-2)
        ranking = jnp.where(jnp.repeat(allowed, E // cfg.groups, axis=-1), ranking, -jnp.inf)
    experts = jax.lax.top_k(ranking, k)[1]
    # A masked sum, because a gather's gradient would be a scatter.
    hit = experts[..., None] == jnp.arange(E)
    weights = jnp.sum(jnp.where(hit, scores[..., None, :], 0.0), axis=-1)
    if cfg.normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    shares = scores if cfg.router == "softmax" else scores / jnp.sum(scores, -1, keepdims=True)
    return Choice(experts, cfg.scaling * weights, shares)


def capacity(cfg: MoEConfig, seq_len: int) -> int | None:
    """Returns the slots that an expert has for a row of tokens, or None if nothing is dropped.

    They are an even share times `capacity_factor`, rounded up, and at most the row's tokens, since a token's experts
    differ.
    """
    if cfg.capacity_factor is None:
        return None
    share = seq_len * cfg.experts_per_token / cfg.experts
    return min(seq_len, math.ceil(share * cfg.capacity_factor))


class MoE(nnx.Module):
    """E gated layers (`SwiGLU`): a router weights k of them for each token; optional shared ones take all tokens."""

    quantization: QuantizationRule | None = None
    storable: ClassVar[dict[str, int]] = {"gate": -2, "up": -2, "down": -2}

    def __init__(self, cfg: ModelConfig, *, rules: ShardingRules, rngs: nnx.Rngs):
        assert isinstance(cfg.ffn, MoEConfig)
        moe, D, F = cfg.ffn, cfg.embed, cfg.mlp
        E = moe.experts
        new = partial(make_param, rules=rules)
        self.router = new(rngs.params(), (D, E), ("embed", None), fan_in=D)
        into, out = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")
        self.gate = new(rngs.params(), (E, D, F), into, fan_in=D)
        self.up = new(rngs.params(), (E, D, F), into, fan_in=D)
        scale = (2 * cfg.layers) ** -0.5  # as in SwiGLU
        self.down = new(rngs.params(), (E, F, D), out, fan_in=F, scale=scale)
        if moe.bias_rate:
            self.bias = nnx.Param(jnp.zeros((E,), jnp.float32), axes=(None,))
        if moe.router_bias:
            self.router_bias = nnx.Param(jnp.zeros((E,), jnp.float32), axes=(None,))
        if moe.bias:
            self.gate_bias = nnx.Param(jnp.zeros((E, F), jnp.float32), axes=("expert", "mlp"))
            self.up_bias = nnx.Param(jnp.zeros((E, F), jnp.float32), axes=("expert", "mlp"))
            self.down_bias = nnx.Param(jnp.zeros((E, D), jnp.float32), axes=("expert", "embed"))
        if moe.shared_experts:
            wide = cfg.model_copy(update={"mlp": moe.shared_experts * F})
            self.shared = SwiGLU(wide, rules=rules, rngs=rngs)
        if moe.shared_gate:
            self.shared_gate = new(rngs.params(), (D,), ("embed",), fan_in=D)
        self.cfg, self.rules, self.regather = moe, rules, cfg.remat == "none"

    def cannot_quantize(self, rule: QuantizationRule) -> str | None:
        """Returns why a rule would leave the experts' products as they are, or None."""
        if rule.granularity == "block" and self.cfg.capacity_factor is None:
            return "groups of rows have no whole blocks: set granularity=channel, or model.ffn.capacity_factor"
        return None

    def __call__(self, x_XD: jax.Array) -> jax.Array:
        """Maps tokens [X, D], one row of them, to [X, D]."""
        return self.routed(x_XD, 1)[0]

    @jax.named_scope("moe")
    def routed(self, x: jax.Array, rows: int) -> tuple[jax.Array, Routing]:
        """Maps tokens to tokens of the same shape and type, and returns their routing.

        All tokens are routed, including padding.

        Args:
          x: [B*T, D], or [B, T, D] if rows are split over devices.
          rows: B.
        """
        cfg, rules = self.cfg, self.rules
        slots = capacity(cfg, math.prod(x.shape[:-1]) // rows)
        names = [name for name in EXPERTS + ROUTER if hasattr(self, name)]
        # Not `get_value()` and `astype`, which a weight that Qwix stores lacks.
        params = {name: getattr(self, name)[...] for name in names}
        axes = {name: _axes(getattr(self, name)) for name in names}
        gathers = {
            name: partial(gather_part, features=(axes[name] or ()).index("mlp"), dtype=x.dtype)
            for name in self.storable
            if self._rounds(name)
        }
        # Cast weights before sending them, or round them; the router stays float32.
        cast = [name for name in names if name in EXPERTS and name not in gathers]
        params |= {name: jnp.asarray(params[name], x.dtype) for name in cast}
        y, routing = on_each_device(
            partial(_route_and_compute, cfg=cfg, rule=self.quantization, plain=is_qwixed(self)),
            x,
            params,
            axes,
            Layout(cfg.experts, slots, rows),
            rules=rules,
            regather=self.regather,
            gathers=gathers,
        )
        return (y + self._shared(x) if cfg.shared_experts else y), routing

    def _rounds(self, name: str) -> bool:
        """Whether a weight of the experts is sent in int8."""
        whole = isinstance(getattr(self, name), nnx.Variable) and not is_qwixed(self)
        return whole and self.rules.gather_dtype == "int8"

    def _shared(self, x: jax.Array) -> jax.Array:
        """Returns the output of the experts that every token uses."""
        y = self.shared(x)
        if not self.cfg.shared_gate:
            return y
        gate_D = self.rules.gather(self.shared_gate.get_value(), "embed").astype(x.dtype)
        return y * jax.nn.sigmoid(jnp.sum(x * gate_D, axis=-1, keepdims=True))

    @staticmethod
    def count(cfg: ModelConfig, *, active: bool = False) -> int:
        """Returns the number of parameters of one layer: 3*D*F for each expert, D*E for the router, and biases.

        `active` counts only what a token uses: k experts, the shared ones and the router, without biases.
        """
        assert isinstance(cfg.ffn, MoEConfig)
        ffn, D, F = cfg.ffn, cfg.embed, cfg.mlp
        routed = ffn.experts_per_token if active else ffn.experts
        weights = 3 * D * F * (routed + ffn.shared_experts) + D * (ffn.experts + ffn.shared_gate)
        if active:
            return weights
        biases = ffn.experts * (bool(ffn.bias_rate) + ffn.router_bias)
        if ffn.bias:
            biases += ffn.experts * (2 * F + D)
            biases += 2 * F * ffn.shared_experts + D if ffn.shared_experts else 0
        return weights + biases


def _axes(param: Any) -> tuple[str | None, ...] | None:
    """Returns a parameter's dimension names, or None for one that Qwix stores, which has none."""
    return param.axes if isinstance(param, nnx.Variable | StoredWeight) else None


def _route_and_compute(
    x: jax.Array,
    params: Any,
    layout: Layout,
    *,
    cfg: MoEConfig,
    rule: QuantizationRule | None = None,
    plain: bool = False,
) -> tuple[jax.Array, Routing]:
    """Runs the layer on one device's tokens [..., D]; the routing covers the tokens of all devices."""
    # In float32, because small differences decide which experts are chosen.
    wide, highest = x.astype(jnp.float32), jax.lax.Precision.HIGHEST
    logits = jnp.einsum("...D,DE->...E", wide, params["router"], precision=highest)
    if cfg.router_bias:
        logits = logits + params["router_bias"]
    choice = route(logits, cfg, params.get("bias"))
    if cfg.bias:  # devices that share an expert's features sum their outputs
        parts = math.prod(jax.lax.axis_size(axis) for axis in layout.features)
        params = params | {"down_bias": params["down_bias"] / parts}
    compute = partial(swiglu_experts, params, activation=cfg.activation, rule=rule, plain=plain)
    if cfg.scale_input:
        # Each assignment is a token of its own, already weighted.
        x_kD = (wide[..., None, :] * choice.weights[..., None]).astype(x.dtype)
        ones = jnp.ones_like(choice.weights)[..., None]
        y = jnp.sum(exchange(compute, x_kD, choice.experts[..., None], ones, layout), axis=-2)
    else:
        y = exchange(compute, x, choice.experts, choice.weights, layout)
    return y, _routing(logits, choice, layout, cfg)


def _routing(logits: jax.Array, choice: Choice, layout: Layout, cfg: MoEConfig) -> Routing:
    E, tokens = cfg.experts, math.prod(logits.shape[:-1])
    hits = choice.experts[..., None] == jnp.arange(E)
    load_BE = jnp.sum(jnp.reshape(hits, (layout.rows, -1, E)), axis=1, dtype=jnp.int32)
    over_BE = 0 * load_BE if layout.capacity is None else load_BE - layout.capacity
    shares_E = jnp.sum(jnp.reshape(choice.shares, (-1, E)), axis=0)
    squares = jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)))
    dropped = jnp.sum(jnp.maximum(over_BE, 0))
    load_E, dropped, shares_E, squares = (
        layout.total(x) for x in (jnp.sum(load_BE, axis=0), dropped, shares_E, squares)
    )
    count = tokens * math.prod(jax.lax.axis_size(axis) for axis in layout.tokens)
    # Fedus et al. 2021, equations 4 to 6; with k experts, shares of assignments instead of tokens.
    load_share_E = load_E / (count * cfg.experts_per_token)
    balance = E * jnp.sum(shares_E / count * load_share_E)
    z = squares / count  # Zoph et al. 2022, equation 5
    loss = cfg.balance_loss * balance + cfg.z_loss * z
    return Routing(loss, balance, z, load_E, dropped)


def swiglu_experts(
    params: Any,
    rows_MD: jax.Array,
    sizes_E: jax.Array | None,
    *,
    activation: str = "silu",
    rule: QuantizationRule | None = None,
    plain: bool = False,
) -> jax.Array:
    """Applies a device's experts to their rows and returns [M, D].

    Args:
      params: `gate` and `up` [E, D, F], `down` [E, F, D], in the compute type; with biases also `gate_bias` and
        `up_bias` [E, F], `down_bias` [E, D].
      rows_MD: [M, D] sorted by expert.
      sizes_E: the number of each expert's rows; None if all have M / E.
      activation: of the gate.
      rule: how the products are quantized, or None.
      plain: compute products that Qwix can replace: see `is_qwixed`.
    """
    E, M, D = params["gate"].shape[0], *rows_MD.shape
    if rule is None and not plain and sizes_E is None and hardware.platform() == "cpu":
        # The same product as without a capacity, since XLA's batched product sums in a different order.
        sizes_E = jnp.zeros_like(rows_MD, jnp.int32, (E,)) + M // E
    product: Callable[..., Any]
    if rule is not None:
        grouped = quantization.grouped_matmul
        rows, product = rows_MD, lambda x, w: grouped(x, w, sizes_E, rule)
    elif sizes_E is None:
        rows = jnp.reshape(rows_MD, (E, -1, D))
        product = _plain_batched if plain else partial(jnp.einsum, "GMK,GKN->GMN")
    else:
        grouped = plain_grouped_matmul if plain else kernels.grouped_matmul
        rows, product = rows_MD, partial(grouped, group_sizes_G=sizes_E)

    def project(x: jax.Array, name: str) -> jax.Array:
        y = product(x, params[name])
        if (bias := params.get(f"{name}_bias")) is None:
            return y
        if sizes_E is None:
            return jnp.reshape(jnp.reshape(y, (E, M // E, -1)) + bias[:, None], y.shape)
        # Rows beyond the last expert's are never read.
        ends_E = jnp.cumsum(sizes_E)
        expert_M = jnp.searchsorted(ends_E, jnp.arange(M), side="right")
        return y + bias[jnp.minimum(expert_M, E - 1)]

    gate, up = checkpoint_name((project(rows, "gate"), project(rows, "up")), "gate_up")
    hidden = checkpoint_name(gated(gate, up, activation), "hidden")
    return jnp.reshape(project(hidden, "down"), rows_MD.shape)


def _plain_batched(x_GMK: jax.Array, w_GKN: Any) -> jax.Array:
    """Returns the einsum GMK,GKN->GMN as another operation, by which Qwix's rules tell it from the router's einsum."""
    numbers = (((2,), (1,)), ((0,), (0,)))
    return jax.lax.dot_general(x_GMK, w_GKN, numbers).astype(x_GMK.dtype)


def scaled(routing: Routing, factor: jax.Array) -> Routing:
    """Returns a routing with its means multiplied by `factor`; the counts stay."""
    loss, balance, z = (factor * x for x in (routing.loss, routing.balance, routing.z))
    return routing._replace(loss=loss, balance=balance, z=z)


def update_bias(params: Any, load_LE: jax.Array, cfg: ModelConfig) -> Any:
    """Raises the bias of experts with less than an even share of assignments and lowers the others' (Wang et al. 2024).

    Args:
      params: the model's parameters; a stack of layers has `ffn.bias` [L, E].
      load_LE: [L, E] assignments of a step, of all layers that have experts.
      cfg: the model, whose `ffn.bias_rate` is the size of each change.

    Returns:
      The parameters with the new biases.
    """
    params, done = jax.tree.map(lambda x: x, params), 0
    for name, stack in cfg.stacks.items():
        routed = [i for i, one in enumerate(stack.layers) if isinstance(one.ffn, MoEConfig)]
        if not routed:
            continue
        here = stack.repeats * len(routed)
        load = jnp.reshape(load_LE[done : done + here], (stack.repeats, len(routed), -1))
        done += here
        for number, place in enumerate(routed):
            blocks = params[name]
            ffn = (blocks["layers"][place] if "layers" in blocks else blocks)["ffn"]
            if "bias" in ffn:
                ffn["bias"] = _updated(ffn["bias"], load[:, number], stack.layers[place].ffn)
    return params


def _updated(bias: Any, load_LE: jax.Array, cfg: Any) -> Any:
    mean_L1 = jnp.mean(load_LE.astype(jnp.float32), axis=1, keepdims=True)
    return bias.replace(bias.get_value() + cfg.bias_rate * jnp.sign(mean_L1 - load_LE))


def metrics(routing: Routing) -> dict[str, jax.Array]:
    """Returns the metrics of a step's experts, float32 scalars, from the stacked routing of all layers.

    `expert_load_max` and `expert_load_min` are the largest and smallest load of any expert in any layer, in units of an
    even share. `dropped` is the share of dropped assignments. `balance_loss` and `router_z_loss` are means over the
    layers, without their weights.
    """
    load_LE = routing.load_E.astype(jnp.float32)
    relative_LE = load_LE / jnp.mean(load_LE, axis=1, keepdims=True)
    return {
        "expert_load_max": jnp.max(relative_LE),
        "expert_load_min": jnp.min(relative_LE),
        "dropped": jnp.sum(routing.dropped) / jnp.sum(load_LE),
        "balance_loss": jnp.mean(routing.balance),
        "router_z_loss": jnp.mean(routing.z),
    }
