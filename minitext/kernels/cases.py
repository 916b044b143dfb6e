"""Kernels at the shapes of real models: what `minitext llo` reads and `minitext tune` sweeps.

A case is a function from block lengths, all with defaults, to a `Case`. To add one, write it and its row in `CASES`;
an operation that has block shapes also gets a row in `SWEEPS`.
Shapes are those of one device of llama3-8b and mixtral-8x7b (D=4096, F=14336, N=32, K=8, H=128, E=8) in bfloat16.
`jax_*` are JAX's own kernels for TPUs, for comparison.

Chapters: 16, 17, 19.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from minitext.errors import UserError, did_you_mean
from minitext.kernels.attention import tpu as flash_attention_tpu
from minitext.kernels.attention.tpu_grid import BlockShape
from minitext.kernels.grouped_matmul import tpu as grouped_matmul_tpu
from minitext.kernels.linear_cross_entropy import tpu as linear_cross_entropy_tpu
from minitext.kernels.matmul import tpu as matmul_tpu
from minitext.kernels.paged_attention import tpu as paged_attention_tpu
from minitext.kernels.rms_norm import tpu as rms_norm_tpu

D, F, N, K, H, E, T, V = 4096, 14336, 32, 8, 128, 8, 4096, 128_256


class Case(NamedTuple):
    """One kernel at one shape.

    Attributes:
      fn: the function that calls the kernel.
      args: its arguments; ShapeDtypeStructs for what may hold any values, NumPy arrays for what may not.
      steps: steps of the grid that do work, of each kernel; None for all of them.
      hbm_bytes: bytes that all steps together copy between HBM and VMEM; 0 where nobody counted.
    """

    fn: Callable
    args: tuple
    steps: int | None = None
    hbm_bytes: int = 0


def make(name: str, **blocks: int) -> Case:
    """Returns a case by its name.

    Args:
      name: a key of `CASES`.
      blocks: lengths of its blocks; the others keep the case's own.

    Raises:
      UserError: for a name that is not in the table, or a block that the case does not have.
    """
    if name not in CASES:
        hint = did_you_mean(name, CASES)
        raise UserError(f"unknown kernel {name!r}{hint}: choose among {', '.join(CASES)}")
    known = list(inspect.signature(CASES[name]).parameters)
    for block, length in blocks.items():
        if block not in known or length < 1:
            raise UserError(
                f"{block}={length}: {name} has blocks {', '.join(known)}, of length 1 or more"
            )
    return CASES[name](**blocks)


def _bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _matmul(m: int = 512, k: int = 512, n: int = 512) -> Case:
    M, C, N = T, D, F
    fn = functools.partial(matmul_tpu.matmul, tiles=(m, k, n))
    rows, columns = _tiles(M, m), _tiles(N, n)
    # The left factor is read once for each tile of columns, the right once for each of rows.
    hbm_bytes = 2 * (columns * M * C + rows * C * N + M * N)
    return Case(fn, (_bf16(M, C), _bf16(C, N)), hbm_bytes=hbm_bytes)


def _flash_attention(q: int = 512, kv: int = 512) -> Case:
    fn = functools.partial(flash_attention_tpu.flash_attention, blocks=BlockShape(q, kv))
    heads = _bf16(1, T, K, H)
    return Case(fn, (_bf16(1, T, N, H), heads, heads), _causal_steps(q, kv))


def _flash_attention_backward(q: int = 512, kv: int = 512) -> Case:
    forward = _flash_attention(q, kv)
    return Case(_gradient(forward.fn, 3), (*forward.args, _bf16(1, T, N, H)), forward.steps)


def _grouped_matmul(m: int = 512, k: int = 512, n: int = 512) -> Case:
    tiles = grouped_matmul_tpu.Tiles(m, k, n)
    fn = functools.partial(grouped_matmul_tpu.grouped_matmul, tiles=tiles)
    steps = _group_steps(m) * _tiles(D, k) * _tiles(F, n)
    # As of a plain product, and each group's matrix is read for each of its tiles of rows.
    hbm_bytes = 2 * (_tiles(F, n) * T * D + _group_steps(m) * D * F + T * F)
    return Case(fn, (_bf16(T, D), _bf16(E, D, F), GROUPS), steps, hbm_bytes)


def _grouped_matmul_backward(m: int = 512, k: int = 512, n: int = 512) -> Case:
    forward = _grouped_matmul(m, k, n)

    def backward(lhs_MK, rhs_GKN, sizes_G, grad_MN):
        return jax.vjp(lambda *x: forward.fn(*x, sizes_G), lhs_MK, rhs_GKN)[1](grad_MN)

    return Case(backward, (*forward.args, _bf16(T, F)), forward.steps)


def _rms_norm(rows: int = 128) -> Case:
    fn = functools.partial(rms_norm_tpu.rms_norm, blocks=rms_norm_tpu.Blocks(rows))
    return Case(fn, (_bf16(T, D), jax.ShapeDtypeStruct((D,), jnp.float32)))


def _rms_norm_backward(rows: int = 128) -> Case:
    forward = _rms_norm(rows)
    return Case(_gradient(forward.fn, 2), (*forward.args, _bf16(T, D)))


def _linear_cross_entropy(tokens: int = 512, vocab: int = 1024) -> Case:
    blocks = linear_cross_entropy_tpu.Blocks(tokens=tokens, vocab=vocab)
    fn = functools.partial(linear_cross_entropy_tpu.linear_cross_entropy, blocks=blocks)
    return Case(fn, (_bf16(T, D), _bf16(D, V), jax.ShapeDtypeStruct((T,), jnp.int32)))


def _linear_cross_entropy_backward(kept: int = 128, passing: int = 256) -> Case:
    blocks = linear_cross_entropy_tpu.Blocks(kept=kept, passing=passing)

    def backward(x_XD, w_DV, targets_X):
        def loss(x_XD, w_DV):
            found = linear_cross_entropy_tpu.linear_cross_entropy(x_XD, w_DV, targets_X, blocks)
            return jnp.sum(found[0])

        return jax.grad(loss, (0, 1))(x_XD, w_DV)

    return Case(backward, _linear_cross_entropy().args)


def _paged_attention(tokens: int = 512, heads: int = 4) -> Case:
    """64 sequences of at most 8,192 tokens, in pages of 16."""
    blocks = paged_attention_tpu.Blocks(tokens, heads)
    fn = functools.partial(paged_attention_tpu.paged_attention, blocks=blocks)
    pages = _bf16(K, 64 * 512, 16, H)
    table, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((64, 512), (64,)))
    return Case(fn, (_bf16(64, N, H), pages, pages, table, lengths))


def _splash(block_q: int = 512, block_kv: int = 512) -> Callable:
    sizes = splash.BlockSizes(
        block_q=block_q, block_kv=block_kv, block_kv_compute=block_kv,
        block_q_dkv=block_q, block_kv_dkv=block_kv, block_kv_dkv_compute=block_kv,
        block_q_dq=block_q, block_kv_dq=block_kv,
    )  # fmt: skip
    mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * N)
    return splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)


def _jax_splash_attention(block_q: int = 512, block_kv: int = 512) -> Case:
    # JAX's function builds its tables of blocks with numpy: made while it is traced, they are constants.
    def fn(q_NTH, k_KTH, v_KTH):
        return _splash(block_q, block_kv)(q_NTH, k_KTH, v_KTH)

    return Case(
        fn, (_bf16(N, T, H), _bf16(K, T, H), _bf16(K, T, H)), _causal_steps(block_q, block_kv)
    )


def _jax_splash_attention_backward(block_q: int = 512, block_kv: int = 512) -> Case:
    forward = _jax_splash_attention(block_q, block_kv)
    return Case(_gradient(forward.fn, 3), (*forward.args, _bf16(N, T, H)), forward.steps)


def _gradient(fn: Callable, count: int) -> Callable:
    """A function's vector-Jacobian product for its first arguments; the last is the result's gradient."""

    def backward(*args):
        return jax.vjp(lambda *given: fn(*given, *args[count:-1]), *args[:count])[1](args[-1])

    return backward


def _causal_steps(block_q: int, block_kv: int) -> int:
    """Pairs of blocks, of all heads, in which some query sees some key."""
    return N * sum(
        math.ceil(min(end, T) / block_kv) for end in range(block_q, T + block_q, block_q)
    )


GROUPS = np.full(E, T // E, np.int32)


def _jax_megablox_gmm(m: int = 512, k: int = 512, n: int = 512) -> Case:
    fn = functools.partial(gmm, preferred_element_type=jnp.bfloat16, tiling=(m, k, n))
    return Case(
        fn, (_bf16(T, D), _bf16(E, D, F), GROUPS), _group_steps(m) * _tiles(D, k) * _tiles(F, n)
    )


def _jax_megablox_tgmm(m: int = 512, k: int = 512, n: int = 512) -> Case:
    fn = functools.partial(tgmm, preferred_element_type=jnp.bfloat16, tiling=(m, k, n))
    return Case(
        fn, (_bf16(D, T), _bf16(T, F), GROUPS), _group_steps(m) * _tiles(D, k) * _tiles(F, n)
    )


def _group_steps(m: int) -> int:
    """Tiles of rows that a grouped product visits; one that holds rows of two groups is visited twice."""
    ends = np.cumsum(GROUPS)
    return int(np.sum(np.ceil(ends / m) - np.floor((ends - GROUPS) / m)))


def _tiles(size: int, tile: int) -> int:
    return math.ceil(size / tile)


CASES: dict[str, Callable[..., Case]] = {
    "matmul": _matmul,
    "flash_attention": _flash_attention,
    "flash_attention_backward": _flash_attention_backward,
    "grouped_matmul": _grouped_matmul,
    "grouped_matmul_backward": _grouped_matmul_backward,
    "rms_norm": _rms_norm,
    "rms_norm_backward": _rms_norm_backward,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_cross_entropy_backward": _linear_cross_entropy_backward,
    "paged_attention": _paged_attention,
    "jax_splash_attention": _jax_splash_attention,
    "jax_splash_attention_backward": _jax_splash_attention_backward,
    "jax_megablox_gmm": _jax_megablox_gmm,
    "jax_megablox_tgmm": _jax_megablox_tgmm,
}

# Lengths of blocks that `minitext tune` tries, all with all.
SWEEPS: dict[str, dict[str, tuple[int, ...]]] = {
    "matmul": {"m": (512, 1024), "k": (512, 1024, 2048), "n": (512, 1024)},
    "flash_attention": {"q": (512, 1024), "kv": (512, 1024)},
    "grouped_matmul": {"m": (512, 1024), "k": (512, 1024), "n": (512, 1024)},
}
