"""Gated DeltaNet: attention that keeps one matrix per head instead of all keys and values (Yang et al. 2024).

The matrix, the state S, maps a key to a value. Each token first lets it fade by a factor a, then writes its value v
under its key k, but only what the state doesn't say already, and to the degree b (the delta rule), and then reads it
with its query q:

    S <- a S,    S <- S + k (b (v - S^T k))^T,    out = S^T q.

Generation does just this, at the same cost for every token. Training would take T such steps one after another. But the
writes of a chunk of tokens depend on each other only through the products of their keys: they are the solution of one
triangular system, and a scan over chunks passes the state on (`chunked`; sections 3.2 and 3.3 of the paper).

Queries, keys and values first pass a short causal convolution, feature by feature. So the cache has two parts: the last
inputs of the convolution, and the state. Neither grows with the text.

Further letters: K heads of queries and keys with H features; each serves R heads of values with W features; J tokens
that a convolution sees; Z chunks of C tokens, S again the tokens of a chunk.

Sources: arXiv 2412.06464; Qwen3-Next in transformers 5.23 for the order of operations.

Chapters: 23.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from minitext.config.model import DeltaNetConfig, ModelConfig
from minitext.models.attention import Counts, project_out
from minitext.models.layers import Linear, RMSNorm, make_param
from minitext.models.paged import SlotStateCache
from minitext.sharding.rules import ShardingRules, unflatten_tokens

CHUNK = 64  # tokens: more make the triangular systems costly, fewer the scan long
UNIT_EPS = 1e-6  # added to the squared length of queries and keys

# The state sums over the whole text, so its products are float32 on every platform.
exact = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


# The projections by what splits their outputs.
SPLIT = {
    "q": "kv_heads", "k": "kv_heads", "v": "heads", "gate": "heads", "beta": "heads", "decay": "heads",
}  # fmt: skip


class StateCache(NamedTuple):
    """What a layer keeps of earlier tokens; used like `KVCache`, but it has the same size for any length.

    Attributes:
      q: [L, B, J-1, K*H] the convolution's last inputs, oldest first; for one layer [B, J-1, K*H]; for layers in a list
        a tuple of L of these.
      k: the same of keys.
      v: the same of values, [L, B, J-1, K*R*W].
      state: [L, B, K, R, H, W] float32, in the same form.
      length: the number of tokens seen.
    """

    q: Any
    k: Any
    v: Any
    state: Any
    length: jax.Array | int

    def append(self, new: Any) -> "StateCache":
        """Returns the cache after the tokens of another one, whose state has these tokens' in it already."""
        return new._replace(length=self.length + new.length)


class Tokens(NamedTuple):
    """What the delta rule takes of B rows of T tokens, all in float32.

    Attributes:
      q: [B, T, K, H] queries.
      k: [B, T, K, H] keys.
      v: [B, T, K, R, W] values.
      decay: [B, T, K, R] logarithm of the factor by which the state fades, at most 0.
      beta: [B, T, K, R] degree to which a value is written, 0 to 1.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array
    beta: jax.Array


class DeltaNet(nnx.Module):
    """Gated DeltaNet as in Qwen3-Next: convolution, delta rule, and a normalised, gated output (Yang et al. 2024)."""

    def __init__(self, cfg: ModelConfig, *, rules: ShardingRules, rngs: nnx.Rngs):
        assert isinstance(cfg.attention, DeltaNetConfig)
        a, D = cfg.attention, cfg.embed
        keys, values = a.key_heads * a.key_dim, a.value_heads * a.value_dim

        def linear(outputs: int, axis: str) -> Linear:
            return Linear(D, outputs, ("embed", axis), key=rngs.params(), rules=rules)

        def conv(outputs: int, axis: str) -> nnx.Param:
            shape, axes = (a.conv, outputs), ("taps", axis)
            return make_param(rngs.params(), shape, axes, fan_in=a.conv, rules=rules)

        self.q, self.k = linear(keys, SPLIT["q"]), linear(keys, SPLIT["k"])
        self.v, self.gate = linear(values, SPLIT["v"]), linear(values, SPLIT["gate"])
        self.beta = linear(a.value_heads, SPLIT["beta"])
        self.decay = linear(a.value_heads, SPLIT["decay"])
        self.q_conv, self.k_conv = conv(keys, SPLIT["q"]), conv(keys, SPLIT["k"])
        self.v_conv = conv(values, SPLIT["v"])

        # A head's state fades by exp(-exp(log_rate) softplus(input + time_bias)) a token, first by 0.1 to 80% of it
        # (Dao and Gu 2024, as for their A and dt).
        def uniform(low: float, high: float) -> jax.Array:
            return jax.random.uniform(rngs.params(), (a.value_heads,), jnp.float32, low, high)

        self.log_rate = nnx.Param(jnp.log(uniform(1.0, 16.0)), axes=("heads",))
        time = jnp.exp(uniform(math.log(1e-3), math.log(0.1)))
        self.time_bias = nnx.Param(jnp.log(jnp.expm1(time)), axes=("heads",))
        self.norm = RMSNorm(a.value_dim, eps=cfg.norm_eps, rules=rules, axis="head_dim")
        scale = (2 * cfg.layers) ** -0.5  # as in SwiGLU
        axes = "heads", "embed"
        self.o = Linear(values, D, axes, key=rngs.params(), rules=rules, scale=scale)
        self.widths, self.rules = a, rules

    @staticmethod
    def count(cfg: ModelConfig) -> Counts:
        """Counts seven projections, and three products of a token's key, value or query with a head's state."""
        a: Any = cfg.attention
        D, keys, values = cfg.embed, a.key_heads * a.key_dim, a.value_heads * a.value_dim
        split = D * (2 * keys + 3 * values + 2 * a.value_heads)
        scales = a.conv * (2 * keys + values) + 2 * a.value_heads + a.value_dim
        return Counts(split, 0, scales, 0, keys, keys, values, values, 0, 6 * values * a.key_dim)

    @staticmethod
    def make_cache(
        cfg: ModelConfig, layers: int, batch: int, length: int, rules: ShardingRules
    ) -> StateCache:
        """Returns the cache of some layers before the first token of `batch` rows, whatever their `length`."""
        a: Any = cfg.attention
        R, keys, values = (
            a.value_heads // a.key_heads,
            a.key_heads * a.key_dim,
            a.value_heads * a.value_dim,
        )

        def inputs(width: int, name: str) -> jax.Array:
            zeros = jnp.zeros((layers, batch, a.conv - 1, width), cfg.dtype)
            return rules.shard(zeros, "layers", "batch", None, name)

        state = jnp.zeros((layers, batch, a.key_heads, R, a.key_dim, a.value_dim), jnp.float32)
        state = rules.shard(state, "layers", "batch", "kv_heads", None, None, None)
        q, k = inputs(keys, "kv_heads"), inputs(keys, "kv_heads")
        return StateCache(q, k, inputs(values, "heads"), state, jnp.zeros((), jnp.int32))

    @staticmethod
    def make_pages(
        cfg: ModelConfig,
        pages: int,
        tokens: int,
        slots: int,
        rules: ShardingRules,
        cache_dtype: str,
    ) -> SlotStateCache:
        """Returns one layer's states in so many slots; it has no pages."""
        one = DeltaNet.make_cache(cfg, 1, slots, 0, rules)
        return SlotStateCache._make((*(x[0] for x in one[:-1]), None))

    @jax.named_scope("attention")
    def __call__(
        self,
        x_XD: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array | None,
        cache: StateCache | SlotStateCache | None = None,
    ) -> tuple[jax.Array, StateCache | SlotStateCache]:
        """Mixes each token with the earlier tokens of its document.

        Args:
          x_XD: [B*T, D] normalised residual stream.
          positions_BT: [B, T]; only the shape counts.
          segment_ids_BT: [B, T] document of each token, or None for one document per row. With a cache, each row is
            one document, and 0 marks padding at its end, which the new cache doesn't have in it.
          cache: one layer's cache of the tokens before these.

        Returns:
          [B*T, D], and the cache after these tokens.
        """
        (B, T), a, rules = positions_BT.shape, self.widths, self.rules
        slots = cache if isinstance(cache, SlotStateCache) else None
        if slots is not None:
            cache = StateCache._make((*slots.read(), T))
        run_BT, real_BT = jnp.zeros_like(positions_BT), None
        if segment_ids_BT is not None:
            if cache is None:
                run_BT = runs(segment_ids_BT)
            else:
                real_BT = segment_ids_BT > 0
        parts = {name: getattr(self, name)(x_XD, axis) for name, axis in SPLIT.items()}
        parts = checkpoint_name(parts, "qkv")
        mixed, last = {}, {}
        for name in ("q", "k", "v"):
            axis = SPLIT[name]
            x_BTF = self._by_row(parts[name], B, axis, sizes=parts[name].shape[-1:])
            seen_BTF = self._after_earlier(x_BTF, None if cache is None else getattr(cache, name))
            w_JF = rules.gather(getattr(self, f"{name}_conv").get_value(), "taps", axis)
            mixed[name] = convolve(seen_BTF, w_JF, run_BT)
            last[name] = latest(seen_BTF, a.conv - 1, real_BT)
        tokens = self._tokens(mixed, parts, real_BT)
        if cache is not None and T == 1:
            out_BTKRW, state = step(tokens, cache.state)
        else:
            out_BTKRW, state = chunked(tokens, run_BT, None if cache is None else cache.state)
        sizes = a.value_heads, a.value_dim
        where = rules.out("batch", "seq", "heads", "head_dim")
        out_BTNW = jax.lax.reshape(out_BTKRW, (B, T, *sizes), out_sharding=where)
        out_BTNW = self.norm(out_BTNW.astype(x_XD.dtype))
        gate_BTNW = self._by_row(parts["gate"], B, "heads", "head_dim", sizes=sizes)
        out_BTNW = (out_BTNW * jax.nn.silu(gate_BTNW.astype(jnp.float32))).astype(x_XD.dtype)
        new = StateCache(**last, state=state, length=T)
        new = new if slots is None else slots.write(new[:-1])
        return project_out(out_BTNW, self.o, rules), new

    def _by_row(self, x: jax.Array, batch: int, *names: str | None, sizes: tuple) -> jax.Array:
        return unflatten_tokens(x, batch, *names, sizes=sizes, rules=self.rules)

    def _after_earlier(self, x_BTF: jax.Array, earlier_BJF: jax.Array | None) -> jax.Array:
        """Returns the convolution's inputs: the last J-1 before these tokens, or zeros, and these."""
        if earlier_BJF is None:
            return jnp.pad(x_BTF, ((0, 0), (self.widths.conv - 1, 0), (0, 0)))
        return jnp.concatenate([earlier_BJF, x_BTF], axis=1)

    def _tokens(self, mixed: dict, parts: dict, real_BT: jax.Array | None) -> Tokens:
        """Returns what the delta rule takes; padding writes nothing, and nothing fades by it."""
        a, rules, B = self.widths, self.rules, mixed["q"].shape[0]
        K, R = a.key_heads, a.value_heads // a.key_heads

        def by_head(x: jax.Array, *sizes: int) -> jax.Array:
            names = "batch", "seq", "kv_heads", *(None,) * (len(sizes) - 1)
            shape = *x.shape[:2], *sizes
            return jax.lax.reshape(x, shape, out_sharding=rules.out(*names))

        def per_head(name: str) -> jax.Array:
            x_BTN = self._by_row(parts[name], B, "heads", sizes=(K * R,))
            return x_BTN.astype(jnp.float32)

        beta_BTN = jax.nn.sigmoid(per_head("beta"))
        rate_N = jnp.exp(self.log_rate.get_value())
        decay_BTN = -rate_N * jax.nn.softplus(per_head("decay") + self.time_bias.get_value())
        if real_BT is not None:
            beta_BTN, decay_BTN = beta_BTN * real_BT[..., None], decay_BTN * real_BT[..., None]
        q_BTKH = unit(by_head(mixed["q"], K, a.key_dim)) * a.key_dim**-0.5
        k_BTKH = unit(by_head(mixed["k"], K, a.key_dim))
        v_BTKRW = by_head(mixed["v"], K, R, a.value_dim).astype(jnp.float32)
        return Tokens(q_BTKH, k_BTKH, v_BTKRW, by_head(decay_BTN, K, R), by_head(beta_BTN, K, R))


def unit(x: jax.Array) -> jax.Array:
    """Returns x [..., H] in float32 and of length 1."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + UNIT_EPS)


def runs(segment_ids_BT: jax.Array) -> jax.Array:
    """Returns the number [B, T], from 0, of each token's run of equal segment ids in its row."""
    changes = jnp.diff(segment_ids_BT, axis=1) != 0
    return jnp.pad(jnp.cumsum(changes, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def convolve(seen_BTF: jax.Array, w_JF: jax.Array, run_BT: jax.Array) -> jax.Array:
    """Applies the causal convolution and SiLU.

    Args:
      seen_BTF: [B, J-1+T, F] inputs, of which the first J-1 come before the tokens and belong to run 0.
      w_JF: [J, F] the weight of each feature of a token and the J-1 before it, oldest first.
      run_BT: [B, T]; a token doesn't see those of other runs.

    Returns:
      [B, T, F] in the inputs' type; computed in float32.
    """
    J, T = len(w_JF), run_BT.shape[1]
    earlier_BT = jnp.pad(run_BT, ((0, 0), (J - 1, 0)))
    total = seen_BTF[:, J - 1 :] * w_JF[J - 1]
    for j in range(J - 1):
        same_BT1 = (earlier_BT[:, j : j + T] == run_BT)[..., None]
        total = total + seen_BTF[:, j : j + T] * same_BT1 * w_JF[j]
    return jax.nn.silu(total).astype(seen_BTF.dtype)


def latest(seen_BTF: jax.Array, count: int, real_BT: jax.Array | None) -> jax.Array:
    """Returns the last `count` inputs [B, count, F] of the convolution, before any padding."""
    if real_BT is None:
        return seen_BTF[:, seen_BTF.shape[1] - count :]
    tokens_B = jnp.sum(real_BT, axis=1)
    return jax.vmap(lambda x, n: jax.lax.dynamic_slice_in_dim(x, n, count))(seen_BTF, tokens_B)


def step(tokens: Tokens, state_BKRHW: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Applies the delta rule to one token of each row, T = 1.

    Returns:
      [B, 1, K, R, W] float32, and the state after the token.
    """
    q_BKH, k_BKH, v_BKRW, decay_BKR, beta_BKR = (x[:, 0] for x in tokens)
    state = state_BKRHW * jnp.exp(decay_BKR)[..., None, None]
    known_BKRW = exact("BKRHW,BKH->BKRW", state, k_BKH)
    write_BKRW = (v_BKRW - known_BKRW) * beta_BKR[..., None]
    state = state + exact("BKH,BKRW->BKRHW", k_BKH, write_BKRW)
    return exact("BKRHW,BKH->BKRW", state, q_BKH)[:, None], state


def chunked(
    tokens: Tokens, run_BT: jax.Array, state_BKRHW: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Applies the delta rule to T tokens of each row, chunk by chunk.

    Args:
      tokens: the tokens.
      run_BT: [B, T] the run of each token, from 0; the state starts anew with each.
      state_BKRHW: the state before the first token, or None for zeros.

    Returns:
      [B, T, K, R, W] float32, and the state after the last token.
    """
    B, T = run_BT.shape
    C = min(CHUNK, T) if isinstance(T, int) else CHUNK  # `jax.export` may leave T open
    Z = -(-T // C)
    if state_BKRHW is None:  # the product is only for the state's type; nothing computes it
        product = exact("BKH,BKRW->BKRHW", tokens.k[:, 0], tokens.v[:, 0])
        state_BKRHW = jnp.zeros_like(product)

    def chunks(x: jax.Array) -> jax.Array:
        """Returns [B, T, ...] as [Z, B, C, ...]; what is added at the end writes nothing and lets nothing fade."""
        x = jnp.pad(x, ((0, 0), (0, Z * C - T), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(jnp.reshape(x, (B, Z, C, *x.shape[2:])), 1, 0)

    # What is added belongs to the last run, whose state goes on. Only the last chunk has any, and runs never go back.
    run_ZBC = jax.lax.cummax(chunks(run_BT), axis=2)
    (state, out_ZBKRCW) = jax.lax.scan(
        pass_chunk,
        state_BKRHW,
        within_chunks(Tokens(*map(chunks, tokens)), run_ZBC),
    )
    out_BZCKRW = jnp.moveaxis(out_ZBKRCW, (0, 4), (1, 2))
    out_BTKRW = jnp.reshape(out_BZCKRW, (B, Z * C, *out_BZCKRW.shape[3:]))
    return out_BTKRW[:, :T], state


class Chunks(NamedTuple):
    """What chunks compute before they know the state, float32, [Z, B, K, R, ...].

    Attributes:
      value: [..., C, W] what the tokens write if the state is zero.
      read: [..., C, H] keys with which they read the state, to write that much less.
      query: [..., C, H] queries, faded since the chunk's start.
      scores: [..., C, S] products of queries and keys, faded between the two.
      key: [..., C, H] keys, faded up to the chunk's end.
      keep: [...] share of the state that is left at the chunk's end.
    """

    value: jax.Array
    read: jax.Array
    query: jax.Array
    scores: jax.Array
    key: jax.Array
    keep: jax.Array


def within_chunks(tokens: Tokens, run_ZBC: jax.Array) -> Chunks:
    """Computes all that doesn't need the state, for all chunks at once.

    A token writes u = b (v - S^T k) where S holds the writes of the tokens before it, each faded. So the u of a chunk
    solve (1 + A) u = b v - b f S^T k, with A the products of keys times b and the fading between the two tokens, for
    places before a token, and f the fading since the chunk's start. It is solved for v and for k, before S is known.

    Args:
      tokens: the tokens, [Z, B, C, ...].
      run_ZBC: their runs. What is before another run fades to nothing.
    """
    start_ZB = jnp.concatenate([jnp.zeros_like(run_ZBC[:1, :, -1]), run_ZBC[:-1, :, -1]])
    end_ZB, C = run_ZBC[..., -1], run_ZBC.shape[-1]
    lower_CC = jnp.tril(jnp.ones((C, C), jnp.float32))
    same_ZBCS = (run_ZBC[..., None] == run_ZBC[..., None, :]) & (lower_CC > 0)
    bias_ZB11CS = jnp.where(same_ZBCS, 0.0, -jnp.inf)[:, :, None, None]
    beta_ZBKRC, decay_ZBKRC = (jnp.moveaxis(x, 2, -1) for x in (tokens.beta, tokens.decay))
    # Summed for each pair of tokens: a difference of sums from the start would have the rounding of all before them.
    later_ZBKRCS = decay_ZBKRC[..., None] * jnp.tril(lower_CC, -1)
    between_ZBKRCS = exact("CM,ZBKRMS->ZBKRCS", lower_CC, later_ZBKRCS)
    fade_ZBKRCS = jnp.exp(between_ZBKRCS + bias_ZB11CS)
    total_ZBKRC = jnp.cumsum(decay_ZBKRC, axis=-1)
    from_start = (run_ZBC == start_ZB[..., None]).astype(jnp.float32)[:, :, None, None]
    to_end = (run_ZBC == end_ZB[..., None]).astype(jnp.float32)[:, :, None, None]
    through = (start_ZB == end_ZB).astype(jnp.float32)[:, :, None, None]
    since_ZBKRC = jnp.exp(total_ZBKRC) * from_start
    until_ZBKRC = jnp.exp(between_ZBKRCS[..., -1, :]) * to_end
    q_ZBK1CH, k_ZBK1CH = (jnp.moveaxis(x, 2, 3)[:, :, :, None] for x in (tokens.q, tokens.k))
    v_ZBKRCW = jnp.moveaxis(tokens.v, 2, 4)
    products_ZBKCS = exact("ZBCKH,ZBSKH->ZBKCS", tokens.k, tokens.k)
    scores_ZBKCS = exact("ZBCKH,ZBSKH->ZBKCS", tokens.q, tokens.k)
    system_ZBKRCS = beta_ZBKRC[..., None] * fade_ZBKRCS * products_ZBKCS[:, :, :, None]
    sides = [v_ZBKRCW, since_ZBKRC[..., None] * k_ZBK1CH]
    solved = solve(system_ZBKRCS, beta_ZBKRC[..., None] * jnp.concatenate(sides, axis=-1))
    value, read = jnp.split(solved, [v_ZBKRCW.shape[-1]], axis=-1)
    return Chunks(
        value,
        read,
        query=q_ZBK1CH * since_ZBKRC[..., None],
        scores=scores_ZBKCS[:, :, :, None] * fade_ZBKRCS,
        key=k_ZBK1CH * until_ZBKRC[..., None],
        keep=jnp.exp(total_ZBKRC[..., -1]) * through,
    )


def pass_chunk(state_BKRHW: jax.Array, chunk: Chunks) -> tuple[jax.Array, jax.Array]:
    """Returns the state after a chunk, and the outputs [B, K, R, C, W] of its tokens."""
    read, query = (exact("BKRCH,BKRHW->BKRCW", x, state_BKRHW) for x in (chunk.read, chunk.query))
    write_BKRCW = chunk.value - read
    out_BKRCW = query + exact("BKRCS,BKRSW->BKRCW", chunk.scores, write_BKRCW)
    state = state_BKRHW * chunk.keep[..., None, None]
    return state + exact("BKRCH,BKRCW->BKRHW", chunk.key, write_BKRCW), out_BKRCW


@jax.custom_vjp
def solve(system: jax.Array, right: jax.Array) -> jax.Array:
    """Returns x with (1 + A) x = right, where A is what is below the diagonal of `system`.

    The gradient is written out because that of JAX 0.10 masks A with an array that has no sharding, and so fails on
    Explicit meshes.

    Args:
      system: [..., C, C].
      right: [..., C, F].
    """
    return _solve(system, right)


_solve = partial(jax.lax.linalg.triangular_solve, left_side=True, lower=True, unit_diagonal=True)


def _solve_forward(system: jax.Array, right: jax.Array) -> tuple[jax.Array, Any]:
    x = _solve(system, right)
    return x, (system, x)


def _solve_backward(kept: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    system, x = kept
    grad_right = _solve(system, grad, transpose_a=True)
    grad_system = -exact("...CF,...SF->...CS", grad_right, x)
    return grad_system * jnp.tril(jnp.ones(system.shape[-2:], jnp.float32), -1), grad_right


solve.defvjp(_solve_forward, _solve_backward)
