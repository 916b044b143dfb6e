"""Caches in pages: texts of different lengths share one pool of memory, and each has a table of the pages it owns.

A program continues B rows by T tokens. `Paging` says where in the pool these tokens go and which pages came before
them. A layer first writes its new tokens into the pages, which costs no copy because nothing has read them yet, and
then attends to all. It is called with one of two shapes:

- T = 1, B rows: one token of each text (decode), through `kernels.paged_attention`;
- B = 1, T tokens: prefill, of prompts one after the other as segments of the row, or of a part of one. What comes
  before them is read from pages as one array: earlier parts, or a beginning that all these prompts share.

Page 0 belongs to no text. Padding, of rows as of tokens, is written there.

Pages hold numbers of the compute type, or of 8 bits with a float32 scale for each token and head. A token's scale is
that of its largest number, so it is written once and never changes, whichever tokens come later. Where pages are
narrow, a program also attends to its own new tokens as the pages hold them. A token so gets the same keys and values
whether its text was computed at once, in parts, or with another's pages.

States of linear attention don't grow, so they have slots rather than pages, and slot 0 is the one of padding.

Chapters: 24, 25.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from minitext import hardware, kernels
from minitext.kernels.paged_attention.pages import write_pages, write_scales
from minitext.models.quantization import FORMATS, Quantized, quantize

# What pages may hold, besides the compute type (`auto`), and the name in `FORMATS`.
CACHE_DTYPES = {"int8": "int8", "fp8": "e4m3"}


class Paging(NamedTuple):
    """Where B rows of T new tokens go, and what came before them.

    Attributes:
      page: [B, T] page of each token; 0 for padding.
      slot: [B, T] the token's slot in its page.
      table: [B, X] pages of each row's text in order, new tokens included if T = 1. Later entries may be any. In a
        prompt's first part X is 0. A row of several prompts has the pages that all of them begin with.
      start: [B] tokens of the text before these; several prompts of a row have as many.
      state: [B] slot of the text's recurrent state; 0 for padding.
    """

    page: jax.Array
    slot: jax.Array
    table: jax.Array
    start: jax.Array
    state: jax.Array

    @property
    def lengths(self) -> jax.Array:
        """Tokens [B] of each text with its new one, for T = 1; 0 for padding."""
        return jnp.where(self.page[:, 0] > 0, self.start + 1, 0)


def page_dtype(cache_dtype: str, compute_dtype: Any) -> Any:
    """Returns the type of the numbers in pages: that of one of `CACHE_DTYPES`, or with `auto` the compute type."""
    return FORMATS[CACHE_DTYPES[cache_dtype]].dtype if cache_dtype != "auto" else compute_dtype


def page_tokens(cache_dtype: str) -> int:
    """Returns how many tokens a page has unless someone chooses: few on a CPU, where texts are short.

    On a TPU, scales fill whole rows of a tile only in pages of 128. Such a page of 8 bits has about as many bytes as 64
    tokens of 16.
    """
    if hardware.platform() == "cpu":
        return 32
    return 64 if cache_dtype == "auto" else 128


LANES = 128  # elements in a row of a TPU's tile


def stored_features(features: int) -> int:
    """Returns how many features a head has in pages: on a TPU whole rows of a tile.

    Otherwise the compiler would store another dimension along the rows, and copy all pages at every step into the order
    that the kernel reads. The padding costs memory only where a head is narrower than a row.
    """
    return -(-features // LANES) * LANES if hardware.platform() == "tpu" else features


def _padded(x: jax.Array, features: int) -> jax.Array:
    """Returns an array with zeros after its last dimension's elements, up to so many."""
    missing = features - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _narrowed(both: tuple[jax.Array, jax.Array], dtype: Any) -> tuple[Any, jax.Array, Any]:
    """Returns two arrays [..., H] in 8 bits, their scales [..., 2], and what these stand for in the arrays' types."""
    kind = next(kind for kind in CACHE_DTYPES.values() if FORMATS[kind].dtype == dtype)
    # Without the barrier, compilers may leave out a conversion to 8 bits and back.
    narrow = jax.lax.optimization_barrier([quantize(x, kind, (-1,)) for x in both])
    held = [x.dequantized().astype(given.dtype) for x, given in zip(narrow, both, strict=True)]
    return [x.values for x in narrow], jnp.concatenate([x.scale for x in narrow], axis=-1), held


class PagedKVCache(NamedTuple):
    """Keys and values in P pages of S tokens.

    The pages' H may be larger than the heads': `stored_features` says when. The rest is zeros.

    Attributes:
      k: [K, P, S, H] rotated keys of one layer, or a tuple of these for layers in a list.
      v: values, in the same form.
      scales: [K, P, 2, S] float32 of 8-bit keys and values, in the same form; None: these are of the compute type.
      paging: the tokens that a program adds; in what it returns this has no meaning.
    """

    k: Any
    v: Any
    scales: Any
    paging: Any

    def copied(self, pages: Any, _states: Any) -> "PagedKVCache":
        """Returns one layer's cache with some pages, (from, to) arrays of numbers, copied."""
        source, target = pages

        def copied(x):
            return x.at[:, target].set(x.at[:, source].get(mode="clip"))

        return self._make((*jax.tree.map(copied, self[:-1]), self.paging))

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        segment_ids_BT: jax.Array | None,
        **options: Any,
    ) -> tuple[jax.Array, "PagedKVCache"]:
        """Adds one layer's new tokens and attends to them and those before, with the options of `kernels.attention`.

        Segments are of prompts that all follow the row's earlier tokens, if there are any.

        Returns:
          [B, T, N, H] in the queries' type, and the cache with the tokens in it.
        """
        paging: Paging = self.paging
        T, H = q_BTNH.shape[1], q_BTNH.shape[-1]
        stored, page_X, slot_X = self.k.shape[-1], jnp.ravel(paging.page), jnp.ravel(paging.slot)

        def write(pages_KPSH, x_BTKH):
            x_XKH = _padded(jnp.reshape(x_BTKH, (-1, *x_BTKH.shape[2:])), stored)
            return write_pages(pages_KPSH, x_XKH, page_X, slot_X)

        values, scales = (k_BTKH, v_BTKH), None
        if self.scales is not None:
            values, scales_BTK2, (k_BTKH, v_BTKH) = _narrowed(values, self.k.dtype)
            scales_XK2 = jnp.reshape(scales_BTK2, (-1, *scales_BTK2.shape[2:]))
            scales = write_scales(self.scales, scales_XK2, page_X, slot_X)
        new = PagedKVCache(write(self.k, values[0]), write(self.v, values[1]), scales, T)
        if T == 1:
            q_BNH = q_BTNH[:, 0]
            if stored > H:  # the kernels divide by the root of the pages' size
                scaled = q_BNH.astype(jnp.float32) * math.sqrt(stored / H)
                q_BNH = _padded(scaled.astype(q_BNH.dtype), stored)
            out_BNH = kernels.paged_attention(
                q_BNH, new.k, new.v, paging.table, paging.lengths, scales_KP2S=scales, **options
            )
            return out_BNH[:, None, :, :H], new
        if not paging.table.shape[1]:
            return kernels.attention(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, **options), new
        k_1KSH, v_1KSH = (new._earlier(i, paging, q_BTNH.dtype)[..., :H] for i in (0, 1))
        k_BKTH, v_BKTH = (jnp.swapaxes(x, 1, 2) for x in (k_BTKH, v_BTKH))
        earlier = k_1KSH, v_1KSH, paging.start[0]
        options["segment_ids_BT"] = segment_ids_BT
        return kernels.cached_attention(q_BTNH, k_BKTH, v_BKTH, *earlier, **options), new

    def _earlier(self, which: int, paging: Paging, dtype: Any) -> jax.Array:
        """Returns the only row's keys (0) or values (1) as [1, K, X*S, H], with zeros after its earlier tokens."""
        pages_KPSH = self[which]
        K, _, _, H = pages_KPSH.shape
        x_KXSH = pages_KPSH.at[:, paging.table[0]].get(mode="clip")
        if self.scales is not None:
            scale_KXS = self.scales.at[:, paging.table[0]].get(mode="clip")[:, :, which]
            x_KXSH = Quantized(x_KXSH, scale_KXS[..., None]).dequantized().astype(dtype)
        x_KSH = jnp.reshape(x_KXSH, (K, -1, H))
        # Other texts' leftovers may be NaN, and a weight of 0 doesn't make NaN 0.
        seen_S = jnp.arange(x_KSH.shape[1]) < paging.start[0]
        return jnp.where(seen_S[:, None], x_KSH, 0)[None]


class PagedLatentCache(NamedTuple):
    """Latents and rotated keys of MLA in P pages of S tokens; used like `PagedKVCache`.

    Attributes:
      latent: [P, S, R] of one layer, or a tuple of these for layers in a list.
      rope_key: [P, S, features], in the same form.
      scales: [P, 2, S] float32 of 8-bit latents and keys, in the same form; None: these are of the compute type.
      paging: the tokens that a program adds.
    """

    latent: Any
    rope_key: Any
    scales: Any
    paging: Any

    def copied(self, pages: Any, _states: Any) -> "PagedLatentCache":
        """Returns one layer's cache with some pages, (from, to) arrays of numbers, copied."""
        copied = jax.tree.map(lambda x: _copied(x, *pages), self[:-1])
        return self._make((*copied, self.paging))

    def write(
        self, latent_BTR: jax.Array, key_BTP: jax.Array
    ) -> tuple["PagedLatentCache", jax.Array, jax.Array]:
        """Returns the cache with the new tokens in it, and their latents and keys as it holds them."""
        page_X, slot_X = jnp.ravel(self.paging.page), jnp.ravel(self.paging.slot)

        def write(pages_PSR, x_BTR):
            x_X1R = jnp.reshape(x_BTR, (-1, 1, x_BTR.shape[-1]))
            return write_pages(pages_PSR[None], x_X1R, page_X, slot_X)[0]

        values, scales = (latent_BTR, key_BTP), None
        if self.scales is not None:
            values, scales_BT2, (latent_BTR, key_BTP) = _narrowed(values, self.latent.dtype)
            scales_X12 = jnp.reshape(scales_BT2, (-1, 1, 2))
            scales = write_scales(self.scales[None], scales_X12, page_X, slot_X)[0]
        new = write(self.latent, values[0]), write(self.rope_key, values[1])
        return self._make((*new, scales, self.paging)), latent_BTR, key_BTP

    def earlier(self, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns latents [B, X*S, R] and keys [B, X*S, features] of the earlier tokens, and their number [B]."""
        table = self.paging.table

        def read(which, pages_PSR):
            x_BXSR = pages_PSR.at[table].get(mode="clip")
            if self.scales is not None:
                scale_BXS = self.scales.at[table].get(mode="clip")[:, :, which]
                x_BXSR = Quantized(x_BXSR, scale_BXS[..., None]).dequantized().astype(dtype)
            x_BSR = jnp.reshape(x_BXSR, (len(x_BXSR), -1, x_BXSR.shape[-1]))
            seen_BS = jnp.arange(x_BSR.shape[1]) < self.paging.start[:, None]
            return jnp.where(seen_BS[..., None], x_BSR, 0)

        return read(0, self.latent), read(1, self.rope_key), self.paging.start


class SlotStateCache(NamedTuple):
    """States of linear attention in slots, one for each text; a row of `StateCache` is what a slot holds.

    Attributes:
      q: [slots, J-1, K*H] of one layer, or a tuple of these for layers in a list.
      k: [slots, J-1, K*H], in the same form.
      v: [slots, J-1, K*R*W], in the same form.
      state: [slots, K, R, H, W] float32, in the same form.
      paging: the tokens that a program adds.
    """

    q: Any
    k: Any
    v: Any
    state: Any
    paging: Any

    def copied(self, _pages: Any, states: Any) -> "SlotStateCache":
        """Returns one layer's states with some slots, (from, to) arrays of numbers, copied."""
        return self._make((*(_copied(x, *states) for x in self[:-1]), self.paging))

    def read(self) -> list[jax.Array]:
        """Returns the rows' parts [B, ...]; zeros for a text that begins."""

        def rows(x):
            x_B = x.at[self.paging.state].get(mode="clip")
            begun = jnp.reshape(self.paging.start > 0, (-1, *[1] * (x.ndim - 1)))
            return jnp.where(begun, x_B, 0)

        return [rows(x) for x in self[:-1]]

    def write(self, rows: Any) -> "SlotStateCache":
        """Returns the cache with the rows' parts in their slots."""
        where = self.paging.state
        new = [x.at[where].set(y.astype(x.dtype)) for x, y in zip(self[:-1], rows, strict=True)]
        return self._make((*new, self.paging))


def _copied(x: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    return x.at[target].set(x.at[source].get(mode="clip"))
