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

    # BEGIN SOLUTION
    @partial(jax.shard_map, in_specs=(P("stage"), P()), out_specs=P())
    def on_each_stage(w_lDD, x_MBD):
        stage, S = jax.lax.axis_index("stage"), jax.lax.axis_size("stage")
        M = x_MBD.shape[0]
        onwards = [(s, (s + 1) % S) for s in range(S)]

        def stack(x_BD):
            return jax.lax.scan(
                lambda x_BD, w_DD: (layer(w_DD, x_BD), None), x_BD, w_lDD
            )[0]

        def tick(arrived_BD, t):
            x_BD = jnp.where(
                stage == 0, x_MBD[jnp.minimum(t, M - 1)], arrived_BD
            )
            working = (t >= stage) & (t < stage + M)
            y_BD = jax.lax.cond(working, stack, lambda x_BD: x_BD, x_BD)
            return jax.lax.ppermute(y_BD, "stage", onwards), y_BD

        nothing = jax.lax.pcast(jnp.zeros_like(x_MBD[0]), "stage", to="varying")
        _, y_tBD = jax.lax.scan(tick, nothing, jnp.arange(M + S - 1))
        # Microbatch m leaves the last stage in tick m + S - 1.
        return jax.lax.psum(
            jnp.where(stage == S - 1, y_tBD[S - 1 :], 0.0), "stage"
        )

    return on_each_stage(w_LDD, x_MBD)
    # END SOLUTION


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
    # BEGIN SOLUTION
    if M % S:
        raise ValueError(f"{M} microbatches are not a multiple of {S} stages")
    number = tick - stage
    if not 0 <= number < R * M:
        return None
    # Stage 0 works in laps of S ticks; the same S microbatches go round in R
    # consecutive laps.
    lap, offset = divmod(number, S)
    return lap // R * S + offset, lap % R
    # END SOLUTION


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
    # BEGIN SOLUTION
    groups, step = (R, S) if schedule == "circular" else (1, 1)
    # (S-1) / (R*M + S-1) <= wanted, solved for M; in fractions, so equality is
    # exact.
    wanted = Fraction(wanted)
    least = math.ceil((S - 1) * (1 - wanted) / (wanted * groups))
    M = max(1, -(-least // step)) * step
    if schedule == "1f1b":
        backward = forward + backward  # the layers are computed again
    slots = groups * M + S - 1
    seconds = slots * ((forward + backward) / groups + 2 * send)
    return M, seconds, 1 - M * (forward + backward) / seconds
    # END SOLUTION


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
    # BEGIN SOLUTION
    n = len(costs)
    before = [0]
    for cost in costs:
        before.append(before[-1] + cost)
    # best[i]: (slowest stage, cuts) of the first i pieces, in as many stages as
    # were added so far
    best = {i: (before[i], [0, i]) for i in range(1, n + 1)}
    for stages in range(2, S + 1):
        best = {
            i: min(
                (max(best[cut][0], before[i] - before[cut]), [*best[cut][1], i])
                for cut in range(stages - 1, i)
            )
            for i in range(stages, n + 1)
        }
    return best[n][1]
    # END SOLUTION
