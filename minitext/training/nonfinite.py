"""A loss or gradient that isn't finite: training stops, or continues without that step.

One overflow makes every parameter NaN, and with it every later step. `train.on_nan` decides what happens:

    stop   one line gives the step, the values and the batch's file. Nothing is saved any more, so the newest
           checkpoint is the last good one.
    skip   the step changes neither the parameters nor the optimizer's state. The step itself decides, from values that
           are equal on every process. It still counts: the learning rate follows the step's number.

The loop reads a step's metrics after dispatching the next one, so it keeps the last batches. In both cases the batch is
saved: each process writes the rows it holds, as arrays and as text.

Chapters: 21.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minitext import files
from minitext.data.tokenizer import Tokenizer
from minitext.errors import UserError

FOLDER = "nonfinite"
IN_A_ROW = 10  # skipped steps after which training stops: then the parameters are at fault, not the batches
MOST = 100  # saved batches


class NonFinite(UserError):
    """Training met a loss, gradient or parameter that is not finite, and stopped."""

    exit_code = 1


def skip(finite: jax.Array, new: Any, old: Any) -> Any:
    """Chooses the state after a step, inside the step.

    Args:
      finite: bool scalar, whether the loss and the gradient are.
      new: parameters and optimizer state after the step.
      old: the same before the step.

    Returns:
      `new` if `finite`, else `old`; integers, which are counts, always come from `new`.
    """

    def choose(new, old):
        if not jnp.issubdtype(new.dtype, jnp.inexact):
            return new
        return jax.lax.select(finite, new, old)

    return jax.tree.map(choose, new, old)


@dataclass
class Guard:
    """Checks the results of each step, and saves the batch of a step that isn't finite.

    Attributes:
      directory: the run directory.
      policy: `train.on_nan`.
      tokenizer: decodes the batch.
      say: prints a line.
    """

    directory: Path
    policy: str
    tokenizer: Tokenizer
    say: Callable[[str], None]
    _in_a_row: int = 0

    def check(self, line: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> None:
        """Checks a step's line of metrics.

        Args:
          line: with `step`, `loss` and `grad_norm`.
          batch: the step's batch, [B, T] arrays.

        Raises:
          NonFinite: under `stop`, or after `IN_A_ROW` skipped steps.
        """
        found = {k: line[k] for k in ("loss", "grad_norm") if not math.isfinite(line[k])}
        if not found:
            self._in_a_row = 0
            return
        step = line["step"]
        self._in_a_row += 1
        text = f"step {step}: {' and '.join(f'{k} is {v}' for k, v in found.items())}"
        path, skips = self._save(step, line, batch), self.policy == "skip"
        text += f"; its batch is {f'in {path}' if path else 'not saved: there are many already'}"
        if skips and self._in_a_row < IN_A_ROW:
            self.say(f"{text}; the step is skipped")
            return
        if skips:
            text += f"; that makes {IN_A_ROW} skipped steps in a row"
        fix = "lower optim.learning_rate" + ("" if skips else " or set train.on_nan=skip")
        raise NonFinite(f"{text}; the checkpoints before it are intact: {fix}")

    def check_parameters(self, step: int, params: Any) -> None:
        """Checks the parameters before they are saved: an update can overflow even if the loss did not.

        Raises:
          NonFinite: if one of them is not finite.
        """
        if not self._all_finite(params):
            raise NonFinite(
                f"step {step}: its update made parameters that are not finite, and they are not "
                "saved; the checkpoints before it are intact: lower optim.learning_rate"
            )

    @cached_property
    def _all_finite(self) -> Callable[[Any], jax.Array]:
        def all_finite(params: Any) -> jax.Array:
            # A sum of squares could overflow although no parameter does.
            return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(params)]).all()

        return jax.jit(all_finite)

    def _save(
        self, step: int, line: Mapping[str, Any], batch: Mapping[str, jax.Array]
    ) -> Path | None:
        """Writes the rows of the batch that this process holds; returns where, or None."""
        folder = self.directory / FOLDER
        part = f".{jax.process_index()}" if jax.process_count() > 1 else ""
        path = folder / f"{step}{part}.npz"
        if len(list(folder.glob(f"*{part}.npz"))) >= MOST:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        numbers, arrays = rows(batch)
        about = {"step": step, "loss": line["loss"], "grad_norm": line["grad_norm"]}
        np.savez(path, row=numbers, **arrays, **about)
        texts = [self.tokenizer.decode(row.tolist()) for row in arrays["tokens"]]
        pairs = zip(numbers.tolist(), texts, strict=True)
        files.write(
            path.with_suffix(".txt"), "".join(f"--- row {n}\n{text}\n" for n, text in pairs)
        )
        return path


def rows(batch: Mapping[str, jax.Array]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the rows of a batch that are on this process's devices.

    Args:
      batch: [B, T] arrays, sharded over rows only and alike.

    Returns:
      The rows' numbers in the batch, rising, and by name the arrays [rows, T].
    """
    arrays = {}
    for name, array in batch.items():
        found = {
            shard.index[0].indices(array.shape[0])[0]: np.asarray(shard.data)
            for shard in array.addressable_shards
        }
        numbers = [i for start in sorted(found) for i in range(start, start + len(found[start]))]
        arrays[name] = np.concatenate([found[start] for start in sorted(found)])
    return np.array(numbers), arrays
