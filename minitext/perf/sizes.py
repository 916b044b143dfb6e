"""Sizes of a train step on one device, from which `minitext.perf.comms` and `minitext.perf.memory` predict.

Chapters: 11, 14.
"""

from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh

from minitext.config.config import Config
from minitext.config.model import ModelConfig, MoEConfig
from minitext.errors import UserError
from minitext.models.flops import all_layers
from minitext.sharding import pipeline_schedule as schedule
from minitext.sharding.rules import RULES

# Settings of a layer, and the values for which a formula holds; any other brings arrays that it does not count.
PLAIN = {
    "norms": ("before",),
    "attention.qkv_bias": (False,),
    "attention.out_bias": (False,),
    "attention.qk_norm": ("none", "l2"),
    "attention.gate": (False,),
    "attention.sinks": (False,),
    "ffn.bias": (False,),
    "ffn.router_bias": (False,),
    "ffn.shared_gate": (False,),
    "ffn.scale_input": (False,),
}


def check_plain(model: ModelConfig, what: str) -> None:
    """Refuses a model whose layers differ, or have what the formulas don't count.

    Args:
      model: the model.
      what: what the formulas would predict, for the message.

    Raises:
      UserError: naming the settings.
    """
    found = [f"model.dense_layers={model.dense_layers}"] if model.dense_layers else []
    found += ["model.period"] if any(model.period) else []
    for _, layer in all_layers(model):
        for key, known in PLAIN.items():
            section, _, name = key.rpartition(".")
            value = getattr(getattr(layer, section) if section else layer, name, known[0])
            if value not in known:
                found.append(f"model.{key}={str(value).lower()}")
    if found:
        raise UserError(
            f"{', '.join(dict.fromkeys(found))}: the formulas for {what} know only layers that are all alike and have "
            "none of these: `minitext compile ... target=v5e:2x4` measures it"
        )


class Runs(NamedTuple):
    """How often a device runs each part of a step.

    A pipeline runs each part once per tick: a stage with nothing to do takes the other branch of a conditional, and
    `hlo.Module` counts every branch. The network is idle in those ticks, so the step waits as if they were busy.

    Attributes:
      ticks: ticks of a pipeline, in each of which a stage sends a message in both directions; 0 without a pipeline.
      forward: forward passes of a layer; 1F1B computes each twice.
      backward: backward passes of a layer.
      outside: passes through the embedding and the loss.
      chunks: passes through one chunk of the output layer and the loss.
    """

    ticks: int
    forward: int
    backward: int
    outside: int
    chunks: int


class Sizes:
    """How a train step is split over devices, and the sizes of one device's part.

    Sizes are numbers of elements; `itemsize`, `operand`, `sent` and `sent_operand` are bytes of one element.

    Attributes:
      cfg: the configuration.
      tpu: whether the TPU compiler builds the program.
      fsdp: devices that each store a part of a weight and gather it for use.
      optimizer: devices that split the optimizer state of weights they all hold (ZeRO-1, ZeRO-2); 1 without ZeRO.
      scatters: whether gradients are split the same way after each microbatch (ZeRO-2).
      batch: devices that split the rows of a batch.
      context: devices that split each row's tokens.
      tensor: devices that split heads and features.
      sequence: devices that split the tokens of the residual stream only; 1 or `tensor`.
      vocab: devices that split the output layer's columns and the embedding table's rows.
      experts: devices that split the experts, and the rows.
      stages: devices that split the layers.
      one_f_one_b: whether a pipeline runs 1F1B, which computes embedding and loss in every tick.
      rows: rows of a microbatch.
      parts: microbatches that the pipeline makes of one microbatch of the step; 1 without a pipeline.
      ticks: ticks of the pipeline for one microbatch of the step; 0 without a pipeline.
      layer_tokens: tokens that a layer sees at a time.
      tokens: tokens that embedding and loss see at a time.
      replicas: devices whose gradients of a weight come from different tokens.
      recomputes: whether the backward pass recomputes layers; no policy keeps what a projection sent.
      converts: whether each use of a weight converts it, which hides from XLA's CPU backend that two uses are equal.
      moe: the mixture of experts, if the model has one.
      table: elements of the embedding table, and of the output layer, before FSDP splits them.
      itemsize: bytes of an element of the compute type.
      operand: bytes of an element that only matrix products read: TPUs multiply in bfloat16.
      sent: bytes of an element that a device sends. XLA's CPU backend computes and sends bfloat16 as float32.
      sent_operand: the same for what only products read, which a TPU converts before it sends.
    """

    def __init__(self, cfg: Config, mesh: Mesh | AbstractMesh, platform: str):
        rules, model, pipeline = RULES[cfg.sharding.rules], cfg.model, cfg.pipeline

        def ways(name: str) -> int:
            return rules.ways(name, mesh)

        self.cfg, self.tpu = cfg, platform == "tpu"
        self.fsdp, self.batch, self.context = ways("embed"), ways("batch"), ways("seq")
        self.optimizer = rules.of_optimizer.ways("embed", mesh) if rules.optimizer else 1
        self.scatters = rules.scatter
        self.tensor, self.sequence = ways("heads"), ways("residual") // self.context
        self.vocab, self.experts, self.stages = ways("vocab"), ways("expert"), ways("layers")

        self.rows = cfg.train.global_batch // cfg.train.microbatches // self.batch
        self.one_f_one_b = self.stages > 1 and pipeline.schedule == "1f1b"
        self.parts, self.ticks = 1, 0
        if self.stages > 1:
            groups = schedule.groups_per_stage(pipeline)
            self.parts = schedule.count_microbatches(pipeline, self.stages, self.rows)
            self.ticks = schedule.forward_ticks(self.stages, self.parts, groups)
            if self.one_f_one_b:
                self.ticks = schedule.one_f_one_b_ticks(self.stages, self.parts)
        tokens = self.rows * cfg.data.seq_len // self.context
        self.layer_tokens = tokens // self.parts
        self.tokens = self.layer_tokens if self.one_f_one_b else tokens
        self.replicas = self.batch * self.context

        self.recomputes = model.remat != "none"
        self.converts = not self.tpu and model.dtype == "bfloat16"
        self.moe = model.ffn if isinstance(model.ffn, MoEConfig) else None
        self.table = model.embed * model.vocab // self.vocab
        self.itemsize = 2 if model.dtype == "bfloat16" else 4
        self.operand = 2 if self.tpu else self.itemsize
        self.sent = self.itemsize if self.tpu else 4
        self.sent_operand = 2 if self.tpu else 4

    @property
    def runs(self) -> Runs:
        """How often a device runs each part of a step."""
        train, layers = self.cfg.train, self.cfg.model.layers // self.stages
        N, C = train.microbatches, train.loss_chunks
        if self.stages == 1:
            return Runs(0, N * layers, N * layers, N, N * C)
        ticks = N * self.ticks
        if self.one_f_one_b:
            return Runs(ticks, 2 * ticks * layers, ticks * layers, ticks, ticks * C)
        passes = ticks * layers // schedule.groups_per_stage(self.cfg.pipeline)
        return Runs(ticks, passes, passes, N, N * C)

    @property
    def layer(self) -> tuple[int, ...]:
        """Elements of a layer's dense weights before FSDP splits them: q, k, v, o, gate, up, down."""
        m = self.cfg.model
        ffn = m.mlp * (self.moe.shared_experts if self.moe else 1)
        widths = m.heads * m.H, m.K * m.H, m.K * m.H, m.heads * m.H, ffn, ffn, ffn
        return tuple(m.embed * width // self.tensor for width in widths if width)

    @property
    def routed(self) -> tuple[int, ...]:
        """Elements of gate, up and down of a device's routed experts before FSDP splits them."""
        if not self.moe:
            return ()
        m = self.cfg.model
        return (self.moe.experts // self.experts * m.embed * m.mlp // self.tensor,) * 3
