"""Kernels at the shapes of real models, for `minitext llo` to read and `minitext tune` to sweep.

A function in `CASES` makes a `Case` from block lengths, all of which have defaults. To add a case, write its function
and its row; an operation with block shapes also gets a row in `SWEEPS`. Shapes are those of one device that trains
llama3-8b or mixtral-8x7b (D=4096, F=14336, N=32, K=8, H=128, E=8) in bfloat16. `jax_*` are JAX's own TPU kernels, for
comparison.

Chapters: 16, 17, 19.
"""

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from minitext.errors import UserError, did_you_mean
from minitext.kernels.attention import tpu as attention
from minitext.kernels.attention.tpu_grid import BlockShape
from minitext.kernels.grouped_matmul import tpu as grouped_matmul
from minitext.kernels.linear_cross_entropy import tpu as linear_cross_entropy
from minitext.kernels.matmul import tpu as matmul
from minitext.kernels.paged_attention import tpu as paged_attention
from minitext.kernels.rms_norm import tpu as rms_norm

D, F, N, K, H, E, T, V = 4096, 14336, 32, 8, 128, 8, 4096, 128_256
GROUPS = np.full(E, T // E, np.int32)


class Case(NamedTuple):
    """One kernel at one shape.

    Attributes:
      fn: the function that calls the kernel.
      args: its arguments: ShapeDtypeStructs where any values will do, NumPy arrays where they matter.
      steps: grid steps that do work, in each kernel; None if all do.
      hbm_bytes: bytes copied between HBM and VMEM in all steps together; 0 if not counted.
    """

    fn: Callable
    args: tuple
    steps: int | None = None
    hbm_bytes: int = 0


def make(name: str, **blocks: int) -> Case:
    """Returns the case of a name in `CASES`, with its default blocks where `blocks` gives no length.

    Raises:
      UserError: if the table has no such case, or the case no such block.
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


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _matmul(m: int = 512, k: int = 512, n: int = 512) -> Case:
    fn = functools.partial(matmul.matmul, tiles=(m, k, n))
    # The left factor is read once for each tile of columns, the right one once for each tile of rows.
    hbm_bytes = 2 * (pl.cdiv(F, n) * T * D + pl.cdiv(T, m) * D * F + T * F)
    return Case(fn, (_bf16(T, D), _bf16(D, F)), hbm_bytes=hbm_bytes)


def _flash_attention(q: int = 512, kv: int = 512) -> Case:
    fn = functools.partial(attention.flash_attention, blocks=BlockShape(q, kv))
    heads = _bf16(1, T, K, H)
    return Case(fn, (_bf16(1, T, N, H), heads, heads), _causal_steps(q, kv))


def _grouped_matmul(m: int = 512, k: int = 512, n: int = 512) -> Case:
    tiles = grouped_matmul.Tiles(m, k, n)
    fn = functools.partial(grouped_matmul.grouped_matmul, tiles=tiles)
    # As in a plain product, except that each group's matrix is read for each of the group's tiles of rows.
    hbm_bytes = 2 * (pl.cdiv(F, n) * T * D + _group_steps(m) * D * F + T * F)
    args = _bf16(T, D), _bf16(E, D, F), GROUPS
    return Case(fn, args, _group_steps(m) * pl.cdiv(D, k) * pl.cdiv(F, n), hbm_bytes)


def _rms_norm(rows: int = 128) -> Case:
    fn = functools.partial(rms_norm.rms_norm, rows=rows)
    return Case(fn, (_bf16(T, D), jax.ShapeDtypeStruct((D,), jnp.float32)))


def _linear_cross_entropy(tokens: int = 512, vocab: int = 1024) -> Case:
    blocks = linear_cross_entropy.Blocks(tokens=tokens, vocab=vocab)
    fn = functools.partial(linear_cross_entropy.linear_cross_entropy, blocks=blocks)
    return Case(fn, (_bf16(T, D), _bf16(D, V), _int32(T)))


def _linear_cross_entropy_backward(kept: int = 128, passing: int = 256) -> Case:
    blocks = linear_cross_entropy.Blocks(kept=kept, passing=passing)

    def loss(x_XD, w_DV, targets_X):
        found = linear_cross_entropy.linear_cross_entropy(x_XD, w_DV, targets_X, blocks)
        return jnp.sum(found[0])

    return Case(jax.grad(loss, (0, 1)), _linear_cross_entropy().args)


def _paged_attention(tokens: int = 512, heads: int = 4) -> Case:
    """64 sequences of at most 8,192 tokens, in pages of 16."""
    blocks = paged_attention.Blocks(tokens, heads)
    fn = functools.partial(paged_attention.paged_attention, blocks=blocks)
    pages = _bf16(K, 64 * 512, 16, H)
    return Case(fn, (_bf16(64, N, H), pages, pages, _int32(64, 512), _int32(64)))


def _jax_splash_attention(block_q: int = 512, block_kv: int = 512) -> Case:
    def fn(q_NTH, k_KTH, v_KTH):
        # JAX builds its tables of blocks with NumPy. They are constants if that happens while tracing.
        sizes = splash.BlockSizes(
            block_q=block_q, block_kv=block_kv, block_kv_compute=block_kv,
            block_q_dkv=block_q, block_kv_dkv=block_kv, block_kv_dkv_compute=block_kv,
            use_fused_bwd_kernel=True,
        )  # fmt: skip
        mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * N)
        make = splash.make_splash_mha
        return make(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)(q_NTH, k_KTH, v_KTH)

    heads = _bf16(K, T, H)
    return Case(fn, (_bf16(N, T, H), heads, heads), _causal_steps(block_q, block_kv))


def _jax_megablox(product, lhs, rhs, m: int = 512, k: int = 512, n: int = 512) -> Case:
    fn = functools.partial(product, preferred_element_type=jnp.bfloat16, tiling=(m, k, n))
    return Case(fn, (lhs, rhs, GROUPS), _group_steps(m) * pl.cdiv(D, k) * pl.cdiv(F, n))


def _backward(
    make_forward: Callable[..., Case], count: int, grad: jax.ShapeDtypeStruct
) -> Callable[..., Case]:
    """Returns the function for the vector-Jacobian product of a case, with the same blocks.

    Args:
      make_forward: the function for the case.
      count: the number of arguments to differentiate, the first ones.
      grad: the gradient of the result, which becomes the last argument.
    """

    @functools.wraps(make_forward)
    def make_backward(**blocks: int) -> Case:
        forward = make_forward(**blocks)

        def fn(*args):
            differentiated = lambda *given: forward.fn(*given, *args[count:-1])  # noqa: E731
            return jax.vjp(differentiated, *args[:count])[1](args[-1])

        return Case(fn, (*forward.args, grad), forward.steps)

    return make_backward


def _causal_steps(block_q: int, block_kv: int) -> int:
    """Returns in how many pairs of blocks, over all heads, some query sees some key."""
    return N * sum(pl.cdiv(min(end, T), block_kv) for end in range(block_q, T + block_q, block_q))


def _group_steps(m: int) -> int:
    """Returns how many tiles of rows a grouped product visits; one with rows of two groups is visited twice."""
    ends = np.cumsum(GROUPS)
    return int(np.sum(np.ceil(ends / m) - np.floor((ends - GROUPS) / m)))


CASES: dict[str, Callable[..., Case]] = {
    "matmul": _matmul,
    "flash_attention": _flash_attention,
    "flash_attention_backward": _backward(_flash_attention, 3, _bf16(1, T, N, H)),
    "grouped_matmul": _grouped_matmul,
    "grouped_matmul_backward": _backward(_grouped_matmul, 2, _bf16(T, F)),
    "rms_norm": _rms_norm,
    "rms_norm_backward": _backward(_rms_norm, 2, _bf16(T, D)),
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_cross_entropy_backward": _linear_cross_entropy_backward,
    "paged_attention": _paged_attention,
    "jax_splash_attention": _jax_splash_attention,
    "jax_splash_attention_backward": _backward(_jax_splash_attention, 3, _bf16(N, T, H)),
    "jax_megablox_gmm": functools.partial(_jax_megablox, gmm, _bf16(T, D), _bf16(E, D, F)),
    "jax_megablox_tgmm": functools.partial(_jax_megablox, tgmm, _bf16(D, T), _bf16(T, F)),
}

# Block lengths that `minitext tune` tries, in all combinations.
SWEEPS: dict[str, dict[str, tuple[int, ...]]] = {
    "matmul": {"m": (512, 1024), "k": (512, 1024, 2048), "n": (512, 1024)},
    "flash_attention": {"q": (512, 1024), "kv": (512, 1024)},
    "grouped_matmul": {"m": (512, 1024), "k": (512, 1024), "n": (1024, 2048)},
}
