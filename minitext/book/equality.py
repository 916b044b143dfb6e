"""Whether a mesh computes what one device computes, over a few train steps on packed rows.

The same numbers cannot be asked for: devices add up parts in another order, and float32 sums round. So differences are
measured in the largest magnitude of the array that they are in.

Chapters: 13.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from minitext.checkpoint import leaves, stacks
from minitext.config.config import Config
from minitext.distributed import devices
from minitext.training.step import Batch, abstract_batch, make_init, make_step_fn


class Steps(NamedTuple):
    """What a few train steps gave.

    Attributes:
      losses: one for each step.
      grads: name of a parameter -> its gradient in each step, [steps, ...].
      params: name -> parameter after the last step.
    """

    losses: np.ndarray
    grads: dict[str, np.ndarray]
    params: dict[str, np.ndarray]


def packed_batch(cfg: Config, mesh: Mesh, seed: int) -> Batch:
    """Returns rows of random tokens, each of two documents, with different numbers of targets."""
    rng = np.random.default_rng(seed)
    B, T, V = cfg.train.global_batch, cfg.data.seq_len, cfg.model.vocab
    cut = rng.integers(1, T, size=(B, 1))
    place = np.arange(T)[None].repeat(B, 0)
    arrays = {
        "tokens": rng.integers(0, V, (B, T)),
        "targets": rng.integers(0, V, (B, T)),
        "segment_ids": 1 + (place >= cut),
        "positions": np.where(place >= cut, place - cut, place),
        "loss_mask": rng.random((B, T)) < rng.random((B, 1)),
    }
    wanted = abstract_batch(cfg, mesh)
    return {
        k: jax.device_put(v.astype(wanted[k].dtype), wanted[k].sharding) for k, v in arrays.items()
    }


def run_steps(cfg: Config, mesh: Mesh, steps: int = 3) -> Steps:
    """Trains from the configuration's seed on `packed_batch`es, and keeps every gradient."""
    batches = [packed_batch(cfg, mesh, seed) for seed in range(steps)]
    losses, grads = [], []
    with jax.set_mesh(mesh):
        quick = devices.quick_compile(jax.default_backend())
        state = make_init(cfg, mesh).lower().compile(quick)()
        step = jax.jit(make_step_fn(cfg, mesh)).lower(state, batches[0]).compile(quick)
        for batch in batches:
            state, metrics, found = step(state, batch)
            losses.append(float(metrics["loss"]))
            grads.append(_on_host(found))
    together = {name: np.stack([grad[name] for grad in grads]) for name in grads[0]}
    return Steps(np.array(losses), together, _on_host(state.params))


def differences(got: Steps, want: Steps) -> dict[str, float]:
    """Returns the largest difference of the losses, and of each parameter's gradients and of the parameters.

    Each is divided by the largest magnitude in `want`. Names are `loss`, `gradient of NAME` and `NAME`.
    """
    pairs = {"loss": (got.losses, want.losses)}
    pairs |= {f"gradient of {name}": (got.grads[name], g) for name, g in want.grads.items()}
    pairs |= {name: (got.params[name], p) for name, p in want.params.items()}
    # Biases of a router have a gradient of zero.
    return {n: float(np.abs(a - b).max() / (np.abs(b).max() or 1.0)) for n, (a, b) in pairs.items()}


def _on_host(params: Any) -> dict[str, np.ndarray]:
    return leaves.named(stacks.as_one_stack(jax.device_get(params)))
