"""What the devices tell each other in one train step, by a short formula.

`predict` adds up what each parallelism sends; every term is one line with a name. `minitext.perf.comms_audit` puts the
program beside it: where they agree, nothing is sent that was not meant to be. The formulas are those of Austin et al.
2025 ("How to Scale Your Model", parts 3 and 5), and a ring's costs those of Thakur et al. 2005.

Arrays are counted, not instructions: compilers combine several collectives into one. Scalars (loss, numbers of
tokens, norms) and integers (tokens, positions, segment ids) are left out: they are small, and where a compiler merges
them or moves them out of loops follows no rule worth stating.

Chapters: 11, 12, 13.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh

from minitext.compiler.hlo import Collective
from minitext.config.config import Config
from minitext.config.model import MoEConfig
from minitext.models.flops import count_attention
from minitext.models.moe import capacity
from minitext.sharding.pipeline_schedule import (
    count_microbatches,
    forward_ticks,
    groups_per_stage,
    one_f_one_b_ticks,
    stored_groups,
)
from minitext.sharding.rules import RULES


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


class Runs(NamedTuple):
    """How often a device computes things in one step.

    In a pipeline that is once in every tick: what a stage skips in a tick in which it has nothing to do is a branch of
    the program, and `hlo.Module` counts a branch as often as it could be taken. The network is free in idle ticks, so
    this is also what a step has to wait for.

    Attributes:
      ticks: ticks of a pipeline, in each of which a stage sends one message each way; 0 without one.
      forward: forward passes of a layer; 1F1B computes each twice.
      backward: backward passes of a layer.
      outside: passes of what is outside of the layers.
      chunks: of these, passes of the output layer and the loss.
    """

    ticks: int
    forward: int
    backward: int
    outside: int
    chunks: int


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
      vocab: devices that have other columns of the output layer and rows of the embedding table.
      experts: devices that have other experts, and other tokens.
      stages: devices that have other layers.
      in_parts: whether gradients are kept in parts after each microbatch (ZeRO-2).
    """

    cfg: Config
    tpu: bool
    fsdp: int
    optimizer: int
    batch: int
    context: int
    tensor: int
    sequence: int
    vocab: int
    experts: int
    stages: int
    in_parts: bool

    @property
    def rows(self) -> int:
        """Rows of a microbatch on one device."""
        return self.cfg.train.global_batch // self.cfg.train.microbatches // self.batch

    @property
    def one_f_one_b(self) -> bool:
        """Whether embedding and loss are computed in every tick of a pipeline."""
        return self.stages > 1 and self.cfg.pipeline.schedule == "1f1b"

    @property
    def parts(self) -> int:
        """Microbatches of the pipeline in one of the step."""
        if self.stages == 1:
            return 1
        return count_microbatches(self.cfg.pipeline, self.stages, self.rows)

    @property
    def runs(self) -> Runs:
        """How often a device computes things in one step."""
        cfg, S = self.cfg, self.stages
        N, L, C = cfg.train.microbatches, cfg.model.layers, cfg.train.loss_chunks
        if S == 1:
            return Runs(0, N * L, N * L, N, N * C)
        if self.one_f_one_b:
            ticks = N * one_f_one_b_ticks(S, self.parts)
            return Runs(ticks, 2 * ticks * L // S, ticks * L // S, ticks, ticks * C)
        R = groups_per_stage(cfg.pipeline)
        ticks = N * forward_ticks(S, self.parts, R)
        return Runs(ticks, ticks * L // (R * S), ticks * L // (R * S), N, N * C)

    @property
    def tokens(self) -> int:
        """Tokens that embedding and loss see at a time on one device."""
        tokens = self.rows * self.cfg.data.seq_len // self.context
        return tokens // self.parts if self.one_f_one_b else tokens

    @property
    def stream(self) -> int:
        """Numbers of their residual stream, on the devices of one `sequence` group."""
        return self.tokens * self.cfg.model.embed

    @property
    def layer_tokens(self) -> int:
        """Tokens that a layer sees at a time on one device."""
        return self.tokens if self.one_f_one_b else self.tokens // self.parts

    @property
    def layer_stream(self) -> int:
        """Numbers of a layer's residual stream, on the devices of one `sequence` group."""
        return self.layer_tokens * self.cfg.model.embed

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
    def converted(self) -> bool:
        """Whether each use of a weight converts it: XLA's CPU backend then does not see that two are the same."""
        return not self.tpu and self.cfg.model.dtype == "bfloat16"

    @property
    def again(self) -> bool:
        """Whether the backward pass computes layers again; no policy keeps what a projection sent."""
        return self.cfg.model.remat != "none"

    @property
    def moe(self) -> MoEConfig | None:
        """The mixture of experts, if the model has one."""
        return self.cfg.model.ffn if isinstance(self.cfg.model.ffn, MoEConfig) else None

    @property
    def ffn(self) -> int:
        """Width of a layer's dense feed-forward layer: all of it, or the experts that every token gets; 0 if none."""
        return self.cfg.model.mlp * (self.moe.shared_experts if self.moe else 1)

    @property
    def layer(self) -> tuple[int, ...]:
        """Numbers of each of a layer's weights that one `fsdp` group holds: q, k, v, o, dense gate, up, down."""
        m = self.cfg.model
        widths = m.heads * m.H, m.K * m.H, m.K * m.H, m.heads * m.H, *((self.ffn,) * 3)
        return tuple(m.embed * width // self.tensor for width in widths if width)

    @property
    def widths(self) -> tuple[int | None, ...]:
        """Columns of each on a device, None where the columns are `embed`."""
        m, f = self.cfg.model, self.ffn // self.tensor
        q, kv = (heads * m.H // self.tensor for heads in (m.heads, m.K))
        return q, kv, kv, None, *((f, f, None) if f else ())

    @property
    def routed(self) -> tuple[int, ...]:
        """Numbers of the gate, up and down of all experts of a device that one `fsdp` group holds."""
        if not self.moe:
            return ()
        m = self.cfg.model
        return (self.moe.experts // self.experts * m.embed * m.mlp // self.tensor,) * 3

    @property
    def slots(self) -> int:
        """Slots of the buffer in which a device sends its tokens' vectors to the experts, if sizes must be known."""
        if not self.moe:
            return 0
        k, E, T = self.moe.experts_per_token, self.moe.experts, self.cfg.data.seq_len
        if C := capacity(self.moe, T):
            return E * self.rows * C
        return self.experts * self.layer_tokens * min(k, E // self.experts)

    @property
    def table(self) -> int:
        """Numbers of the embedding table, and of the output layer, that one `fsdp` group holds."""
        return self.cfg.model.embed * self.cfg.model.vocab // self.vocab

    def scatter(self, group: int) -> str:
        """The kind that a sum takes of which each device of a group keeps a part.

        Only the TPU's compiler makes one of sum and part, and not in groups of 64 or more: found by compiling for
        v5p, and v5e, which there also sums some of what it should gather.
        """
        return "reduce-scatter" if self.tpu and group < 64 else "all-reduce"


def split(cfg: Config, mesh: Mesh | AbstractMesh, backend: str) -> Split:
    """Returns what the rules of a configuration make of a mesh, for the compiler of `backend`: `cpu` or `tpu`."""
    rules = RULES[cfg.sharding.rules]

    def ways(name: str, places=rules.table) -> int:
        return math.prod(mesh.shape[axis] for axis in places[name])

    return Split(
        cfg, backend == "tpu", ways("embed"), ways("embed", rules.optimizer) if rules.optimizer else 1,
        ways("batch"), ways("seq"), ways("heads"), ways("residual") // ways("seq"), ways("vocab"), ways("expert"),
        ways("layers"), rules.scatter,
    )  # fmt: skip


LANES = 128  # numbers in a row of a TPU's vector register
CHECKED = "TPU v5 lite", "TPU v6 lite"  # chips whose programs this was compared with
TILE_ROWS = 16  # rows of a tile of bfloat16 in a TPU's memory


def predict(cfg: Config, mesh: Mesh | AbstractMesh, backend: str) -> list[Term]:
    """Predicts what one train step sends, term by term.

    Two compilers make different programs of it. The TPU's turns a sum of which each device keeps a part into a
    reduce-scatter, adds what is to be summed over the same devices before it sums it, sends bfloat16 where only
    products read, and gathers a vector of which devices hold less than whole rows by an all-reduce. XLA's CPU backend
    leaves the all-reduce, sums each product of its own, one mesh dimension after the other, and sends the compute type.

    A pipeline's terms count every tick, idle or not: `minitext.perf.comms.Runs`.

    Args:
      cfg: the configuration; its layers are taken as scanned.
      mesh: the mesh.
      backend: `cpu` or `tpu`.

    Returns:
      The terms that are not empty. `notes` says for which configurations they may be wrong.
    """
    s = split(cfg, mesh, backend)
    terms = [
        *_fsdp(s), *_gradients(s), *_zero(s), *_tensor(s), *_loss(s), *_context(s), *_pipeline(s), *_experts(s)
    ]  # fmt: skip
    return [t for t in terms if t.group > 1 and t.count]


def notes(cfg: Config, mesh: Mesh | AbstractMesh, backend: str) -> list[str]:
    """Returns what `predict` does not know of a configuration, a line each: there it may differ from the program."""
    s, slices, chip = split(cfg, mesh, backend), 1, ""
    if isinstance(mesh, Mesh):
        slices = len({getattr(device, "slice_index", 0) for device in mesh.devices.flat})
        chip = mesh.devices.flat[0].device_kind
    layers = cfg.model.layers // (s.stages * stored_groups(cfg.pipeline, s.stages))
    loop = s.stages == 1 or s.one_f_one_b
    known = {
        f"{slices} slices: sums are made within a slice, between slices and within again": slices > 1,
        f"the compiler for {backend}: this is the formula for XLA's CPU backend": backend
        not in ("cpu", "tpu"),
        f"{chip}: this is the formula for v5e and v6e": chip.startswith("TPU")
        and chip not in CHECKED,
        "optim.kind=muon: it multiplies whole matrices, gathered from their parts": cfg.optim.kind
        == "muon" and s.fsdp * s.optimizer * s.tensor > 1,
        f"model.attention.kind={cfg.model.attention.kind}: these are the projections of gqa": cfg.model.attention.kind
        != "gqa",
        "one layer in a loop: compilers merge what its forward and backward pass send": loop
        and layers == 1,
        "model.ffn.kind=moe: a ragged all-to-all sends what the router chose, of which this is the most": s.experts
        > 1 and s.tpu and s.moe is not None and s.moe.capacity_factor is None,
        f"mesh.fsdp={s.fsdp}: in so large groups the compiler for v5e sums some of what it should gather": s.fsdp >= 64
        and chip == CHECKED[0],
        f"train.loss_impl={cfg.train.loss_impl}: this is the formula for xla": cfg.train.loss_impl != "xla",
        "parts of fewer than 16 rows, some of which the TPU's compiler sums whole": s.tpu
        and cfg.model.embed // max(s.fsdp, s.optimizer) % TILE_ROWS != 0,
    }  # fmt: skip
    return [text for text, applies in known.items() if applies] if mesh.size > 1 else []


def _scaled(numbers: tuple[int, ...], size: int) -> tuple[int, ...]:
    return tuple(number * size for number in numbers)


def _fsdp(s: Split) -> Iterator[Term]:
    """Weights are gathered for the forward pass and again for the backward pass (Rajbhandari et al. 2020)."""
    model, r, chunks = s.cfg.model, s.runs, s.cfg.train.loss_chunks
    weights = _scaled(s.layer, s.narrow)
    scale = 4 * model.embed
    vector = "all-reduce" if s.tpu and model.embed // s.fsdp % LANES else "all-gather"
    yield Term("all-gather of the weights, forward", "all-gather", s.fsdp, weights, r.forward)
    yield Term("all-gather of the weights, backward", "all-gather", s.fsdp, weights, r.backward)
    yield Term("RMSNorm scales, forward", vector, s.fsdp, (scale, scale), r.forward)
    if s.again:
        yield Term("RMSNorm scales, recomputed", vector, s.fsdp, (scale, scale), r.backward)
        if s.converted:  # but `down`, whose product nobody needs again
            yield Term("weights, recomputed", "all-gather", s.fsdp, weights[:-1], r.backward)
    # What no loop changes is gathered before it: on a TPU out of branches too, but not what the program converts there.
    converts = s.tpu and model.dtype == "bfloat16"
    last = 1 if not s.one_f_one_b else s.cfg.train.microbatches if s.tpu else r.outside
    head = r.outside if s.one_f_one_b and (chunks > 1 or not s.tpu) else 1
    table = 1 if not s.tpu else head if model.tie_embeddings else last
    if converts:
        head, table = r.chunks, r.outside
    # A lookup is no product: the table is sent in the compute type.
    yield Term("embedding table", "all-gather", s.fsdp, (s.table * s.wide,), table)
    output = (s.table * s.narrow,)
    if not model.tie_embeddings or (s.one_f_one_b and (chunks > 1 or not s.tpu)):
        yield Term("output layer", "all-gather", s.fsdp, output, head)
    if chunks > 1:
        yield Term("output layer, for each chunk", "all-gather", s.fsdp, output, r.chunks)
    if s.converted and not model.tie_embeddings:
        runs = head if chunks == 1 else r.chunks
        yield Term("output layer, backward", "all-gather", s.fsdp, output, runs)
    yield Term("last RMSNorm's scale", vector, s.fsdp, (scale,), last)


def _gradients(s: Split) -> Iterator[Term]:
    """Gradients are summed over all devices that saw other tokens, and what is stored in parts is kept in parts."""
    r, model, tied, scale = s.runs, s.cfg.model, s.cfg.model.tie_embeddings, 4 * s.cfg.model.embed
    (once, table), (heads, head) = _outside(s, 1), _outside(s, s.cfg.train.loss_chunks)
    groups = _groups(s, s.batch, s.context) if s.fsdp == 1 else (s.replicas // s.fsdp,)
    products = {"weights": (_scaled(s.layer, s.wide), r.backward, _whole(s, *s.widths))}
    if not tied:
        products["output layer"] = ((head,), heads, _whole(s, model.vocab // s.vocab))
    for name, (arrays, runs, whole) in products.items():
        stored = s.fsdp > 1 or (s.optimizer > 1 and name != "weights")
        kind = s.scatter(s.fsdp if s.fsdp > 1 else s.optimizer) if stored else "all-reduce"
        rest = tuple(size for size, every in zip(arrays, whole, strict=True) if not every)
        yield Term(f"gradient of the {name}, over fsdp", kind, s.fsdp, rest, runs)
        sums = tuple(size for size, every in zip(arrays, whole, strict=True) if every)
        yield Term(f"gradient of the {name}, whole, over fsdp", "all-reduce", s.fsdp, sums, runs)
        parts = tuple(size // s.fsdp for size in arrays)
        where = ", its part, over the rest" if s.fsdp > 1 else ""
        for group in groups:
            last = kind if s.fsdp == 1 else "all-reduce"
            yield Term(f"gradient of the {name}{where}", last, group, parts, runs)
    # Of a lookup and of a scale, whose sums are not of a product, the sum is over all at once.
    once_or_branch = s.cfg.train.microbatches == 1 or s.one_f_one_b
    kept = once_or_branch and (s.replicas == s.fsdp or s.optimizer > 1)
    for group in _groups(s, s.batch, s.context):
        alone = s.scatter(group) if kept and not _whole(s, None)[0] else "all-reduce"
        yield Term("gradient of the embedding table", alone, group, (table,), once)
        # A TPU adds both uses of a tied table first if they are float32 as the table is, and neither is of a loop.
        loop = s.one_f_one_b or (s.fsdp > 1 and s.cfg.train.loss_chunks > 1)
        if tied and (s.cfg.model.dtype == "bfloat16" or not s.tpu or loop):
            yield Term("gradient of the table as output layer", alone, group, (head,), heads)
    for group in _groups(s, s.batch, s.context * s.sequence):
        yield Term("gradient of RMSNorm scales", "all-reduce", group, (scale, scale), r.backward)
        yield Term("gradient of the last RMSNorm's scale", "all-reduce", group, (scale,), once)


def _whole(s: Split, *widths: int | None) -> tuple[bool, ...]:
    """Whether a gradient [embed, width], or [..., embed] for None, is summed whole though a device keeps a part of it.

    The TPU's compiler leaves the all-reduce of bfloat16 if a part is an odd number of lane rows of the array's last
    dimension, which is the longer one where the other is shorter than a lane row: found by compiling for v5e and v6e.
    """
    part = s.cfg.model.embed // max(s.fsdp, s.optimizer)
    lanes = s.tpu and s.wide == 2 and part % (2 * LANES) == LANES
    return tuple(lanes and (width is None or width < LANES) for width in widths)


def _outside(s: Split, chunks: int) -> tuple[int, int]:
    """How often gradients of the embedding table or the output layer are summed, and their bytes.

    What a loop adds up a TPU sends once, as the float32 sum, if each device keeps the whole; not out of a branch.
    """
    microbatches = s.cfg.train.microbatches
    added = chunks > 1 or (microbatches > 1 and not s.in_parts)
    if s.tpu and added and s.fsdp == 1 and not s.one_f_one_b:
        return microbatches if s.in_parts else 1, s.table * 4
    return s.runs.outside * chunks, s.table * s.wide


def _groups(s: Split, *groups: int) -> tuple[int, ...]:
    """Groups of a sum over all tokens: XLA's CPU backend sums over rows and then over places."""
    return (math.prod(groups),) if s.tpu else groups


def _zero(s: Split) -> Iterator[Term]:
    """With ZeRO-1 and ZeRO-2 the updated parameters are gathered, in float32, all layers of one kind at once."""
    model = s.cfg.model
    L, scale = model.layers, 4 * model.embed
    vector = "all-reduce" if s.tpu and model.embed // s.optimizer % LANES else "all-gather"
    tables = (4 * s.table,) * (1 if model.tie_embeddings else 2)
    router = (4 * L * model.embed * s.moe.experts,) if s.moe else ()
    arrays = *_scaled(s.layer + s.routed, 4 * L), *router, L * scale, L * scale, *tables
    yield Term("all-gather of the new parameters", "all-gather", s.optimizer, arrays, 1)
    yield Term("the last RMSNorm's new scale", vector, s.optimizer, (scale,), 1)


def _tensor(s: Split) -> Iterator[Term]:
    """Products whose features are split (Shoeybi et al. 2019), and whose tokens are between them (Korthikanti et al.).

    A row-parallel product (output, down) gives each device a part of a sum; so do, backward, column-parallel ones
    (q, k, v; gate, up; output layer). Split tokens are gathered before a column-parallel product, and their gradients
    before a row-parallel one. Embedding and output layer are split over the stages of a pipeline, too.
    """
    r, gather, chunks = s.runs, "all-gather", s.cfg.train.loss_chunks
    kind = s.scatter(s.tensor) if s.sequence > 1 else "all-reduce"
    one, sent = s.layer_stream * s.wide, s.layer_stream * s.narrow
    row = 1 + bool(s.ffn) + bool(s.moe)
    yield Term("row-parallel sums, forward", kind, s.tensor, (one,) * row, r.forward)
    if s.again:
        yield Term("row-parallel sum, recomputed", kind, s.tensor, (one,), r.backward)
    sums = 2 if s.tpu else 3 + 2 * bool(s.ffn) + bool(s.moe)
    yield Term("column-parallel sums, backward", kind, s.tensor, (one,) * sums, r.backward)
    tokens = "tokens for q, k, v and gate, up"
    yield Term(f"{tokens}, forward", gather, s.sequence, (sent,) * 2, r.forward)
    yield Term(f"{tokens}, backward", gather, s.sequence, (sent,) * 2, r.backward)
    grads = "tokens' gradients for output and down"
    yield Term(grads, gather, s.sequence, (sent,) * 2, r.backward)
    one, sent = s.stream * s.wide, s.stream * s.narrow
    yield Term("embedding lookup, over vocab", kind, s.vocab, (one,), r.outside)
    yield Term("output layer's sum, backward", kind, s.vocab, (one // chunks,), r.chunks)
    passes = 1 if chunks == 1 else 2  # each chunk is computed again
    tokens = (sent // chunks,) * passes
    yield Term("tokens for the output layer", gather, s.sequence, tokens, r.chunks)
    yield Term("tokens' gradients for the embedding", gather, s.sequence, (one,), r.outside)


def _loss(s: Split) -> Iterator[Term]:
    """The maximum and sum of a logsumexp over a split vocabulary, and the target's logit, in float32."""
    chunks = s.cfg.train.loss_chunks
    one, name = 4 * s.tokens // chunks, "loss: logsumexp and target over vocab"
    yield Term(name, "all-reduce", s.vocab, (one,) * 3, s.runs.chunks)
    if chunks > 1:
        name = "loss: logsumexp over vocab, recomputed"
        yield Term(name, "all-reduce", s.vocab, (one,) * 2, s.runs.chunks)


def _context(s: Split) -> Iterator[Term]:
    """Attention over a split sequence: all keys and values at once, or from device to device (Liu et al. 2023)."""
    r, model, c = s.runs, s.cfg.model, s.context
    heads = count_attention(model)
    pair = tuple(s.layer_tokens * width // s.tensor for width in (heads.k, heads.v))
    sent = _scaled(pair, s.narrow)
    if model.attention.context == "allgather":
        whole, grads = _scaled(sent, c), _scaled(pair, s.wide * c)
        yield Term("keys and values, forward", "all-gather", c, whole, r.forward)
        if s.again:
            yield Term("keys and values, recomputed", "all-gather", c, whole, r.backward)
        yield Term("gradients of keys and values", "reduce-scatter", c, grads, r.backward)
        return
    kind = "collective-permute"
    yield Term("ring: keys and values, forward", kind, c, sent, r.forward * (c - 1))
    if s.again:  # what the first turn brings serves both
        yield Term("ring: keys and values, recomputed", kind, c, sent, r.backward * (c - 2))
    yield Term("ring: keys and values, backward", kind, c, sent, r.backward * (c - 1))
    grads = _scaled(pair, 4)
    yield Term("ring: gradients of keys and values", kind, c, grads, r.backward * (c - 1))
    halves = (s.stream * s.wide // 2,) * 2
    yield Term("ring: back to the order of the text", kind, c, halves, r.outside)
    yield Term("ring: back to the order of the text, backward", kind, c, halves, r.outside)


def _pipeline(s: Split) -> Iterator[Term]:
    """Stages send what they computed to the next (Huang et al. 2019), and the last's to all, who share the vocabulary.

    In a tick all stages send, whether they had work or not. The sum that brings one stage's activations to all counts
    as many numbers as it brings: the others add zeros.
    """
    kind, one = "collective-permute", s.layer_stream * s.wide
    yield Term("activations to the next stage", kind, s.stages, (one,), s.runs.ticks)
    yield Term("gradients to the stage before", kind, s.stages, (one,), s.runs.ticks)
    one = s.stream * s.wide
    yield Term("last stage's activations, to all", "all-reduce", s.stages, (one,), s.runs.outside)
    yield Term("first stage's gradients, to all", "all-reduce", s.stages, (one,), s.runs.outside)


def _experts(s: Split) -> Iterator[Term]:
    """Tokens go to their experts and come back, by an all-to-all each way (Lepikhin et al. 2020); gradients likewise.

    Where sizes must be known when the program is compiled, each device sends every other as many slots as it could
    need, without capacity k for each token. A TPU sends what there is: for it, these are upper bounds.
    """
    if not s.moe:
        return
    r, k, E, D = s.runs, s.moe.experts_per_token, s.moe.experts, s.cfg.model.embed
    ragged = s.tpu and s.moe.capacity_factor is None
    kind = "ragged-all-to-all" if ragged else "all-to-all"
    # XLA's CPU backend makes an array for each device of it.
    pieces = 1 if s.tpu else s.experts
    sent = (s.slots * D * s.wide // pieces,) * (2 * pieces)
    yield Term("tokens to experts and back, forward", kind, s.experts, sent, r.forward)
    if s.again:
        yield Term("tokens to experts and back, recomputed", kind, s.experts, sent, r.backward)
    yield Term("gradients to experts and back", kind, s.experts, sent, r.backward)
    f = s.cfg.model.mlp // s.tensor
    experts = _scaled(s.routed, s.wide), s.experts, _whole(s, f, f, None)
    gathered = {"router": ((4 * D * E,), 1, (False,)), "experts": experts}
    for name, (weights, ways, whole) in gathered.items():
        yield Term(f"all-gather of the {name}, forward", "all-gather", s.fsdp, weights, r.forward)
        yield Term(f"all-gather of the {name}, backward", "all-gather", s.fsdp, weights, r.backward)
        # What a shard_map scatters, the CPU's compiler scatters too.
        scatter = s.scatter(s.fsdp) if s.tpu else "reduce-scatter"
        for kind, wanted in ((scatter, False), ("all-reduce", True)):
            sums = tuple(n for n, every in zip(weights, whole, strict=True) if every == wanted)
            yield Term(f"gradient of the {name}", kind, s.fsdp, sums, r.backward)
        parts = tuple(size // s.fsdp for size in weights)
        rest = s.replicas // s.fsdp // ways
        yield Term(f"gradient of the {name}, over the rest", "all-reduce", rest, parts, r.backward)
    chosen, mean = (4 * s.layer_tokens * k,), (4 * E,)
    yield Term("gradient of the router's weights", "all-reduce", s.tensor, chosen, r.backward)
    yield Term("router's mean shares", "all-reduce", s.replicas, mean, r.forward)
