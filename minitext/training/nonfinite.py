"""A loss or gradient that is no number: training stops, or goes on without that step.

One overflow makes every parameter NaN, and every step after it. `train.on_nan` says what becomes of it:

    stop   one line with the step, the values and where the batch lies; nothing is saved any more, so the newest
           checkpoint is the last good one.
    skip   the step changes neither parameters nor moments. That is decided inside the step, where the values are
           equal on every process. The step counts: the learning rate follows the number of the step.

The trainer reads a step's metrics after it has dispatched the next, so it keeps the last batches at hand. In both cases
the batch is saved: each process writes the rows it holds, as arrays and as text.

Chapters: 21.
"""

import math
from collections.abc import Callable, Mapping
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
IN_A_ROW = (
    10  # skipped steps after which training stops: the parameters, not the batches, are at fault
)
MOST = 100  # batches that are saved


class NonFinite(UserError):
    """Training met a loss, gradient or parameter that is not finite, and stopped."""

    exit_code = 1


def skip(finite: jax.Array, new: Any, old: Any) -> Any:
    """Chooses the state after a step, inside the step.

    Args:
      finite: bool scalar, whether loss and gradient are.
      new: parameters and optimizer's state after the step.
      old: the same before it.

    Returns:
      `new` where `finite`, else `old`; but counts, which are integers, always move on.
    """

    def choose(new, old):
        if not jnp.issubdtype(new.dtype, jnp.inexact):
            return new
        return jax.lax.select(finite, new, old)

    return jax.tree.map(choose, new, old)


class Guard:
    """Looks at what each step gave, and saves the batch of one that is not finite.

    Args:
      directory: the run directory.
      policy: `train.on_nan`.
      tokenizer: makes the batch's text.
      say: prints a line.
    """

    def __init__(
        self, directory: Path, policy: str, tokenizer: Tokenizer, say: Callable[[str], None]
    ):
        self._directory, self._policy, self._tokenizer = directory, policy, tokenizer
        self._say = say
        self._in_a_row = 0

    def check(self, line: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> None:
        """Looks at a step's line of metrics.

        Args:
          line: with `step`, `loss` and `grad_norm`.
          batch: what the step was given, [B, T] arrays.

        Raises:
          NonFinite: under `stop`, or after `IN_A_ROW` skipped steps.
        """
        found = {k: line[k] for k in ("loss", "grad_norm") if not math.isfinite(line[k])}
        if not found:
            self._in_a_row = 0
            return
        step = line["step"]
        self._in_a_row += 1
        told = f"step {step}: {' and '.join(f'{k} is {v}' for k, v in found.items())}"
        place = self._save(step, line, batch)
        told += f"; its batch is {f'in {place}' if place else 'not saved: there are many already'}"
        if self._policy == "skip" and self._in_a_row < IN_A_ROW:
            self._say(f"{told}; the step is skipped")
            return
        if self._policy == "skip":
            told += f"; that makes {IN_A_ROW} skipped steps in a row"
        mend = "lower optim.learning_rate" + (
            "" if self._policy == "skip" else " or set train.on_nan=skip"
        )
        raise NonFinite(f"{told}; the checkpoints before it are intact: {mend}")

    def check_parameters(self, step: int, params: Any) -> None:
        """Looks at the parameters that are about to be saved: an update can overflow though the loss did not.

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
            # A sum of squares would overflow where no parameter does.
            return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(params)]).all()

        return jax.jit(all_finite)

    def _save(
        self, step: int, line: Mapping[str, Any], batch: Mapping[str, jax.Array]
    ) -> Path | None:
        """Writes the rows of the batch that this process holds; returns where, or None."""
        folder = self._directory / FOLDER
        part = f".{jax.process_index()}" if jax.process_count() > 1 else ""
        path = folder / f"{step}{part}.npz"
        if len(list(folder.glob(f"*{part}.npz"))) >= MOST:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        numbers, arrays = rows(batch)
        about = {"step": step, "loss": line["loss"], "grad_norm": line["grad_norm"]}
        np.savez(path, row=numbers, **arrays, **about)
        texts = [self._tokenizer.decode(row.tolist()) for row in arrays["tokens"]]
        pairs = zip(numbers.tolist(), texts, strict=True)
        files.write(
            path.with_suffix(".txt"), "".join(f"--- row {n}\n{text}\n" for n, text in pairs)
        )
        return path


def rows(batch: Mapping[str, jax.Array]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the rows of a batch that lie on this process's devices.

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
