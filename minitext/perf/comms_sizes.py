"""Sizes of a train step on one device, which the formula of what devices send is made of.

Chapters: 11, 12, 13.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh

from minitext.compiler.hlo import Collective
from minitext.config.model import MoEConfig
from minitext.config.sections import Config
from minitext.models.moe import capacity
from minitext.sharding.pipeline_schedule import (
    count_microbatches,
    forward_ticks,
    groups_per_stage,
    one_f_one_b_ticks,
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
