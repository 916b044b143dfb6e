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
    # YOUR CODE HERE
    raise NotImplementedError("24.roofline")


# EXERCISE 24.page_allocator
class Allocator:
    """Gives pages of a few tokens to texts, and lets texts share them."""

    def __init__(self, pages, page_tokens):
        """All pages, 0 to pages - 1, are free; each holds page_tokens."""
        # YOUR CODE HERE
        raise NotImplementedError("24.page_allocator")

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
        # YOUR CODE HERE
        raise NotImplementedError("24.page_allocator")

    def fork(self, text, new):
        """Begins `new` with all tokens of `text`, in the same pages."""
        # YOUR CODE HERE
        raise NotImplementedError("24.page_allocator")

    def free(self, text):
        """Ends a text and frees its pages, except those that others share."""
        # YOUR CODE HERE
        raise NotImplementedError("24.page_allocator")

    def table(self, text):
        """Returns a list of the text's pages, in the order of its tokens."""
        # YOUR CODE HERE
        raise NotImplementedError("24.page_allocator")


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
    # YOUR CODE HERE
    raise NotImplementedError("24.paged_attention")


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
    # YOUR CODE HERE
    raise NotImplementedError("24.prefix_keys")


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
    # YOUR CODE HERE
    raise NotImplementedError("24.schedule")


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
    # YOUR CODE HERE
    raise NotImplementedError("24.speculative")
