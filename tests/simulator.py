"""Runs Pallas kernels for TPUs on the CPU, in JAX's simulator at its strictest."""

from typing import Any
from unittest import mock

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu


def simulate(f, *args, seed: int = 0, cores: int = 1) -> Any:
    """Returns f(*args), jitted, with every kernel in it simulated.

    Memory holds NaN until it is written, a read out of bounds is an error, copies run as late as they may, grid
    dimensions that are said to be parallel run in the seed's order, and with two cores side by side on both.

    Raises:
      AssertionError: if two accesses race.
    """
    states = []

    # Each kernel starts its own detector, and only the last one stays in reach.
    class Detector(interpreter.RaceDetectionState):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            states.append(self)

    params = pltpu.InterpretParams(detect_races=True, random_seed=seed, num_cores_or_threads=cores)
    try:
        with (
            mock.patch.object(interpreter, "RaceDetectionState", Detector),
            pltpu.force_tpu_interpret_mode(params),
        ):
            result = jax.block_until_ready(jax.jit(f)(*args))
    finally:
        interpreter.reset_tpu_interpret_mode_state()
    assert states, "no kernel ran"
    assert not any(state.races_found for state in states)
    return result
