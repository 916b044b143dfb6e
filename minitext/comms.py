"""What the devices tell each other in one train step, by a short formula.

`predict` adds up what each parallelism sends; every term is one line with a name. `minitext.comms_report` puts the
program beside it: where they agree, nothing is sent that was not meant to be. The formulas are those of Austin et al.
2025 ("How to Scale Your Model", parts 3 and 5), and a ring's costs those of Thakur et al. 2005.

Arrays are counted, not instructions: compilers combine several collectives into one. Scalars (loss, numbers of
tokens, norms) and integers (tokens, positions, segment ids) are left out: they are small, and where a compiler merges
them or moves them out of loops follows no rule worth stating.

Chapters: 11, 12.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jax.sharding import Mesh

from minitext.config import Config
from minitext.hlo import Collective
from minitext.sharding import RULES

LANES = 128  # numbers in a row of a TPU's vector register


class Term(NamedTuple):
    """One line of the formula.

    Attributes:
      name: what is sent.
      kind: such as `all-gather`.
      group: devices of a group.
      arrays: bytes of each array on one device, the whole side as in `hlo.Collective`.
      runs: how often they are sent in one step.
    """

    name: str
    kind: str
    group: int
    arrays: tuple[int, ...]
    runs: int

    @property
    def count(self) -> int:
        """Arrays sent in one step."""
        return self.runs * len(self.arrays)

    @property
    def bytes(self) -> int:
        """Bytes of the whole side in one step."""
        return self.runs * sum(self.arrays)

    @property
    def moved(self) -> float:
        """Bytes that each device sends in one step (`hlo.Collective.moved`)."""
        return (
            self.runs * Collective(self.kind, "", self.group, sum(self.arrays), 1, None, ()).moved
        )


@dataclass(frozen=True)
class Split:
    """Sizes of a step on one device, and over how many devices each thing is split.

    Attributes:
      cfg: the configuration.
      tpu: whether the TPU compiler makes the program, or XLA's CPU backend.
      fsdp: devices that each store a part of a weight and gather it for use.
      optimizer: devices that each hold a part of the optimizer's state of whole weights (ZeRO-1, ZeRO-2).
      batch: devices that have other rows.
      context: devices that have other tokens of the same rows.
      tensor: devices that have other heads and features.
      sequence: devices that have other tokens of the residual stream alone, 1 or `tensor`.
    """

    cfg: Config
    tpu: bool
    fsdp: int
    optimizer: int
    batch: int
    context: int
    tensor: int
    sequence: int

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one device."""
        cfg = self.cfg
        rows = cfg.train.global_batch // cfg.train.microbatches // self.batch
        return rows * cfg.data.seq_len // self.context

    @property
    def replicas(self) -> int:
        """Devices whose gradients of a weight are of different tokens."""
        return self.batch * self.context

    @property
    def wide(self) -> int:
        """Bytes of a number in the compute type; XLA's CPU backend computes and sends bfloat16 as float32."""
        return 2 if self.tpu and self.cfg.model.dtype == "bfloat16" else 4

    @property
    def narrow(self) -> int:
        """Bytes of a number that only products read: a TPU multiplies in bfloat16, and converts before it sends."""
        return 2 if self.tpu else self.wide

    @property
    def again(self) -> bool:
        """Whether the backward pass computes layers again; no policy keeps what a projection sent."""
        return self.cfg.model.remat != "none"

    @property
    def stream(self) -> int:
        """Numbers of the residual stream of a microbatch on the devices of one `sequence` group."""
        return self.tokens * self.cfg.model.embed

    @property
    def layer(self) -> tuple[int, ...]:
        """Numbers of each of a layer's weights that one `fsdp` group holds: q, k, v, o, gate, up, down."""
        m = self.cfg.model
        widths = m.heads * m.H, m.K * m.H, m.K * m.H, m.heads * m.H, m.mlp, m.mlp, m.mlp
        return tuple(m.embed * width // self.tensor for width in widths)

    @property
    def table(self) -> int:
        """Numbers of the embedding table, and of the output layer, that one `fsdp` group holds."""
        return self.cfg.model.embed * self.cfg.model.vocab // self.tensor

    @property
    def scatter(self) -> str:
        """The kind that a sum takes of which each device keeps a part: only the TPU compiler makes one of the two."""
        return "reduce-scatter" if self.tpu else "all-reduce"


def split(cfg: Config, mesh: Mesh, backend: str) -> Split:
    """Returns what the rules of a configuration make of a mesh, for the compiler of `backend`: `cpu` or `tpu`."""
    rules = RULES[cfg.sharding.rules]

    def ways(name: str, places=rules.table) -> int:
        return math.prod(mesh.shape[axis] for axis in places[name])

    return Split(
        cfg, backend == "tpu", ways("embed"), ways("embed", rules.optimizer) if rules.optimizer else 1,
        ways("batch"), ways("seq"), ways("heads"), ways("residual") // ways("seq"),
    )  # fmt: skip


def predict(cfg: Config, mesh: Mesh, backend: str) -> list[Term]:
    """Predicts what one train step sends, term by term.

    Two compilers make different programs of it. The TPU's turns a sum of which each device keeps a part into a
    reduce-scatter, adds what is to be summed over the same devices before it sums it, sends bfloat16 where only
    products read, and gathers a vector of which
    devices hold less than whole rows by an all-reduce. XLA's CPU backend leaves the all-reduce,
    sums each product of its own, one mesh dimension after the other, and sends the compute type.

    On a TPU this holds for shards of whole tiles (16 rows of a weight, 128 numbers of its columns): smaller ones
    it moves in other ways. With FSDP and several microbatches it is not known which sums it leaves as all-reduces.

    Args:
      cfg: the configuration; `model.scan_layers` true, AdamW, no pipeline and no experts.
      mesh: the mesh.
      backend: `cpu` or `tpu`.

    Returns:
      The terms that are not empty.
    """
    s = split(cfg, mesh, backend)
    terms = [*_fsdp(s), *_gradients(s), *_zero(s), *_tensor(s), *_loss(s), *_context(s)]
    return [t for t in terms if t.group > 1 and t.count]


def _scaled(numbers: tuple[int, ...], size: int) -> tuple[int, ...]:
    return tuple(number * size for number in numbers)


def _runs(s: Split) -> tuple[int, int]:
    """How often a layer, and what is outside of the layers, runs in a step."""
    M = s.cfg.train.microbatches
    return M * s.cfg.model.layers, M


def _fsdp(s: Split) -> Iterator[Term]:
    """Weights are gathered for the forward pass and again for the backward pass (Rajbhandari et al. 2020)."""
    layers, _ = _runs(s)
    model = s.cfg.model
    weights = _scaled(s.layer, s.narrow)
    scale = 4 * model.embed
    vector = "all-reduce" if s.tpu and model.embed // s.fsdp % LANES else "all-gather"
    yield Term("all-gather of the weights, forward", "all-gather", s.fsdp, weights, layers)
    yield Term("all-gather of the weights, backward", "all-gather", s.fsdp, weights, layers)
    yield Term("RMSNorm scales, forward", vector, s.fsdp, (scale, scale), layers)
    if s.again:
        yield Term("RMSNorm scales, recomputed", vector, s.fsdp, (scale, scale), layers)
    # A lookup is no product: the table is sent in the compute type.
    yield Term("embedding table", "all-gather", s.fsdp, (s.table * s.wide,), 1)
    if not model.tie_embeddings:
        yield Term("output layer", "all-gather", s.fsdp, (s.table * s.narrow,), 1)
        if (
            not s.tpu and model.dtype == "bfloat16"
        ):  # the two conversions hide that both are the same
            yield Term("output layer, backward", "all-gather", s.fsdp, (s.table * s.narrow,), 1)
    yield Term("last RMSNorm's scale", vector, s.fsdp, (scale,), 1)


def _gradients(s: Split) -> Iterator[Term]:
    """Gradients are summed over all devices that saw other tokens, and what is stored in parts is kept in parts."""
    layers, once = _runs(s)
    scale, table = 4 * s.cfg.model.embed, s.table * s.wide
    if (
        s.tpu and once > 1 and s.fsdp == 1
    ):  # what is added up over microbatches is sent once, as the float32 sum
        once, table = 1, s.table * 4
    rest = s.replicas // s.fsdp
    products = {"weights": (_scaled(s.layer, s.wide), layers)}
    if not s.cfg.model.tie_embeddings:
        products["output layer"] = ((table,), once)
    for name, (arrays, runs) in products.items():
        kind = s.scatter if s.fsdp > 1 or (s.optimizer > 1 and runs == once) else "all-reduce"
        yield Term(f"gradient of the {name}, over fsdp", kind, s.fsdp, arrays, runs)
        parts = tuple(size // s.fsdp for size in arrays)
        where = ", its part, over the rest" if s.fsdp > 1 else ""
        yield Term(
            f"gradient of the {name}{where}",
            kind if s.fsdp == 1 else "all-reduce",
            rest,
            parts,
            runs,
        )
    # Of a lookup and of a scale, whose sums are not of a product, the sum is over all at once.
    alone = s.scatter if rest == 1 or s.optimizer > 1 else "all-reduce"
    # A tied table has two; a TPU adds them first if they are float32 as the table is, not if they are converted after.
    tied, converted = s.cfg.model.tie_embeddings, s.cfg.model.dtype == "bfloat16"
    uses = 2 if tied and (converted or not s.tpu) else 1
    for group in _groups(s, 1):
        yield Term("gradient of the embedding table", alone, group, (table,) * uses, once)
    for group in _groups(s, s.sequence):
        yield Term("gradient of RMSNorm scales", "all-reduce", group, (scale, scale), layers)
        yield Term("gradient of the last RMSNorm's scale", "all-reduce", group, (scale,), once)


def _groups(s: Split, sequence: int) -> tuple[int, ...]:
    """Groups of a sum over all tokens: XLA's CPU backend sums over rows and then over places."""
    groups = s.batch, s.context * sequence
    return (math.prod(groups),) if s.tpu else groups


def _zero(s: Split) -> Iterator[Term]:
    """With ZeRO-1 and ZeRO-2 the updated parameters are gathered, in float32, all layers of one kind at once."""
    model = s.cfg.model
    L, scale = model.layers, 4 * model.embed
    vector = "all-reduce" if s.tpu and model.embed // s.optimizer % LANES else "all-gather"
    tables = (4 * s.table,) * (1 if model.tie_embeddings else 2)
    arrays = *_scaled(s.layer, 4 * L), L * scale, L * scale, *tables
    yield Term("all-gather of the new parameters", "all-gather", s.optimizer, arrays, 1)
    yield Term("the last RMSNorm's new scale", vector, s.optimizer, (scale,), 1)


def _tensor(s: Split) -> Iterator[Term]:
    """Products whose features are split (Shoeybi et al. 2019), and whose tokens are between them (Korthikanti et al.).

    A row-parallel product (output, down) gives each device a part of a sum; so do, backward, column-parallel ones
    (q, k, v; gate, up; output layer). Split tokens are gathered before a column-parallel product, and their gradients
    before a row-parallel one.
    """
    layers, once = _runs(s)
    kind = s.scatter if s.sequence > 1 else "all-reduce"
    one, sent = s.stream * s.wide, s.stream * s.narrow
    yield Term("embedding lookup, over vocab", kind, s.tensor, (one,), once)
    yield Term("row-parallel sums, forward", kind, s.tensor, (one,) * 2, layers)
    if s.again:
        yield Term("row-parallel sum, recomputed", kind, s.tensor, (one,), layers)
    backward = 2 if s.tpu else 5
    yield Term("column-parallel sums, backward", kind, s.tensor, (one,) * backward, layers)
    yield Term("output layer's sum, backward", kind, s.tensor, (one,), once)
    yield Term(
        "tokens for q, k, v and gate, up, forward", "all-gather", s.sequence, (sent,) * 2, layers
    )
    yield Term(
        "tokens for q, k, v and gate, up, backward", "all-gather", s.sequence, (sent,) * 2, layers
    )
    yield Term(
        "tokens' gradients for output and down", "all-gather", s.sequence, (sent,) * 2, layers
    )
    yield Term("tokens for the output layer", "all-gather", s.sequence, (sent,), once)
    yield Term("tokens' gradients for the embedding", "all-gather", s.sequence, (one,), once)


def _loss(s: Split) -> Iterator[Term]:
    """The maximum and sum of a logsumexp over a split vocabulary, and the target's logit, in float32."""
    _, once = _runs(s)
    yield Term(
        "loss: logsumexp and target over vocab", "all-reduce", s.tensor, (4 * s.tokens,) * 3, once
    )


def _context(s: Split) -> Iterator[Term]:
    """Attention over a split sequence: all keys and values at once, or from device to device (Liu et al. 2023)."""
    layers, once = _runs(s)
    model, c = s.cfg.model, s.context
    pair = (s.tokens * model.K * model.H // s.tensor,) * 2
    sent = _scaled(pair, s.narrow)
    if model.attention.context == "allgather":
        whole = _scaled(sent, c)
        yield Term("keys and values, forward", "all-gather", c, whole, layers)
        if s.again:
            yield Term("keys and values, recomputed", "all-gather", c, whole, layers)
        yield Term(
            "gradients of keys and values", "reduce-scatter", c, _scaled(pair, s.wide * c), layers
        )
        return
    kind, turns = "collective-permute", layers * (c - 1)
    yield Term("ring: keys and values, forward", kind, c, sent, turns)
    if s.again:  # what the first turn brings serves both
        yield Term("ring: keys and values, recomputed", kind, c, sent, layers * (c - 2))
    yield Term("ring: keys and values, backward", kind, c, sent, turns)
    yield Term("ring: gradients of keys and values", kind, c, _scaled(pair, 4), turns)
    halves = (s.stream * s.wide // 2,) * 2
    yield Term("ring: back to the order of the text", kind, c, halves, once)
    yield Term("ring: back to the order of the text, backward", kind, c, halves, once)
