"""Caches in pages: texts of different lengths share one pool of memory, and each has a table of the pages it owns.

A program continues B rows by T tokens. `Paging` says where in the pool these tokens go and which pages came before
them. A layer first writes its new tokens into the pages, which costs no copy because nothing has read them yet, and
then attends to all. It is called with one of two shapes:

- T = 1, B rows: one token of each text (decode), through `kernels.paged_attention`;
- B = 1, T tokens: prefill, of whole prompts one after the other as segments of the row, or of a later part of one
  prompt, which reads the earlier pages as one array.

Page 0 belongs to no text. Padding, of rows as of tokens, is written there.

States of linear attention don't grow, so they have slots rather than pages, and slot 0 is the one of padding.

Chapters: 24.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from minitext import hardware, kernels
from minitext.kernels.paged_attention.pages import write_pages


class Paging(NamedTuple):
    """Where B rows of T new tokens go, and what came before them.

    Attributes:
      page: [B, T] page of each token; 0 for padding.
      slot: [B, T] the token's slot in its page.
      table: [B, X] pages of each row's text in order, new tokens included if T = 1. Later entries may be any. In a
        prompt's first part X is 0.
      start: [B] tokens of the text before these; 0 for a row of several prompts.
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


class PagedKVCache(NamedTuple):
    """Keys and values in P pages of S tokens.

    The pages' H may be larger than the heads': `stored_features` says when. The rest is zeros.

    Attributes:
      k: [K, P, S, H] rotated keys of one layer, or a tuple of these for layers in a list.
      v: values, in the same form.
      paging: the tokens that a program adds; in what it returns this has no meaning.
    """

    k: Any
    v: Any
    paging: Any

    def copied(self, pages: Any, _states: Any) -> "PagedKVCache":
        """Returns one layer's cache with some pages, (from, to) arrays of numbers, copied."""
        source, target = pages
        k, v = (x.at[:, target].set(x.at[:, source].get(mode="clip")) for x in self[:-1])
        return PagedKVCache(k, v, self.paging)

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        segment_ids_BT: jax.Array | None,
        **options: Any,
    ) -> tuple[jax.Array, "PagedKVCache"]:
        """Adds one layer's new tokens and attends to them and those before, with the options of `kernels.attention`.

        Segments are of prompts without earlier tokens; other rows are one text.

        Returns:
          [B, T, N, H] in the queries' type, and the cache with the tokens in it.
        """
        paging: Paging = self.paging
        T, H = q_BTNH.shape[1], q_BTNH.shape[-1]
        stored = self.k.shape[-1]

        def write(pages_KPSH, x_BTKH):
            x_XKH = _padded(jnp.reshape(x_BTKH, (-1, *x_BTKH.shape[2:])), stored)
            return write_pages(pages_KPSH, x_XKH, jnp.ravel(paging.page), jnp.ravel(paging.slot))

        new = PagedKVCache(write(self.k, k_BTKH), write(self.v, v_BTKH), T)
        if T == 1:
            q_BNH = q_BTNH[:, 0]
            if stored > H:  # the kernels divide by the root of the pages' size
                scaled = q_BNH.astype(jnp.float32) * math.sqrt(stored / H)
                q_BNH = _padded(scaled.astype(q_BNH.dtype), stored)
            out_BNH = kernels.paged_attention(
                q_BNH, new.k, new.v, paging.table, paging.lengths, **options
            )
            return out_BNH[:, None, :, :H], new
        if not paging.table.shape[1]:
            return kernels.attention(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, **options), new
        k_1KSH, v_1KSH = (self._earlier(x)[..., :H] for x in (new.k, new.v))
        k_BKTH, v_BKTH = (jnp.swapaxes(x, 1, 2) for x in (k_BTKH, v_BTKH))
        earlier = k_1KSH, v_1KSH, paging.start[0]
        return kernels.cached_attention(q_BTNH, k_BKTH, v_BKTH, *earlier, **options), new

    def _earlier(self, pages_KPSH: jax.Array) -> jax.Array:
        """Returns what the only row's pages hold as [1, K, X*S, H], with zeros after its earlier tokens."""
        K, _, _, H = pages_KPSH.shape
        x_KXSH = pages_KPSH.at[:, self.paging.table[0]].get(mode="clip")
        x_KSH = jnp.reshape(x_KXSH, (K, -1, H))
        # Other texts' leftovers may be NaN, and a weight of 0 doesn't make NaN 0.
        seen_S = jnp.arange(x_KSH.shape[1]) < self.paging.start[0]
        return jnp.where(seen_S[:, None], x_KSH, 0)[None]


class PagedLatentCache(NamedTuple):
    """Latents and rotated keys of MLA in P pages of S tokens; used like `PagedKVCache`.

    Attributes:
      latent: [P, S, R] of one layer, or a tuple of these for layers in a list.
      rope_key: [P, S, features], in the same form.
      paging: the tokens that a program adds.
    """

    latent: Any
    rope_key: Any
    paging: Any

    def copied(self, pages: Any, _states: Any) -> "PagedLatentCache":
        """Returns one layer's cache with some pages, (from, to) arrays of numbers, copied."""
        return self._make((*(_copied(x, *pages) for x in self[:-1]), self.paging))

    def write(self, latent_BTR: jax.Array, key_BTP: jax.Array) -> "PagedLatentCache":
        """Returns the cache with the new tokens in it."""

        def write(pages_PSR, x_BTR):
            x_X1R = jnp.reshape(x_BTR, (-1, 1, x_BTR.shape[-1]))
            page_X, slot_X = jnp.ravel(self.paging.page), jnp.ravel(self.paging.slot)
            return write_pages(pages_PSR[None], x_X1R, page_X, slot_X)[0]

        new = write(self.latent, latent_BTR), write(self.rope_key, key_BTP)
        return self._make((*new, self.paging))

    def earlier(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns latents [B, X*S, R] and keys [B, X*S, features] of the earlier tokens, and their number [B]."""

        def read(pages_PSR):
            x_BXSR = pages_PSR.at[self.paging.table].get(mode="clip")
            x_BSR = jnp.reshape(x_BXSR, (len(x_BXSR), -1, x_BXSR.shape[-1]))
            seen_BS = jnp.arange(x_BSR.shape[1]) < self.paging.start[:, None]
            return jnp.where(seen_BS[..., None], x_BSR, 0)

        return read(self.latent), read(self.rope_key), self.paging.start


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
