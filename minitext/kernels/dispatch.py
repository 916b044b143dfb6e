"""One public function per operation, and the table of its implementations.

`impl="auto"` takes the first implementation in the platform's order that supports the arguments, and logs its name
once. A named implementation that can't run is an error that says why. Nothing falls back silently.

Chapters: 4, 17, 18, 19.
"""

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax

from minitext.errors import UserError
from minitext.hardware import ANY, platform
from minitext.kernels.attention.mask import CAUSAL, Mask, check_options
from minitext.kernels.linear.xla import Specs

log = logging.getLogger("minitext.kernels")


class Implementation(NamedTuple):
    """One way to compute an operation. Its module is imported on first use: a CPU never loads a TPU's kernels.

    Attributes:
      where: the function, as `MODULE:NAME` below `minitext.kernels`.
      platform: the only platform it runs on, or None for all.
      check: the function in the same module that `supports` calls; None for an implementation that takes anything.
    """

    where: str
    platform: str | None = None
    check: str | None = None

    @property
    def run(self) -> Callable[..., Any]:
        """The function that computes the operation."""
        return self._load(self.where.partition(":")[2])

    def supports(self, *args, **options) -> str | None:
        """Returns why `run` can't take these arguments, or None."""
        return self._load(self.check)(*args, **options) if self.check else None

    def reason(self, *args, **options) -> str | None:
        """Returns why it can't compute this on the platform the program is compiled for, or None."""
        if self.platform not in (None, where := platform()):
            program = "every platform" if where == ANY else f"a {where}"
            return f"it is for a {self.platform}, and the program is for {program}"
        return self.supports(*args, **options)

    def _load(self, name: str) -> Callable[..., Any]:
        module = importlib.import_module(f"minitext.kernels.{self.where.partition(':')[0]}")
        return getattr(module, name)


def _pallas(op: str, name: str) -> dict[tuple[str, str], Implementation]:
    return {
        (op, f"pallas_{where}"): Implementation(f"{op}.{where}:{name}", where, "supports")
        for where in ("tpu", "gpu")
    }


IMPLEMENTATIONS: dict[tuple[str, str], Implementation] = {
    ("attention", "xla"): Implementation("attention.xla:attention"),
    ("attention", "xla_blocked"): Implementation(
        "attention.xla:blocked_attention", check="blocked_supports"
    ),
    ("attention", "cudnn"): Implementation("attention.cudnn:attention", "gpu", "supports"),
    **_pallas("attention", "flash_attention"),
    ("grouped_matmul", "xla"): Implementation("grouped_matmul.xla:grouped_matmul"),
    ("grouped_matmul", "xla_blocked"): Implementation("grouped_matmul.cpu:grouped_matmul"),
    **_pallas("grouped_matmul", "grouped_matmul"),
    ("linear", "xla"): Implementation("linear.xla:linear"),
    ("linear", "xla_sharded"): Implementation("linear.sharded:linear", check="supports"),
    ("linear", "xla_cpu"): Implementation("linear.cpu:linear", check="supports"),
    ("linear", "xla_padded"): Implementation("linear.padded:linear", check="supports"),
    ("lookup", "xla"): Implementation("lookup.xla:lookup"),
    ("lookup", "pallas_gpu"): Implementation("lookup.gpu:lookup", "gpu", "supports"),
    ("rms_norm", "xla"): Implementation("rms_norm.xla:rms_norm"),
    **_pallas("rms_norm", "rms_norm"),
    ("linear_cross_entropy", "xla"): Implementation(
        "linear_cross_entropy.xla:linear_cross_entropy"
    ),
    **_pallas("linear_cross_entropy", "linear_cross_entropy"),
    ("paged_attention", "xla"): Implementation("paged_attention.xla:paged_attention"),
    ("paged_attention", "xla_blocked"): Implementation(
        "paged_attention.cpu:paged_attention", check="supports"
    ),
    **_pallas("paged_attention", "paged_attention"),
}

# The order in which `auto` tries implementations on each platform. On a GPU it's that of their speed on an H100
# (benchmarks/results/kernels_gpu-*.json).
ORDER: dict[tuple[str, str], tuple[str, ...]] = {
    ("attention", "cpu"): ("xla_blocked", "xla"),
    # Alone, cuDNN's is faster for plain causal rows. In a train step of 1B parameters ours is: on 2026-11-26 it took
    # 236 ms, and 253 ms with cuDNN's.
    ("attention", "gpu"): ("pallas_gpu", "cudnn", "xla"),
    ("attention", "tpu"): ("pallas_tpu", "xla"),
    ("grouped_matmul", "cpu"): ("xla_blocked", "xla"),
    ("grouped_matmul", "gpu"): ("pallas_gpu", "xla"),
    ("grouped_matmul", "tpu"): ("pallas_tpu", "xla"),
    ("linear", "cpu"): ("xla_cpu", "xla_sharded", "xla"),
    ("linear", "gpu"): ("xla_padded", "xla_sharded", "xla"),
    ("linear", "tpu"): ("xla_sharded", "xla"),
    ("linear_cross_entropy", "cpu"): ("xla",),
    ("linear_cross_entropy", "gpu"): ("pallas_gpu", "xla"),
    ("linear_cross_entropy", "tpu"): ("pallas_tpu", "xla"),
    ("lookup", "cpu"): ("xla",),
    ("lookup", "gpu"): ("pallas_gpu", "xla"),
    ("lookup", "tpu"): ("xla",),
    ("paged_attention", "cpu"): ("xla_blocked", "xla"),
    ("paged_attention", "gpu"): ("pallas_gpu", "xla"),
    ("paged_attention", "tpu"): ("pallas_tpu", "xla"),
    ("rms_norm", "cpu"): ("xla",),
    ("rms_norm", "gpu"): ("xla",),  # ours is as fast
    ("rms_norm", "tpu"): ("pallas_tpu", "xla"),
}
ORDER |= {(op, ANY): ("xla",) for op, _ in IMPLEMENTATIONS}  # one program for all platforms

_LEFT_OUT: ContextVar[frozenset[tuple[str, str]]] = ContextVar("left out", default=frozenset())


@contextlib.contextmanager
def leave_out(*names: tuple[str, str]) -> Iterator[None]:
    """While it lasts, `auto` doesn't take these implementations, each an operation and a name."""
    token = _LEFT_OUT.set(_LEFT_OUT.get() | set(names))
    try:
        yield
    finally:
        _LEFT_OUT.reset(token)


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    *,
    mask: Mask = CAUSAL,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    impl: str = "auto",
) -> jax.Array:
    """Masked grouped-query attention.

    Args:
      q_BTNH: [B, T, N, H] queries.
      k_BSKH: [B, S, K, H] keys, S = T, N divisible by K.
      v_BSKH: [B, S, K, H] values.
      segment_ids_BT: [B, T] integers, or None. Tokens attend only within their own segment.
      mask: which keys a query sees; by default its own token's and all earlier ones.
      softcap: c > 0 to bound logits as c tanh(logits / c) (Gemma 2, 2024), or None.
      sinks_N: [N] one logit per query head that joins the softmax and has no value (GPT-OSS, 2025), or None.
      impl: `auto`, or the name of an implementation.

    Returns:
      [B, T, N, H] in the queries' type. A query that sees no key gives zero and gets no gradient.

    Raises:
      UserError: if the mask doesn't fit T tokens, or the named implementation doesn't exist or can't take these
        arguments.
    """
    T = q_BTNH.shape[1]
    check_options("attention", T, mask, softcap)
    mask = mask.within(T)
    # Pass only what differs from plain causal attention: an implementation needn't name what it can't do.
    options: dict[str, Any] = {} if mask == CAUSAL else {"mask": mask}
    options |= {} if softcap is None else {"softcap": softcap}
    options |= {} if sinks_N is None else {"sinks_N": sinks_N}
    args = q_BTNH, k_BSKH, v_BSKH, segment_ids_BT
    return choose("attention", impl, *args, **options)(*args, **options)


def grouped_matmul(
    lhs_MK: jax.Array, rhs_GKN: jax.Array, group_sizes_G: jax.Array, *, impl: str = "auto"
) -> jax.Array:
    """Multiplies each group of rows by the group's own matrix, as a mixture of experts does.

    Args:
      lhs_MK: [M, K] rows sorted by group: group g owns the `group_sizes_G[g]` rows after those of group g - 1.
      rhs_GKN: [G, K, N] one matrix per group, in the same type.
      group_sizes_G: [G] int32 with a sum of at most M. Groups may be empty.
      impl: `auto`, or the name of an implementation.

    Returns:
      [M, N] in the type of `lhs_MK`, summed in float32. Rows that no group owns give zeros and get no gradient,
      whatever they contain.

    Raises:
      UserError: if the named implementation doesn't exist or can't take these arguments.
    """
    run = choose("grouped_matmul", impl, lhs_MK, rhs_GKN, group_sizes_G)
    return run(lhs_MK, rhs_GKN, group_sizes_G)


def linear(x: jax.Array, w_DF: jax.Array, specs: Specs, *, impl: str = "auto") -> jax.Array:
    """Projects tokens by a weight.

    Args:
      x: [X, D] or [B, T, D], in the compute type.
      w_DF: [D, F] float32; it is cast to x's type.
      specs: how the factors and the result are sharded.
      impl: `auto`, or the name of an implementation.

    Returns:
      [X, F] or [B, T, F] in x's type.

    Raises:
      UserError: if the named implementation doesn't exist or can't take these arguments.
    """
    return choose("linear", impl, x, w_DF, specs)(x, w_DF, specs)


def rms_norm(
    x: jax.Array, scale_D: jax.Array, eps: float = 1e-6, *, impl: str = "auto"
) -> jax.Array:
    """Divides by the root mean square over the last dimension and scales (Zhang and Sennrich 2019).

    Args:
      x: [..., D], any float type.
      scale_D: [D], float32.
      eps: added to the mean square.
      impl: `auto`, or the name of an implementation.

    Returns:
      [..., D] in x's type, computed in float32.

    Raises:
      UserError: if the named implementation doesn't exist or can't take these arguments.
    """
    return choose("rms_norm", impl, x, scale_D, eps)(x, scale_D, eps)


def linear_cross_entropy(
    x_XD: jax.Array, w_DV: jax.Array, targets_X: jax.Array, *, impl: str = "auto"
) -> tuple[jax.Array, jax.Array]:
    """Computes `minitext.training.loss.cross_entropy` of the logits x w, which a kernel needn't store.

    With a z-loss of weight z, the loss is `loss_X + z * log_normalizer_X**2`.

    Args:
      x_XD: [X, D] hidden states.
      w_DV: [D, V] output layer, in the same type.
      targets_X: [X] integers. A target of V or more has no logit: its loss is the logsumexp.
      impl: `auto`, or the name of an implementation.

    Returns:
      loss_X: [X] float32, the negative log-likelihood of each target, in nats.
      log_normalizer_X: [X] float32, the log-sum-exp of each token's logits.

    Raises:
      UserError: if the named implementation doesn't exist or can't take these arguments.
    """
    return choose("linear_cross_entropy", impl, x_XD, w_DV, targets_X)(x_XD, w_DV, targets_X)


def lookup(
    table_VD: jax.Array, tokens_BT: jax.Array, out_sharding: Any = None, *, impl: str = "auto"
) -> jax.Array:
    """Looks up the vectors of tokens in an embedding table.

    Args:
      table_VD: [V, D] one row per token of the vocabulary.
      tokens_BT: [B, T], or any other shape: integers below V.
      out_sharding: of the result, where XLA divides the work over a mesh; None follows from the arguments.
      impl: `auto`, or the name of an implementation.

    Returns:
      [B, T, D] in the table's type.

    Raises:
      UserError: if the named implementation doesn't exist or can't take these arguments.
    """
    run = choose("lookup", impl, table_VD, tokens_BT, out_sharding)
    return run(table_VD, tokens_BT, out_sharding)


def paged_attention(
    q_BNH: jax.Array,
    k_pages_KPSH: jax.Array,
    v_pages_KPSH: jax.Array,
    page_table_BX: jax.Array,
    lengths_B: jax.Array,
    *,
    mask: Mask = CAUSAL,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    scales_KP2S: jax.Array | None = None,
    impl: str = "auto",
) -> jax.Array:
    """Attention of one new token per sequence over a cache in pages (Kwon et al. 2023). It has no gradient.

    Token t of sequence b is stored at `[:, page_table_BX[b, t // S], t % S]`, the new one last: its keys and values are
    already in the cache. Pages can be in any order, and sequences can share them. Whatever the cache holds beyond a
    sequence's tokens, and before those that the mask lets the new one see, is ignored.

    Args:
      q_BNH: [B, N, H] queries. That of sequence b is at position `lengths_B[b] - 1`.
      k_pages_KPSH: [K, P, S, H] keys in P pages of S tokens, N divisible by K, in the queries' type; with scales, int8
        or float8_e4m3fn.
      v_pages_KPSH: [K, P, S, H] values, in the same type.
      page_table_BX: [B, X] integers below P; entries for pages without a token that is seen may be any number.
      lengths_B: [B] tokens of each sequence in the cache, at most X * S. A length of 0 gives an output of 0.
      mask: which keys a query sees: causal, perhaps with a window or a chunk.
      softcap: c > 0 to bound logits as c tanh(logits / c), or None.
      sinks_N: [N] one logit per query head that joins the softmax and has no value, or None.
      scales_KP2S: [K, P, 2, S] float32, what each token's keys [:, :, 0] and values [:, :, 1] are multiplied by; None:
        nothing.
      impl: `auto`, or the name of an implementation.

    Returns:
      [B, N, H] in the queries' type.

    Raises:
      UserError: if the mask isn't causal, has blocks or isn't one, the soft-cap isn't positive, or the named
        implementation doesn't exist or can't take these arguments; and when differentiated.
    """
    args = q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B
    tokens = page_table_BX.shape[1] * k_pages_KPSH.shape[2]
    check_options("paged_attention", tokens, mask, softcap, causal=True)
    mask = mask.within(tokens)
    options: dict[str, Any] = {} if mask == CAUSAL else {"mask": mask}
    options |= {} if softcap is None else {"softcap": softcap}
    arrays = {} if sinks_N is None else {"sinks_N": sinks_N}
    arrays |= {} if scales_KP2S is None else {"scales_KP2S": scales_KP2S}
    chosen = choose("paged_attention", impl, *args, **options, **arrays)
    run = jax.custom_jvp(lambda args, arrays: chosen(*args, **options, **arrays))

    @run.defjvp
    def _(_primals, _tangents):
        raise UserError("paged_attention has no gradient: to train, call attention")

    return run(args, arrays)


def preferred(op: str) -> str:
    """Returns the implementation that `auto` tries first on the platform the program is compiled for."""
    return next(name for name in ORDER[op, platform()] if (op, name) not in _LEFT_OUT.get())


def choose(op: str, impl: str, *args, **options) -> Callable[..., Any]:
    """Returns the function of `op` that `impl` names, after checking that it can take the arguments."""
    if impl == "auto":
        where = platform()
        for name in ORDER[op, where]:
            if (op, name) in _LEFT_OUT.get():
                continue
            if IMPLEMENTATIONS[op, name].reason(*args, **options) is None:
                _log_once(op, name, where)
                return IMPLEMENTATIONS[op, name].run
        raise ValueError(f"no implementation of {op} on {where} takes these arguments")
    if (op, impl) not in IMPLEMENTATIONS:
        known = ", ".join(name for o, name in IMPLEMENTATIONS if o == op)
        raise UserError(f"unknown implementation {impl!r} of {op}: choose auto, {known}")
    if reason := IMPLEMENTATIONS[op, impl].reason(*args, **options):
        raise UserError(f"{op} cannot run as {impl!r}: {reason}")
    return IMPLEMENTATIONS[op, impl].run


@functools.cache
def _log_once(op: str, name: str, where: str) -> None:
    log.info("%s on %s: %s", op, where, name)
