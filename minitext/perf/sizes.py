"""Sizes of a train step on one device, from which `minitext.perf.comms` and `minitext.perf.memory` predict.

Chapters: 11, 14.
"""

import copy
from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh

from minitext.config.config import Config
from minitext.config.model import GQAConfig, MLAConfig, ModelConfig, MoEConfig
from minitext.errors import UserError
from minitext.models.flops import all_layers, count_attention
from minitext.sharding import pipeline_schedule as schedule
from minitext.sharding.rules import RULES

# Settings of a layer, and the values for which a formula holds; any other brings arrays that it does not count.
PLAIN = {
    "attention.kind": ("gqa", "mla"),
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


# The same for what devices send, whose formulas were compared with compiled programs for these values.
SENT = {
    "attention.kind": ("gqa", "mla"),
    "norms": ("before", "both"),
    "attention.qk_norm": ("none", "l2", "head"),
    "attention.gate": (False,),
    "ffn.shared_gate": (False,),
    "ffn.scale_input": (False,),
}


def check_products(model: ModelConfig, what: str) -> None:
    """Refuses a model with quantized products.

    Args:
      model: the model.
      what: what would be predicted, for the message.

    Raises:
      UserError: naming the setting.
    """
    if any(rule.dtype != "none" for rule in model.quantization):
        raise UserError(
            f"model.quantization: the formulas for {what} know only products of model.dtype={model.dtype}: `minitext "
            "compile ... target=v5e:2x4` measures it"
        )


def check_plain(model: ModelConfig, what: str) -> None:
    """Refuses a model whose layers differ, or have what the formulas for memory don't count.

    Args:
      model: the model.
      what: what the formulas would predict, for the message.

    Raises:
      UserError: naming the settings.
    """
    check_products(model, what)
    found = [f"model.dense_layers={model.dense_layers}"] if model.dense_layers else []
    found += ["model.period"] if any(model.period) else []
    _refuse(
        [*found, *_beyond(model, PLAIN)], f"{what} know only layers that are all alike and have"
    )


def check_sent(model: ModelConfig) -> None:
    """Refuses a model with a layer that has what the formulas for messages don't count.

    Raises:
      UserError: naming the settings.
    """
    check_products(model, "what devices send")
    found = [f"model.dense_layers={model.dense_layers}"] if model.dense_layers else []
    _refuse([*found, *_beyond(model, SENT)], "what devices send know only layers that have")


def _beyond(model: ModelConfig, known: dict[str, tuple]) -> list[str]:
    """Returns a model's settings, `key=value`, that have other values than the known ones in some layer."""
    found = []
    for _, layer in all_layers(model):
        for key, values in known.items():
            section, _, name = key.rpartition(".")
            value = getattr(getattr(layer, section) if section else layer, name, values[0])
            if value not in values:
                found.append(f"model.{key}={str(value).lower()}")
    return list(dict.fromkeys(found))


def _refuse(found: list[str], scope: str) -> None:
    if found:
        raise UserError(
            f"{', '.join(found)}: the formulas for {scope} none of these: `minitext compile ... target=v5e:2x4` "
            "measures it"
        )


class Matrix(NamedTuple):
    """A dense weight, in elements on one device before FSDP splits it.

    Attributes:
      rows: inputs.
      columns: outputs.
      split: which of the two tensor parallelism splits, `rows` or `columns`; "" for none.
    """

    rows: int
    columns: int
    split: str = ""


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
      model: the model, or of one of `kinds`, the layer's own configuration.
      layers: layers on a device.
      name: where a kind of layer is in the parameters, such as `prefix`; "" if all are alike.
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

        self.cfg, self.model, self.name, self.tpu = cfg, model, "", platform == "tpu"
        self.fsdp, self.batch, self.context = ways("embed"), ways("batch"), ways("seq")
        self.optimizer = rules.of_optimizer.ways("embed", mesh) if rules.optimizer else 1
        self.scatters = rules.scatter
        self.tensor, self.sequence = ways("heads"), ways("residual") // self.context
        self.vocab, self.experts, self.stages = ways("vocab"), ways("expert"), ways("layers")
        self.layers = model.layers // self.stages

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
        self.table = model.embed * model.vocab // self.vocab
        self.itemsize = 2 if model.dtype == "bfloat16" else 4
        self.operand = 2 if self.tpu else self.itemsize
        self.sent = self.itemsize if self.tpu else 4
        self.sent_operand = 2 if self.tpu else 4

    @property
    def kinds(self) -> "list[Sizes]":
        """The sizes of each kind of layer, in the order of `ModelConfig.stacks`; they have `runs` of their own."""
        found = []
        for name, stack in self.cfg.model.stacks.items():
            for place, model in enumerate(stack.layers):
                kind = copy.copy(self)
                kind.model, kind.layers = model, stack.repeats // self.stages
                kind.name = f"{name}.layers.{place}" if len(stack.layers) > 1 else name
                found.append(kind)
        if len(found) == 1:
            found[0].name = ""
        return found

    @property
    def moe(self) -> MoEConfig | None:
        """The layer's mixture of experts, if it has one."""
        return self.model.ffn if isinstance(self.model.ffn, MoEConfig) else None

    @property
    def runs(self) -> Runs:
        """How often a device runs each part of a step."""
        train, layers = self.cfg.train, self.layers
        N, C = train.microbatches, train.loss_chunks
        if self.stages == 1:
            return Runs(0, N * layers, N * layers, N, N * C)
        ticks = N * self.ticks
        if self.one_f_one_b:
            return Runs(ticks, 2 * ticks * layers, ticks * layers, ticks, ticks * C)
        passes = ticks * layers // schedule.groups_per_stage(self.cfg.pipeline)
        return Runs(ticks, passes, passes, N, N * C)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """A layer's dense weights: q, k, v, a gate, o (MLA: q_down, q, kv_down, k_up, v_up, o), gate, up, down."""
        m, D, t = self.model, self.model.embed, self.tensor
        a, N, out = m.attention, m.heads, count_attention(m).out
        if isinstance(a, MLAConfig):
            R, keys = a.kv_rank, N * (a.nope_dim + a.rope_dim)
            found = [] if a.q_rank is None else [Matrix(D, a.q_rank)]
            found += [Matrix(a.q_rank or D, keys // t, "columns"), Matrix(D, R + a.rope_dim)]
            found += [Matrix(R, N * width // t, "columns") for width in (a.nope_dim, a.v_dim)]
        else:
            gate = (N * m.H,) if isinstance(a, GQAConfig) and a.gate else ()
            widths = N * m.H, m.K * m.H, m.K * m.H, *gate
            found = [Matrix(D, width // t, "columns") for width in widths]
        found.append(Matrix(out // t, D, "rows"))
        if F := m.mlp * (self.moe.shared_experts if self.moe else 1) // t:
            found += [Matrix(D, F, "columns"), Matrix(D, F, "columns"), Matrix(F, D, "rows")]
        return tuple(found)

    @property
    def layer(self) -> tuple[int, ...]:
        """Elements of a layer's dense weights before FSDP splits them."""
        return tuple(matrix.rows * matrix.columns for matrix in self.matrices)

    @property
    def dense(self) -> bool:
        """Whether a layer has a feed-forward layer for all tokens: its own, or shared experts."""
        return not self.moe or self.moe.shared_experts > 0

    @property
    def norms(self) -> tuple[int, ...]:
        """Widths of a layer's norms of the residual stream, and of MLA's latents: FSDP splits them all."""
        m = self.model
        latents = [size for name, _, size in m.attention.sizes(m) if name == "embed"]
        return (m.embed,) * (4 if m.norms == "both" else 2) + tuple(latents)

    @property
    def embed_biases(self) -> tuple[int, ...]:
        """Elements of a layer's biases that FSDP splits: of o, and of down."""
        m = self.model
        return (m.embed,) * (getattr(m.attention, "out_bias", False) + (m.ffn.bias and self.dense))

    @property
    def biases(self) -> tuple[int, ...]:
        """Elements of a layer's other biases on a device: of q, k, v, gate and up."""
        m, a = self.model, self.model.attention
        found = (m.heads * m.H, m.K * m.H, m.K * m.H) if getattr(a, "qkv_bias", False) else ()
        F = m.mlp * (self.moe.shared_experts if self.moe else 1)
        found += (F, F) if m.ffn.bias and self.dense else ()
        return tuple(width // self.tensor for width in found)

    @property
    def routed(self) -> tuple[int, ...]:
        """Elements of gate, up and down of a device's routed experts before FSDP splits them."""
        if not self.moe:
            return ()
        m = self.model
        return (self.moe.experts // self.experts * m.embed * m.mlp // self.tensor,) * 3

    @property
    def routed_biases(self) -> tuple[int, ...]:
        """Elements of the biases of a device's routed experts, before FSDP splits the last: gate, up, down."""
        if not self.moe or not self.moe.bias:
            return ()
        here, F = self.moe.experts // self.experts, self.model.mlp // self.tensor
        return here * F, here * F, here * self.model.embed

    @property
    def shared_gate(self) -> bool:
        """Whether the shared experts have a gate."""
        return self.moe is not None and self.moe.shared_gate

    @property
    def sinks(self) -> tuple[int, ...]:
        """Elements of attention's sinks on a device."""
        heads = self.model.heads // self.tensor
        return (heads,) if getattr(self.model.attention, "sinks", False) else ()

    @property
    def head_norms(self) -> tuple[int, ...]:
        """Widths of the norms of queries and keys by head."""
        named = getattr(self.model.attention, "qk_norm", "none")
        return (self.model.H,) * 2 if named == "head" else ()
