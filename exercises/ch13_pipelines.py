import math
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


# EXERCISE 13.gpipe
def gpipe(layer, w_LDD, x_MBD):
    """Passes M microbatches through L layers, cut into stages along `stage`.

    Args:
      layer: a function of (w [D, D], x [B, D]) that gives [B, D].
      w_LDD: [L, D, D] float32, as P("stage"): each stage holds L/S consecutive
        layers.
      x_MBD: [M, B, D] float32, whole on every device.

    Returns:
      [M, B, D], whole on every device.
    """
    # YOUR CODE HERE
    raise NotImplementedError("13.gpipe")


# EXERCISE 13.circular
def circular_work(tick, stage, S, M, R):
    """What a stage of a circular pipeline does in a tick of the forward pass.

    Args:
      tick: from 0 on.
      stage: from 0 to S-1.
      S: number of stages.
      M: number of microbatches.
      R: groups of layers in each stage.

    Returns:
      (microbatch, group), two ints, or None if the stage has nothing to do.

    Raises:
      ValueError: M is not a multiple of S.
    """
    # YOUR CODE HERE
    raise NotImplementedError("13.circular")


# EXERCISE 13.bubble
def plan(schedule, S, R, wanted, forward, backward, send):
    """The fewest microbatches for a wanted bubble, and what a step costs.

    Args:
      schedule: "gpipe", "1f1b" or "circular".
      S: number of stages, a Python int of at least 1.
      R: groups of layers in each stage; counts in "circular" only.
      wanted: the largest bubble allowed, a `fractions.Fraction` between 0 and
        1, both excluded.
      forward: seconds of one microbatch's forward pass through all layers of
        one stage.
      backward: seconds of the backward pass, without any recomputation.
      send: seconds that a message takes after every slot; no stage computes
        meanwhile.

    Returns:
      (M, seconds, idle): number of microbatches, length of a step, share of it
        without computation.
    """
    # YOUR CODE HERE
    raise NotImplementedError("13.bubble")


# EXERCISE 13.balance
def balance(costs, S):
    """Cuts a model into S stages whose slowest is as fast as possible.

    Args:
      costs: a list of n positive ints: what the embedding, each layer and the
        head cost, in order.
      S: number of stages, at most n.

    Returns:
      A list of S+1 ints, 0 = b[0] < b[1] < ... < b[S] = n: stage s has
      costs[b[s]:b[s+1]].
    """
    # YOUR CODE HERE
    raise NotImplementedError("13.balance")
