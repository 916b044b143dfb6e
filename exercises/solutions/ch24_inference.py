import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np


# EXERCISE 24.roofline
def decode_roofline(params, token_bytes, context, texts, flops, bandwidth):
    """The time of one decode step, what bounds it, and when that changes.

    Args:
      params: parameters of the model; each takes 2 bytes and 2 FLOPs a token.
      token_bytes: bytes of the cache for one token of one text.
      context: tokens that each text has in the cache.
      texts: how many texts get a token in the step.
      flops: FLOP/s of the chip.
      bandwidth: bytes/s of its memory.

    Returns:
      (seconds, bound, ridge): the step's time; "compute" or "memory"; and the
      smallest number of texts, an int, for which arithmetic takes at least as
      long as memory, or math.inf if there is none.
    """
    # BEGIN SOLUTION
    compute = 2 * params * texts / flops
    memory = (2 * params + texts * context * token_bytes) / bandwidth
    bound = "compute" if compute >= memory else "memory"
    # What one more text adds to each side.
    gain = 2 * params / flops - context * token_bytes / bandwidth
    ridge = math.ceil(2 * params / bandwidth / gain) if gain > 0 else math.inf
    return max(compute, memory), bound, ridge
    # END SOLUTION


# EXERCISE 24.page_allocator
class Allocator:
    """Gives pages of a few tokens to texts, and lets texts share them."""

    def __init__(self, pages, page_tokens):
        """All pages, 0 to pages - 1, are free; each holds page_tokens."""
        # BEGIN SOLUTION
        self.page_tokens = page_tokens
        self.holders = [0] * pages
        self.free_pages = list(range(pages))
        self.tables, self.lengths = {}, {}
        # END SOLUTION

    def append(self, text):
        """Makes room for one more token of a text; a new text begins empty.

        Args:
          text: its name, any hashable value.

        Returns:
          (page, slot, copy_of): where the token goes. `copy_of` is None, or the
          page whose content must be copied into `page` first.

        Raises:
          MemoryError: if that takes a page and none is free. Nothing changes.
        """
        # BEGIN SOLUTION
        table = self.tables.get(text, [])
        number, slot = divmod(self.lengths.get(text, 0), self.page_tokens)
        copy_of = None
        if slot == 0:
            table = [*table, self._take()]
        elif self.holders[table[number]] > 1:
            copy_of = table[number]
            table = [*table[:number], self._take()]
            self.holders[copy_of] -= 1
        self.tables[text] = table
        self.lengths[text] = number * self.page_tokens + slot + 1
        return table[number], slot, copy_of
        # END SOLUTION

    def fork(self, text, new):
        """Begins `new` with all tokens of `text`, in the same pages."""
        # BEGIN SOLUTION
        self.tables[new] = list(self.tables[text])
        self.lengths[new] = self.lengths[text]
        for page in self.tables[new]:
            self.holders[page] += 1
        # END SOLUTION

    def free(self, text):
        """Ends a text and frees its pages, except those that others share."""
        # BEGIN SOLUTION
        del self.lengths[text]
        for page in self.tables.pop(text):
            self.holders[page] -= 1
            if not self.holders[page]:
                self.free_pages.append(page)
        # END SOLUTION

    def table(self, text):
        """Returns a list of the text's pages, in the order of its tokens."""
        # BEGIN SOLUTION
        return list(self.tables[text])

    def _take(self):
        if not self.free_pages:
            raise MemoryError("no page is free")
        page = self.free_pages.pop()
        self.holders[page] = 1
        return page
        # END SOLUTION


# EXERCISE 24.paged_attention
def attend_pages(q_BNH, k_PSKH, v_PSKH, table_BX, lengths_B):
    """Attention of one new token of each text, whose keys are in pages.

    Args:
      q_BNH: [B, N, H] float32 queries.
      k_PSKH: [P, S, K, H] float32 keys in P pages of S tokens; N is divisible
        by K, and query head n uses key head n // (N // K).
      v_PSKH: values, in the same form.
      table_BX: [B, X] int32 pages of each text, in order.
      lengths_B: [B] int32 tokens of each text, 0 to X * S.

    Returns:
      [B, N, H] float32; zeros for a text without tokens.
    """
    # BEGIN SOLUTION
    (B, N, H), (_, S, K, _) = q_BNH.shape, k_PSKH.shape
    L = table_BX.shape[1] * S
    k_BLKH, v_BLKH = (
        jnp.reshape(pages[table_BX], (B, L, K, H)) for pages in (k_PSKH, v_PSKH)
    )
    seen_BL = jnp.arange(L) < lengths_B[:, None]
    q_BKGH = jnp.reshape(q_BNH, (B, K, N // K, H))
    scores_BKGL = jnp.einsum("BKGH,BLKH->BKGL", q_BKGH, k_BLKH) / math.sqrt(H)
    scores_BKGL = jnp.where(seen_BL[:, None, None], scores_BKGL, -1e30)
    weights_BKGL = jax.nn.softmax(scores_BKGL, axis=-1)
    weights_BKGL = jnp.where(seen_BL[:, None, None], weights_BKGL, 0)
    v_BLKH = jnp.where(seen_BL[:, :, None, None], v_BLKH, 0)
    out_BKGH = jnp.einsum("BKGL,BLKH->BKGH", weights_BKGL, v_BLKH)
    return jnp.reshape(out_BKGH, (B, N, H))
    # END SOLUTION


# EXERCISE 24.prefix_keys
def page_keys(tokens, page_tokens):
    """Keys by which the pages of a prompt are found again.

    Args:
      tokens: sequence of ints, each from 0 to 2**31 - 1.
      page_tokens: tokens of a page, at least 1.

    Returns:
      List of bytes objects of 16 to 32 bytes, one for each full page; the
      prompt's last token is never in one of these pages.
    """
    # BEGIN SOLUTION
    keys, last = [], b""
    for i in range((len(tokens) - 1) // page_tokens):
        page = np.asarray(
            tokens[i * page_tokens : (i + 1) * page_tokens], np.int64
        )
        last = hashlib.sha256(last + page.tobytes()).digest()
        keys.append(last)
    return keys
    # END SOLUTION


# EXERCISE 24.schedule
def plan_step(running, waiting, free_pages, page_tokens, budget, most):
    """Decides what the next step computes.

    Args:
      running: list of dicts, the oldest text first: "name", "length" (tokens it
        has), "computed" (how many of these are in the cache, fewer than
        length), "pages" (how many it holds).
      waiting: list of dicts with "name" and "length", the next one first.
      free_pages: pages that nobody holds.
      page_tokens: tokens of a page.
      budget: tokens that the step computes at most.
      most: texts that may run at once.

    Returns:
      (tokens, preempted, admitted): a dict name -> tokens computed in this
      step, without zeros; the names of texts that lose their pages, in order;
      the names of waiting texts that begin to run, in order.
    """
    # BEGIN SOLUTION
    pages = {text["name"]: text["pages"] for text in running}
    alive, tokens = list(running), {}
    preempted, admitted = [], []

    def needed(name, computed, count):
        return max(
            0, -(-(computed + count) // page_tokens) - pages.get(name, 0)
        )

    for text in running:
        name, computed = text["name"], text["computed"]
        if text["length"] - computed > 1 or not budget:
            continue
        while text in alive and needed(name, computed, 1) > free_pages:
            youngest = alive.pop()
            free_pages += pages.pop(youngest["name"])
            preempted.append(youngest["name"])
        if text in alive:
            free_pages -= needed(name, computed, 1)
            pages[name] += needed(name, computed, 1)
            tokens[name] = 1
            budget -= 1
    for text in alive:
        name, computed = text["name"], text["computed"]
        left = text["length"] - computed
        room = (pages[name] + free_pages) * page_tokens - computed
        count = min(left, budget, room) if left > 1 else 0
        if count > 0:
            free_pages -= needed(name, computed, count)
            tokens[name] = count
            budget -= count
    for text in [] if preempted else waiting:
        name, whole = text["name"], -(-text["length"] // page_tokens)
        if len(alive) == most or not budget or whole > free_pages:
            break
        alive.append(text)
        admitted.append(name)
        free_pages -= whole
        tokens[name] = min(text["length"], budget)
        budget -= tokens[name]
    return tokens, preempted, admitted
    # END SOLUTION


# EXERCISE 24.speculative
def accept(draft, q_kV, p_kV, uniforms):
    """Keeps as many guessed tokens as the large model allows, and adds one.

    Args:
      draft: k guessed tokens; number i was drawn from row i of q_kV.
      q_kV: [k, V] probabilities of the small model, NumPy floats.
      p_kV: [k + 1, V] probabilities of the large model; its last row is for the
        token after all guesses.
      uniforms: k + 1 numbers in [0, 1): one for each guess, and the last for
        the token that is added.

    Returns:
      List of 1 to k + 1 tokens, Python ints.
    """
    # BEGIN SOLUTION
    tokens = []
    for i, token in enumerate(draft):
        if uniforms[i] * q_kV[i, token] >= p_kV[i, token]:
            rest_V = np.maximum(p_kV[i] - q_kV[i], 0)
            break
        tokens.append(int(token))
    else:
        rest_V = p_kV[len(draft)]
    through_V = np.cumsum(rest_V, dtype=np.float64)
    added = np.searchsorted(
        through_V, uniforms[-1] * through_V[-1], side="right"
    )
    return [*tokens, int(added)]
    # END SOLUTION
