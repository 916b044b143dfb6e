"""Pages of 8 bits: what a token gets is what they hold, and how far that is from what was written."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minitext.models.paged import CACHE_DTYPES, PagedKVCache, Paging, _narrowed, page_dtype

K, P, S, H, N = 2, 5, 8, 16, 4
# Half a step of each format: of int8 in scales, of e4m3's four binary digits in parts of the number.
ERRORS = {"int8": (0.5, 0.0), "fp8": (2.0**-10, 2.0**-4)}


def random(seed, *shape):
    """Numbers of very different sizes, and a token of zeros."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=shape) * np.exp(draw.normal(size=(*shape[:-1], 1)))
    x[:, 3] = 0
    return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", CACHE_DTYPES)
def test_programs_attend_to_what_pages_hold(kind, dtype):
    """Exactly, also where a compiler would rather not round; and no number is further off than half a step."""
    both = tuple(random(seed, 1, 32, K, H).astype(dtype) for seed in (0, 1))
    values, scales, held = jax.jit(partial(_narrowed, dtype=page_dtype(kind, None)))(both)
    for i, (given, narrow, kept) in enumerate(zip(both, values, held, strict=True)):
        scale = np.asarray(scales[..., i : i + 1])
        stored = jnp.asarray(np.asarray(narrow, np.float32) * scale, dtype)
        np.testing.assert_array_equal(kept, stored)
        step, part = ERRORS[kind]
        exact, off = np.asarray(given, np.float32), np.asarray(narrow, np.float32) * scale
        bound = np.maximum(step * scale, part * np.abs(exact)) * (1 + 1e-5)
        assert np.all(np.abs(off - exact) <= bound)


@pytest.mark.audit
@pytest.mark.parametrize("kind", CACHE_DTYPES)
def test_attention_is_off_by_no_more_than_its_keys_and_values(kind):
    """A prompt in two parts, and then a token, against attention to what was never rounded."""
    T = 20
    q, k, v = (random(seed, 1, T, n, H) for seed, n in ((0, N), (1, K), (2, K)))
    q = q / 10  # so that the bound is a few hundredths of the values
    pages = jnp.zeros((K, P, S, H), page_dtype(kind, None))
    cache = PagedKVCache(pages, pages, jnp.full((K, P, 2, S), jnp.nan), None)
    table, outs = np.asarray([4, 1, 3]), []
    for start, end in ((0, 12), (12, 19), (19, 20)):
        at = np.arange(start, end)
        seen = table if start else table[:0]
        paging = table[at // S], at % S, seen, np.asarray(start), np.asarray(0)
        cache = cache._replace(paging=Paging(*(jnp.asarray(x)[None] for x in paging)))
        attend = jax.jit(lambda cache, *new: cache.attend(*new, None))
        out, cache = attend(cache, *(x[:, start:end] for x in (q, k, v)))
        outs.append(np.asarray(out[0]))
    got = np.concatenate(outs)
    step, part = ERRORS[kind]
    for t, n in np.ndindex(T, N):
        keys, values = (np.asarray(x[0, : t + 1, n // 2], np.float64) for x in (k, v))
        query = np.asarray(q[0, t, n], np.float64)
        weights = np.exp(keys @ query / np.sqrt(H))
        want = weights / weights.sum() @ values
        limit = 127 if kind == "int8" else 448
        off_k, off_v = (
            np.maximum(step * np.abs(x).max(-1, keepdims=True) / limit, part * np.abs(x))
            for x in (keys, values)
        )
        # Logits that are off by at most e each change a weight by a factor between exp(-2e) and exp(2e).
        e = (off_k @ np.abs(query)).max() / np.sqrt(H)
        spread = np.abs(values - want).max(0)
        bound = np.expm1(2 * e) * spread + off_v.max(0) + 1e-5
        assert np.all(np.abs(got[t, n] - want) <= bound)
