"""Sizes of a train step on one device, from which `minitext.perf.comms` and `minitext.perf.memory` predict.

Chapters: 11, 14.
"""

import copy
import math
from typing import Any, NamedTuple, Self

from jax.sharding import AbstractMesh, Mesh

from minitext.compiler.targets import Target, target_of
from minitext.config.config import Config
from minitext.config.model import DeltaNetConfig, GQAConfig, MLAConfig, ModelConfig, MoEConfig
from minitext.errors import UserError
from minitext.models.flops import count_attention
from minitext.sharding import pipeline_schedule as schedule
from minitext.sharding.rules import RULES, ShardingRules


def check_products(model: ModelConfig, what: str, *, stored: bool = False) -> None:
    """Refuses a model with quantized products or stored weights.

    Args:
      model: the model.
      what: what would be predicted, for the message.
      stored: whether the formulas know weights in 4 or 8 bits.

    Raises:
      UserError: naming the setting.
    """
    if any(rule.dtype != "none" for rule in model.quantization):
        raise UserError(
            f"model.quantization: the formulas for {what} know only products of model.dtype={model.dtype}: `minitext "
            "compile ... target=v5e:2x4` measures it"
        )
    if model.is_stored and not stored:
        raise UserError(
            f"model.storage: the formulas for {what} know only float32 weights: set model.storage=[]"
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

    @property
    def stored(self) -> int:
        """The size of the dimension that FSDP splits."""
        return self.columns if self.split == "rows" else self.rows


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


class Ways(int):
    """A number of devices that share something; it also knows in how many slices they are.

    So do products and quotients.

    Attributes:
      slices: the factor of the number that crosses slices.
    """

    slices: int

    def __new__(cls, devices: int, slices: int = 1) -> Self:
        """Makes a number of devices, of which a factor `slices` crosses slices."""
        self = super().__new__(cls, devices)
        self.slices = slices
        return self

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented  # a tuple, which is repeated
        return Ways(int(self) * int(other), self.slices * slices_of(other))

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> "Ways":
        return Ways(int(self) // int(other), self.slices // slices_of(other))


def slices_of(group: int) -> int:
    """Returns in how many slices a group's devices are."""
    return group.slices if isinstance(group, Ways) else 1


class Sizes:
    """How a train step is split over devices, and the sizes of one device's part.

    Numbers of devices are `Ways`: they know what `mesh.dcn` lets cross slices. Sizes are numbers of elements;
    `itemsize`, `operand`, `sent` and `sent_operand` are bytes of one element.

    Attributes:
      cfg: the configuration.
      model: the model, or of one of `kinds`, the layer's own configuration.
      layers: layers on a device.
      name: where a kind of layer is in the parameters, such as `prefix`; "" if all are alike.
      tpu: whether the TPU compiler builds the program.
      slice_devices: devices of one slice.
      target: the TPUs, or None if they aren't known.
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
      converts: whether each use of a weight converts or rounds it, which hides from XLA's CPU backend that two uses are
        equal.
      moe: the mixture of experts, if the model has one.
      table: elements of the embedding table, and of the output layer, before FSDP splits them.
      itemsize: bytes of an element of the compute type.
      operand: bytes of an element that only matrix products read: TPUs multiply in bfloat16.
      sent: bytes of an element that a device sends. XLA's CPU backend computes and sends bfloat16 as float32.
      sent_operand: the same for what only products read, which a TPU converts before it sends.
      rounded: whether layers' weights are sent in int8 (`sharding.gather_dtype`).
      sent_weight: bytes of an element of such a weight.
    """

    def __init__(
        self,
        cfg: Config,
        mesh: Mesh | AbstractMesh,
        platform: str,
        target: Target | None = None,
    ):
        rules, model, pipeline = RULES[cfg.sharding.rules], cfg.model, cfg.pipeline

        across = cfg.mesh.dcn.factors()

        def ways(name: str, rules: ShardingRules = rules) -> Ways:
            factors = (across.get(axis, 1) for axis in rules.table[name])
            return Ways(rules.ways(name, mesh), math.prod(factors))

        self.cfg, self.model, self.name, self.tpu = cfg, model, "", platform == "tpu"
        self.slice_devices = mesh.size // math.prod(across.values())
        self.target = target or target_of(mesh)
        self.fsdp, self.batch, self.context = ways("embed"), ways("batch"), ways("seq")
        self.optimizer = ways("embed", rules.of_optimizer) if rules.optimizer else 1
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
        self.rounded = cfg.sharding.gather_dtype == "int8"
        self.converts = not self.tpu and (model.dtype == "bfloat16" or self.rounded)
        self.table = model.embed * model.vocab // self.vocab
        self.itemsize = 2 if model.dtype == "bfloat16" else 4
        self.operand = 2 if self.tpu else self.itemsize
        self.sent = self.itemsize if self.tpu else 4
        self.sent_operand = 2 if self.tpu else 4
        self.sent_weight = 1 if self.rounded else self.sent_operand

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
        """A layer's dense weights: q, k, v, a gate, o, and gate, up, down of the feed-forward layer.

        MLA has q_down, q, kv_down, k_up, v_up, o instead; DeltaNet has beta and decay after its gate.
        """
        m, D, t = self.model, self.model.embed, self.tensor
        a, N, out = m.attention, m.heads, count_attention(m).out
        if isinstance(a, MLAConfig):
            R, keys = a.kv_rank, N * (a.nope_dim + a.rope_dim)
            found = [] if a.q_rank is None else [Matrix(D, a.q_rank)]
            found += [Matrix(a.q_rank or D, keys // t, "columns"), Matrix(D, R + a.rope_dim)]
            found += [Matrix(R, N * width // t, "columns") for width in (a.nope_dim, a.v_dim)]
        elif isinstance(a, DeltaNetConfig):
            keys, values = a.key_heads * a.key_dim, a.value_heads * a.value_dim
            widths = keys, keys, values, values, a.value_heads, a.value_heads
            found = [Matrix(D, width // t, "columns") for width in widths]
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
        """Widths of a layer's norms of the residual stream."""
        return (self.model.embed,) * (4 if self.model.norms == "both" else 2)

    @property
    def latents(self) -> tuple[int, ...]:
        """Widths of MLA's latents, each with a norm: of keys and values, and of queries."""
        m = self.model
        return tuple(size for name, _, size in m.attention.sizes(m) if name == "embed")

    @property
    def inputs(self) -> tuple[int, ...]:
        """Widths of what column-parallel products read, each once: attention's input (MLA: two), the feed-forward's."""
        a, D = self.model.attention, self.model.embed
        return (a.q_rank or D, a.kv_rank, D) if isinstance(a, MLAConfig) else (D, D)

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
    def weights(self) -> int:
        """Elements of a layer's weights before FSDP splits them: the dense ones, and those of routed experts."""
        return sum(self.layer) + sum(self.routed)

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
        """Widths of the norms of queries and keys by head, or of DeltaNet's outputs."""
        a = self.model.attention
        if isinstance(a, DeltaNetConfig):
            return (a.value_dim,)
        return (self.model.H,) * 2 if getattr(a, "qk_norm", "none") == "head" else ()

    @property
    def whole_norms(self) -> tuple[int, ...]:
        """Widths on a device of the norms of queries and keys over all heads."""
        heads = self.model.heads, self.model.K
        whole = getattr(self.model.attention, "qk_norm", "none") == "whole"
        return tuple(n * self.model.H // self.tensor for n in heads) if whole else ()

    @property
    def taps(self) -> tuple[int, ...]:
        """Elements on a device of each tap of DeltaNet's convolutions of q, k and v."""
        a = self.model.attention
        if not isinstance(a, DeltaNetConfig):
            return ()
        keys, values = a.key_heads * a.key_dim, a.value_heads * a.value_dim
        return tuple(width // self.tensor for width in (keys, keys, values)) * a.conv

    @property
    def rates(self) -> tuple[int, ...]:
        """Elements on a device of the rates and the time biases by which DeltaNet's states fade."""
        a = self.model.attention
        return (a.value_heads // self.tensor,) * 2 if isinstance(a, DeltaNetConfig) else ()

    @property
    def rope_key(self) -> int:
        """Width of the rotated key that all heads of MLA share; 0 without MLA."""
        a = self.model.attention
        return a.rope_dim if isinstance(a, MLAConfig) else 0
