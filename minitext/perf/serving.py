"""How fast a model can be served on chips: tokens per second, and what bounds them.

A step reads the weights that its tokens meet and the keys and values of all texts. It takes as long as its arithmetic
or its memory traffic, whichever is longer, and then the sums over the chips that share every layer, for which the next
product waits (Pope et al. 2022, "Efficiently Scaling Transformer Inference"; Austin et al. 2025, "How to Scale Your
Model", part 7). Rates come from the data sheet and nothing is fitted, so a real engine reaches less.

Chapters: 24.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from minitext.compiler.targets import Target, parse_target
from minitext.config.model import GQAConfig, ModelConfig, MoEConfig
from minitext.errors import UserError
from minitext.hardware import LINK_SECONDS
from minitext.models.flops import all_layers, count_attention, count_params
from minitext.models.transformer import VARIANTS
from minitext.terminal import print_tables, show_bytes, table


@dataclass(frozen=True)
class Phase:
    """Seconds that one step needs of each kind, on one device.

    Attributes:
      compute: of its products at the matmul peak.
      memory: of the weights, keys and values that it reads.
      communication: of the sums over devices.
    """

    compute: float
    memory: float
    communication: float

    @property
    def seconds(self) -> float:
        """The step's time: arithmetic overlaps with memory, and sums with neither."""
        return max(self.compute, self.memory) + self.communication

    @property
    def bound(self) -> str:
        """The largest of the three."""
        return max(asdict(self), key=asdict(self).__getitem__)


@dataclass(frozen=True)
class Serving:
    """What serving takes on a target whose devices share every text.

    Attributes:
      target: the chips.
      devices: JAX devices.
      rows: texts that a step continues.
      context: tokens that each of them has.
      weight_bytes: on one device.
      cache_bytes: of these texts' keys and values, on one device.
      texts: of this context that fit beside the weights.
      decode: a step that gives every text a token.
      prefill: all parts of one prompt of `context` tokens.
    """

    target: str
    devices: int
    rows: int
    context: int
    weight_bytes: float
    cache_bytes: float
    texts: int
    decode: Phase
    prefill: Phase

    @property
    def fits(self) -> bool:
        """Whether the texts fit."""
        return self.rows <= self.texts

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second and device."""
        return self.rows / self.decode.seconds / self.devices

    @property
    def first_token(self) -> float:
        """Seconds from a prompt, alone, to its first token."""
        return self.prefill.seconds + self.decode.seconds

    def to_json(self) -> dict[str, Any]:
        """Returns the prediction as JSON values."""
        phases = {
            name: asdict(phase) | {"seconds": phase.seconds, "bound": phase.bound}
            for name, phase in (("decode", self.decode), ("prefill", self.prefill))
        }
        derived = ("fits", "tokens_per_second", "first_token")
        return asdict(self) | phases | {name: getattr(self, name) for name in derived}


def predict_serving(
    cfg: ModelConfig, target: str, rows: int, context: int, chunk: int = 256
) -> Serving:
    """Predicts one decode step of `rows` texts with `context` tokens each, and the prefill of such a text.

    Args:
      cfg: the model, with attention by keys and values; its heads are split over all devices.
      target: such as `v5e:2x4`.
      rows: texts.
      context: tokens of a text.
      chunk: tokens of a prompt that a step computes.

    Raises:
      UserError: for a bad target, or a model whose cache isn't keys and values.
    """
    goal = parse_target(target)
    n, chip = goal.devices, goal.chip
    if any(not isinstance(layer.attention, GQAConfig) for _, layer in all_layers(cfg)):
        raise UserError(
            "predict-serving counts keys and values: choose a model with model.attention.kind=gqa"
        )
    size = 2 if cfg.dtype == "bfloat16" else 4
    peak, bandwidth = chip.peak(cfg.dtype) / chip.devices, chip.hbm_bandwidth / chip.devices

    def phase(tokens: int, keys: int, texts: int, steps: int, *, logits: bool) -> Phase:
        """Of `steps` steps of so many tokens, each of which sees `keys`; that many texts' keys are read."""
        head = cfg.vocab * cfg.embed * logits
        flops, read = 2.0 * tokens * head, float(size * head)
        for repeats, layer in all_layers(cfg):
            counts, seen = count_attention(layer), _seen(layer, keys)
            active = counts.weights + VARIANTS[type(layer.ffn)].count(layer, active=True)
            flops += repeats * tokens * (2 * active + counts.per_key * seen)
            read += (
                repeats * size * (_touched(layer, tokens) + texts * seen * (counts.k + counts.v))
            )
        sums = 2 * cfg.layers * _sum_seconds(goal, tokens * cfg.embed * size)
        return Phase(steps * flops / n / peak, steps * read / n / bandwidth, steps * sums)

    parts = math.ceil(context / chunk)
    a_text = size * sum(
        repeats * context * (count_attention(layer).k + count_attention(layer).v)
        for repeats, layer in all_layers(cfg)
    )
    weights = count_params(cfg) * size
    return Serving(
        target=str(goal),
        devices=n,
        rows=rows,
        context=context,
        weight_bytes=weights / n,
        cache_bytes=rows * a_text / n,
        texts=max(0, int((chip.usable_bytes - weights / n) // (a_text / n))),
        decode=phase(rows, context, rows, 1, logits=True),
        # On average a prompt's token sees half of it.
        prefill=phase(math.ceil(context / parts), context // 2, 1, parts, logits=False),
    )


def _seen(layer: ModelConfig, keys: int) -> int:
    """Returns how many of so many keys a token's layer sees at most."""
    assert isinstance(layer.attention, GQAConfig)
    limits = (layer.attention.window, layer.attention.chunk)
    return min([keys, *(limit for limit in limits if limit is not None)])


def _touched(layer: ModelConfig, tokens: int) -> float:
    """Returns how many of a layer's weights so many tokens meet, if a router chooses its experts evenly."""
    count = VARIANTS[type(layer.ffn)].count
    attention, active = count_attention(layer).weights, count(layer, active=True)
    if not isinstance(layer.ffn, MoEConfig):
        return attention + active
    E, k = layer.ffn.experts, layer.ffn.experts_per_token
    whole = count(layer, active=False)
    expert = (whole - active) / (E - k) if k < E else 0.0
    return attention + whole - expert * E * (1 - k / E) ** tokens


def _sum_seconds(target: Target, size: int) -> float:
    """Returns the time of an all-reduce of an array over a target's devices.

    TPUs send in both directions of a ring, where a hop takes a microsecond; a GPU sends over all its links.
    """
    n, chip = target.devices, target.chip
    if n == 1:
        return 0.0
    moved = size * (n - 1) / n
    if chip.platform == "gpu":
        return 2 * moved / (chip.links * chip.link_bandwidth)
    return 2 * max(n // 2 * LINK_SECONDS, moved / (2 * chip.link_rate))


def print_serving(found: Serving) -> None:
    """Prints a prediction on stdout."""
    rows = [
        (
            name, f"{p.compute * 1e3:,.3f}", f"{p.memory * 1e3:,.3f}", f"{p.communication * 1e3:,.3f}",
            f"{p.seconds * 1e3:,.3f}", p.bound,
        )
        for name, p in (("decode step", found.decode), ("prefill", found.prefill))
    ]  # fmt: skip
    verdict = "fits" if found.fits else "does not fit"
    print_tables(
        f"{found.rows} texts of {found.context:,} tokens on {found.target}: {verdict}; a device holds "
        f"{show_bytes(int(found.weight_bytes))} of weights and {show_bytes(int(found.cache_bytes))} of their keys and "
        f"values, and has room for {found.texts:,} such texts",
        table(
            ("what", "compute ms", "memory ms", "sums ms", "together ms", "bound by"),
            rows,
            right=(1, 2, 3, 4),
        ),
        f"at most {found.tokens_per_second:,.0f} tokens/s a device; the first token of a prompt after "
        f"{found.first_token * 1e3:,.1f} ms",
    )
