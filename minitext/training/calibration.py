"""What the projections of a model see in a text: the second moments of their inputs, for `minitext.models.gptq`.

Chapters: 25.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from minitext import files, terminal
from minitext.config.config import Config
from minitext.data.batches import make_batches
from minitext.data.tokenizer import Tokenizer
from minitext.errors import UserError
from minitext.inference.cpu_decode import unstack_layers
from minitext.models.layers import Linear
from minitext.models.transformer import Period, Transformer, places

OWN, VALIDATION = "data", "validation"  # in place of a file: the run's own text
ROWS, BATCH = 32, 4  # rows of data.seq_len tokens that are read, and at a time
LIMIT = 64 << 20  # bytes of a text file


class Observed(nnx.Module):
    """A projection that also adds up the products of its inputs' features, [D, D], over all tokens it sees."""

    def __init__(self, linear: Linear):
        self.linear = linear
        width = linear.w.get_value().shape[0]
        self.moments = nnx.Variable(jnp.zeros((width, width), jnp.float32))

    def __call__(self, x: jax.Array, out: str = "act") -> jax.Array:
        """Projects x [..., D] as the projection does."""
        x_XD = jnp.reshape(x, (-1, x.shape[-1])).astype(jnp.float32)
        self.moments.set_value(self.moments.get_value() + jnp.einsum("XD,XE->DE", x_XD, x_XD))
        return self.linear(x, out)


def read_rows(source: str, cfg: Config, tokenizer: Tokenizer) -> np.ndarray:
    """Returns tokens to calibrate with, [at most `ROWS`, data.seq_len or all tokens that there are], without padding.

    Args:
      source: a text file, `OWN` or `VALIDATION`.
      cfg: the run's.
      tokenizer: the run's.

    Raises:
      UserError: if the text can't be read or has too few tokens for a row.
    """
    if source in (OWN, VALIDATION):
        split = "train" if source == OWN else "validation"
        vocab = cfg.model.vocab
        batches = make_batches(
            cfg.data, vocab=vocab, global_batch=ROWS, split=split, tokenizer=tokenizer
        )
        batch = next(iter(batches))
        # The last batch of little text is padded, and so is most of a row of conversations.
        tokens = batch["tokens"][batch["segment_ids"] != 0]
        if len(tokens) < 2:
            raise UserError(f"the run's {split} text has {len(tokens)} tokens: name a text file")
        length = min(len(tokens), cfg.data.seq_len)
        count = len(tokens) // length
        return np.reshape(tokens[: count * length], (count, length))
    return text_rows(source, tokenizer, cfg.data.seq_len, ROWS)


def text_rows(source: str, tokenizer: Tokenizer, length: int, most: int) -> np.ndarray:
    """Returns the first tokens of a text file in rows [at most `most`, length].

    Raises:
      UserError: if the text can't be read or has too few tokens for a row.
    """
    text = files.read_text(Path(files.local_path(source)), LIMIT)
    ids = np.asarray(tokenizer.encode(text), np.int32)
    count = min(most, len(ids) // length)
    if not count:
        raise UserError(
            f"{files.shorten(source)} has {len(ids)} tokens, and a row has {length}: name a longer text"
        )
    return np.reshape(ids[: count * length], (count, length))


def input_moments(cfg: Config, params: Any, rows_BT: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the second moments of the inputs of each projection in the layers, [L, D, D] by the weight's name.

    Args:
      cfg: the run's, with float32 weights.
      params: its parameters.
      rows_BT: tokens.
    """
    model = nnx.merge(
        nnx.graphdef(nnx.eval_shape(lambda: Transformer(cfg.model, rngs=nnx.Rngs(0)))), params
    )
    model, seen = unstack_layers(model), {}
    for name, layers in _stacks(model):
        for layer in layers:
            for path, module in list(nnx.iter_modules(layer)):
                for part, child in list(vars(module).items()):
                    if isinstance(child, Linear):
                        observed = Observed(child)
                        setattr(module, part, observed)
                        weight = ".".join([name, *map(str, path), part, "w"])
                        seen.setdefault(weight, []).append(observed)
    run = nnx.jit(lambda model, tokens_BT: model.hidden(tokens_BT)[0])
    with terminal.of_slow_work(len(rows_BT), "calibrating") as advance:
        for start in range(0, len(rows_BT), BATCH):
            rows = rows_BT[start : start + BATCH]
            run(model, jnp.asarray(rows)).block_until_ready()
            advance(start + len(rows))
    return {
        name: np.stack([observed.moments.get_value() for observed in each])
        for name, each in seen.items()
    }


def _stacks(model: Transformer) -> Iterator[tuple[str, Any]]:
    """Yields the name in a checkpoint and the list of layers of each stack of an unstacked model."""
    for name in model.cfg.stacks:
        blocks = getattr(model, name)
        for place, layers in enumerate(places(blocks)):
            yield (f"{name}.layers.{place}" if isinstance(blocks, Period) else name), layers
