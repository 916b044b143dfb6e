"""Checks that a mesh computes the same as one device, over a few train steps on packed rows.

The results can't be bit-equal: devices add partial sums in a different order, and float32 sums round. Each difference
is therefore measured relative to the largest magnitude in its array.

Chapters: 13.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from minitext.checkpoint import leaves, stacks
from minitext.config.config import Config
from minitext.distributed import devices
from minitext.training.step import (
    Batch,
    TrainState,
    abstract_batch,
    abstract_state,
    make_init,
    make_step_fn,
)


class Steps(NamedTuple):
    """The results of a few train steps.

    Attributes:
      losses: one per step.
      grads: parameter's name -> its gradient in each step, [steps, ...].
      params: parameter's name -> its value after the last step.
      start: the state before the first step, on the host.
    """

    losses: np.ndarray
    grads: dict[str, np.ndarray]
    params: dict[str, np.ndarray]
    start: TrainState


def packed_batch(cfg: Config, mesh: Mesh, seed: int) -> Batch:
    """Returns rows of random tokens, each with two documents and a different number of targets."""
    rng = np.random.default_rng(seed)
    B, T, V = cfg.train.global_batch, cfg.data.seq_len, cfg.model.vocab
    cut = rng.integers(1, T, size=(B, 1))
    position = np.arange(T)[None].repeat(B, 0)
    arrays = {
        "tokens": rng.integers(0, V, (B, T)),
        "targets": rng.integers(0, V, (B, T)),
        "segment_ids": 1 + (position >= cut),
        "positions": np.where(position >= cut, position - cut, position),
        "loss_mask": rng.random((B, T)) < rng.random((B, 1)),
    }
    wanted = abstract_batch(cfg, mesh)
    return {
        k: jax.device_put(v.astype(wanted[k].dtype), wanted[k].sharding) for k, v in arrays.items()
    }


def run_steps(cfg: Config, mesh: Mesh, steps: int = 3, start: TrainState | None = None) -> Steps:
    """Trains on `packed_batch`es and keeps every gradient.

    Args:
      cfg: the configuration.
      mesh: the devices.
      steps: how many.
      start: where another layout of the model started; None draws the parameters on this mesh from `train.seed`.
    """
    batches = [packed_batch(cfg, mesh, seed) for seed in range(steps)]
    losses, grads = [], []
    with jax.set_mesh(mesh):
        quick = devices.quick_compile(jax.default_backend())
        if start is None:
            state = make_init(cfg, mesh).lower().compile(quick)()
        else:
            state = _placed(start, abstract_state(cfg, mesh))
        first = jax.device_get(state)
        step = jax.jit(make_step_fn(cfg, mesh)).lower(state, batches[0]).compile(quick)
        for batch in batches:
            state, metrics, found = step(state, batch)
            losses.append(float(metrics["loss"]))
            grads.append(_on_host(found))
    together = {name: np.stack([grad[name] for grad in grads]) for name in grads[0]}
    return Steps(np.array(losses), together, _on_host(state.params), first)


def differences(got: Steps, want: Steps) -> dict[str, float]:
    """Returns the largest difference in `loss`, in each `gradient of NAME`, and in each parameter `NAME`.

    Each is divided by the largest magnitude in `want`.
    """
    pairs = {"loss": (got.losses, want.losses)}
    pairs |= {f"gradient of {name}": (got.grads[name], g) for name, g in want.grads.items()}
    pairs |= {name: (got.params[name], p) for name, p in want.params.items()}
    # The gradient of a router's biases is zero, hence the 1.0.
    return {n: float(np.abs(a - b).max() / (np.abs(b).max() or 1.0)) for n, (a, b) in pairs.items()}


def _placed(start: TrainState, wanted: TrainState) -> TrainState:
    """Returns the state on the devices that are wanted; layers in a circular pipeline's groups keep their order."""
    pairs = zip(jax.tree.leaves(start), jax.tree.leaves(wanted), strict=True)
    placed = [jax.device_put(np.reshape(x, w.shape), w.sharding) for x, w in pairs]
    return jax.tree.unflatten(jax.tree.structure(wanted), placed)


def _on_host(params: Any) -> dict[str, np.ndarray]:
    return leaves.named(stacks.as_one_stack(jax.device_get(params)))
