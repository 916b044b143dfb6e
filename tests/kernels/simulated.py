"""Runs Pallas kernels for TPUs in the package's strict simulator."""

from typing import Any

import jax

from minitext.kernels.simulator import strict


def simulate(f, *args, seed: int = 0, cores: int = 1) -> Any:
    """Returns f(*args), jitted, with every kernel in it simulated.

    Raises:
      Fault: for what a chip would not tell of, such as a race.
      AssertionError: if no kernel ran.
    """
    with strict(cores=cores, seed=seed) as runs:
        result = jax.block_until_ready(jax.jit(lambda *args: f(*args))(*args))
    assert runs, "no kernel ran"
    return result
