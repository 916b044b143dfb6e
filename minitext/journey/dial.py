"""One dial for a whole recipe: from a model's depth follow its sizes, tokens, batch and learning rate.

- embed: 24 x depth.
- heads: of 24 numbers each, so as many as layers; from depth 16 on of 128, as accelerators want them.
- mlp: 8/3 x embed. A gated layer of it has the parameters of a plain one of 4 x embed (Shazeer 2020).
- tokens: tokens_per_parameter x parameters (Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556).
- batch: 2 x sqrt(tokens) tokens a step, rounded to a power of two. Longer runs bear larger batches (McCandlish et al.
  2018, https://arxiv.org/abs/1812.06162).
- learning rate: 0.05 / sqrt(embed), for Muon with AdamW's scale of updates.
- rows: 256 tokens, float32 and 1,024 ids; from depth 16 on 2,048 tokens, bfloat16 and 32,768 ids.

Parameters grow with the cube of the depth, so FLOPs, which grow with parameters times tokens, with its sixth power.
Hoffmann et al. found 20 tokens for each parameter best. The default is 3: it costs two cores less than
half an hour, and Python's library, the text, has little more to offer. Give 20 if you have a pod and enough text.

Chapters: 27.
"""

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from minitext import terminal
from minitext.config.model import ModelConfig
from minitext.errors import UserError
from minitext.models.flops import count_flops, count_params

DEFAULT_DEPTH, LEAST_DEPTH, MOST_DEPTH = 5, 3, 128
TOKENS_PER_PARAMETER = 3.0
LARGE = 16  # depth from which sizes are those of accelerators
STUDY = 4  # smaller models that the scaling study trains at most
QUICK_SHARE = 0.05  # of the tokens, with --quick


@dataclass(frozen=True)
class Recipe:
    """All that follows from the dial.

    Attributes:
      depth: layers of the model.
      vocab: ids of the tokenizer.
      embed: width of the residual stream.
      heads: of attention.
      head_dim: width of each.
      mlp: width of the feed-forward layers.
      dtype: in which products are computed.
      seq_len: tokens of a row.
      rows: in a step.
      steps: of pretraining.
      learning_rate: its peak.
      parameters: of the model, both tables of the vocabulary included.
      flops: of pretraining, forward and backward (`count_flops`).
    """

    depth: int
    vocab: int
    embed: int
    heads: int
    head_dim: int
    mlp: int
    dtype: str
    seq_len: int
    rows: int
    steps: int
    learning_rate: float
    parameters: int
    flops: float

    @property
    def batch(self) -> int:
        """Tokens in a step."""
        return self.rows * self.seq_len

    @property
    def tokens(self) -> int:
        """Tokens of pretraining."""
        return self.steps * self.batch

    def settings(self) -> list[str]:
        """Returns the model and the length of pretraining as `minitext train` takes them."""
        return [
            f"model.vocab={self.vocab}", f"model.layers={self.depth}", f"model.embed={self.embed}",
            f"model.heads={self.heads}", f"model.head_dim={self.head_dim}", f"model.mlp={self.mlp}",
            f"model.dtype={self.dtype}", f"model.scan_layers={str(self.depth >= LARGE).lower()}",
            f"data.seq_len={self.seq_len}", f"train.global_batch={self.rows}", f"train.steps={self.steps}",
            "optim.kind=muon", f"optim.learning_rate={self.learning_rate:.3g}",
            f"optim.warmup_steps={math.ceil(self.steps / 20)}", "optim.schedule=cosine",
        ]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Returns all of it, for json.dumps."""
        return asdict(self) | {"batch": self.batch, "tokens": self.tokens}


def from_json(values: dict[str, Any]) -> Recipe:
    """Returns what `Recipe.to_json` was made of."""
    return Recipe(**{key: value for key, value in values.items() if key not in ("batch", "tokens")})


def recipe(
    depth: int,
    tokens_per_parameter: float = TOKENS_PER_PARAMETER,
    *,
    beside: int | None = None,
) -> Recipe:
    """Returns what follows from a depth.

    Args:
      depth: layers, 1 or more.
      tokens_per_parameter: how long to train.
      beside: depth of the model beside which this one is studied, so that both have the same kind of rows and ids.
    """
    is_large = (beside or depth) >= LARGE
    embed, head_dim = 24 * depth, 128 if is_large else 24
    model = ModelConfig(
        vocab=32_768 if is_large else 1024, layers=depth, embed=embed, mlp=64 * depth,
        heads=math.ceil(embed / head_dim), head_dim=head_dim,
    )  # fmt: skip
    seq_len, parameters = 2048 if is_large else 256, count_params(model)
    tokens = tokens_per_parameter * parameters
    rows = max(1, 2 ** round(math.log2(2 * math.sqrt(tokens))) // seq_len)
    steps = max(10, round(tokens / (rows * seq_len)))
    return Recipe(
        depth, model.vocab, embed, model.heads, head_dim, model.mlp,
        "bfloat16" if is_large else "float32", seq_len, rows, steps,
        float(f"{0.05 / math.sqrt(embed):.3g}"), parameters,
        float(steps * count_flops(model, rows * seq_len, seq_len)),
    )  # fmt: skip


def study_of(depth: int, tokens_per_parameter: float = TOKENS_PER_PARAMETER) -> list[Recipe]:
    """Returns the smaller recipes from which the loss at this depth is predicted: up to four, evenly apart."""
    depths = {max(1, round(depth * part / (STUDY + 1))) for part in range(1, STUDY + 1)} - {depth}
    return [recipe(each, tokens_per_parameter, beside=depth) for each in sorted(depths)]


def pretraining_flops(depth: int, tokens_per_parameter: float = TOKENS_PER_PARAMETER) -> float:
    """Returns the FLOPs of pretraining and of the study before it."""
    recipes = [recipe(depth, tokens_per_parameter), *study_of(depth, tokens_per_parameter)]
    return sum(each.flops for each in recipes)


def depth_for(budget: float, tokens_per_parameter: float = TOKENS_PER_PARAMETER) -> int:
    """Returns the largest depth whose study and pretraining cost no more than a budget in FLOPs.

    Raises:
      UserError: if the smallest costs more.
    """
    if not math.isfinite(budget):
        raise UserError(f"--budget {budget}: choose a finite number of FLOPs, such as 1e15")
    depths = range(LEAST_DEPTH, MOST_DEPTH + 1)
    fit = [depth for depth in depths if pretraining_flops(depth, tokens_per_parameter) <= budget]
    if not fit:
        least = pretraining_flops(LEAST_DEPTH, tokens_per_parameter)
        raise UserError(
            f"--budget {budget:g} FLOPs is too small: depth {LEAST_DEPTH}, the least, takes {least:.2e}"
        )
    return max(fit)


def check(depth: int, tokens_per_parameter: float) -> None:
    """Raises UserError for a dial that can't be set so."""
    if not LEAST_DEPTH <= depth <= MOST_DEPTH:
        raise UserError(f"--depth {depth}: choose {LEAST_DEPTH} to {MOST_DEPTH}")
    if not 0 < tokens_per_parameter <= 1000:
        raise UserError(
            f"--tokens-per-parameter {tokens_per_parameter:g}: choose more than 0 and at most 1000"
        )


def rows_of(recipes: Sequence[Recipe]) -> list[tuple[str, ...]]:
    """Returns a row of text for each recipe: what the dial gave."""
    return [
        (
            str(r.depth), str(r.embed), f"{r.heads} x {r.head_dim}", str(r.mlp), f"{r.parameters:,}",
            f"{r.tokens:,}", f"{r.steps:,} x {r.batch:,}", f"{r.learning_rate:g}", f"{r.flops:.2e}",
        )
        for r in recipes
    ]  # fmt: skip


def print_plan(target: Recipe, smaller: Sequence[Recipe], settings: Sequence[str]) -> None:
    """Prints what follows from the dial, and the pretraining as a command of its own, on stdout."""
    table = terminal.table(HEADS, rows_of([*smaller, target]), right=tuple(range(1, len(HEADS))))
    terminal.print_tables(table)
    words = shlex.join([*settings, *target.settings()])
    print(f"\npretraining alone: minitext train laptop data.tokenizer=bpe {words}")


HEADS = (
    "depth", "embed", "heads", "mlp", "parameters", "tokens", "steps x batch", "learning rate", "FLOPs",
)  # fmt: skip
