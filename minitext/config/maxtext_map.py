"""MaxText's settings as ours: every key mapped, or named with the reason why not.

Keys of the same meaning are rows of `maxtext.yml` whose `here` is one of our keys. Those whose values mean something
else here (a batch for each device, axes within and across slices, fractions of a schedule) have a function below. The
model's are in `minitext.config.maxtext_model`.

Chapters: 27.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minitext.config import maxtext, maxtext_model
from minitext.config.config import (
    Config,
    ConfigError,
    flatten,
    layout,
    load_config,
    presets,
    resolve,
)
from minitext.config.maxtext_command import Reading, is_variable
from minitext.errors import UserError, did_you_mean

ICI = ("data", "fsdp", "tensor", "tensor_sequence", "context", "sequence", "expert", "pipeline", "fsdp_transpose",
       "autoregressive", "context_autoregressive", "context_usp_ulysses")  # fmt: skip
# Their axis -> ours.
AXES = {
    "data": "data", "fsdp": "fsdp", "fsdp_transpose": "fsdp", "tensor": "tensor", "tensor_sequence": "tensor",
    "autoregressive": "tensor", "context": "context", "sequence": "context", "context_usp_ulysses": "context",
    "context_autoregressive": "context", "expert": "expert", "pipeline": "stage",
}  # fmt: skip
# A policy there -> the tensors of a layer that ours keeps; None: all products.
REMAT: dict[str, tuple[str, ...] | None] = {
    "minimal": None, "minimal_flash": ("qkv", "attention", "attention_out", "gate_up"),
    "minimal_with_context": ("qkv", "attention", "attention_out", "gate_up"),
    "save_dot_except_mlp": ("qkv", "attention_out"), "save_dot_except_mlpwi": ("qkv", "attention_out"),
    "save_dot_with_context_except_mlp": ("qkv", "attention", "attention_out"), "save_qkv_proj": ("qkv",),
    "save_out_proj": ("attention_out",), "minimal_offloaded": (), "qkv_proj_offloaded": (),
}  # fmt: skip
TENSORS = {
    "context": "attention", "query_proj": "qkv", "key_proj": "qkv", "value_proj": "qkv", "kv_proj": "qkv",
    "qkv_proj": "qkv", "out_proj": "attention_out", "attention_out": "attention_out", "mlpwi": "gate_up",
    "mlpwi_0": "gate_up", "mlpwi_1": "gate_up", "moe_mlpwi_0": "gate_up", "moe_mlpwi_1": "gate_up",
    "query_wa_proj": "latents", "kv_wa_proj": "latents",
}  # fmt: skip
# Defaults of reinforcement learning.
RL = {
    "num_batches": 4, "rl.num_iterations": 1, "train_fraction": 1.0, "num_epoch": 1, "batch_size": 1,
    "rl.num_generations": 2, "train_micro_batch_size": -1,
}  # fmt: skip
MOST_ROWS = 2**31 - 1  # in a batch; more is a slip
OF_THE_TRAINING_ONLY = ("logical_axis_rules", "mesh_axes")  # lists too long to repeat
# Keys of the model that `model_keys` reads.
_MODEL = (
    "decoder_block", "model_name", "global_parameter_scale", "vocab_size", "head_dim", "normalization_layer_epsilon",
    "logits_via_embedding", "normalize_embedding_logits", "final_logits_soft_cap", "attn_logits_soft_cap",
    "mlp_activations", "mlp_activations_limit", "attention_bias", "attention_sink", "use_qk_norm",
    "use_post_attn_norm", "use_post_ffw_norm", "temperature_tuning", "attention_type", "mlp_bias",
    "sliding_window_size", "chunk_attn_window_size", "rope_type", "rope_max_timescale", "rope_min_timescale",
    "local_rope_max_timescale", "rope_linear_scaling_factor", "rope_use_scale", "rope_factor", "beta_fast",
    "beta_slow", "mscale", "rope_interleave", "rope_truncate", "rope_attention_scaling", "max_position_embeddings",
    "original_max_position_embeddings", "partial_rotary_factor", "nope_layer_interval", "interleave_moe_layer_step",
    "inhomogeneous_layer_cycle_interval", "num_experts", "num_experts_per_tok", "capacity_factor",
    "load_balance_loss_weight", "norm_topk_prob", "first_num_dense_layers", "shared_experts", "routed_scaling_factor",
    "routed_score_func", "routed_bias", "routed_bias_update_rate", "n_routing_groups", "topk_routing_group",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "gdn_conv_kernel_dim",
    "gdn_key_head_dim", "gdn_value_head_dim", "gdn_num_key_heads", "gdn_num_value_heads",
    *(f"base_{name}" for name in maxtext_model.BASE),
)  # fmt: skip


@dataclass(frozen=True)
class Key:
    """What became of one of MaxText's keys.

    Attributes:
      name: the key.
      value: its value.
      status: mapped; by hand (there is something here, which isn't set for you); default (MaxText's own
        value, with nothing to set); none (no counterpart); unknown (MaxText has no such key).
      ours: our keys with their values, or the reason.
    """

    name: str
    value: Any
    status: str
    ours: str


@dataclass
class Machine:
    """The chips.

    Attributes:
      chip: such as v5p; None if it isn't known.
      devices: of one slice.
      slices: how many.
      shape: of a slice, if it is known.
    """

    chip: str | None
    devices: int
    slices: int = 1
    shape: tuple[int, ...] | None = None

    @property
    def target(self) -> str | None:
        """The machine as a target of `minitext compile`, or None."""
        if self.chip is None or self.shape is None:
            return None
        text = f"{self.chip}:{'x'.join(map(str, self.shape))}"
        return text if self.slices == 1 else f"{text} slices={self.slices}"


@dataclass
class Translation:
    """MaxText's settings as ours.

    Attributes:
      cfg: the configuration; None if minitext can't build the model, or the settings don't go together.
      refused: why not.
      keys: what became of each key that was given.
      words: what `minitext train` takes.
      machine: the chips.
      notes: what differs, one line each.
    """

    cfg: Config | None
    refused: str | None
    keys: list[Key]
    words: list[str]
    machine: Machine
    notes: list[str] = field(default_factory=list)


def translate(reading: Reading, machine: Machine) -> Translation:
    """Maps what was read to our settings.

    Args:
      reading: what MaxText's command or file sets.
      machine: the chips that it is for.

    Raises:
      UserError: for a value of the wrong type.
    """
    work = _Work(reading, machine)
    refused = work.model()
    for part in (
        work.batch,
        work.mesh,
        work.memory,
        work.optimizer,
        work.data,
        work.objective,
        work.run,
    ):
        part()
    if reading.options:
        work.put("xla.options", [*reading.options], *({"compile_xla_flags"} & reading.given.keys()))
    keys = [work.report(key, value) for key, value in reading.given.items()]
    if refused:
        return Translation(None, refused, keys, [], machine, work.notes)
    work.settings.setdefault("data.source", "stdlib")
    try:
        cfg = resolve([("MaxText", work.settings)])
    except ConfigError as error:
        return Translation(None, "; ".join(error.problems[:4]), keys, [], machine, work.notes)
    return Translation(cfg, None, keys, train_words(cfg), machine, work.notes)


def train_words(cfg: Config) -> list[str]:
    """Returns the shortest words after `minitext train` that give a configuration: a preset, perhaps, and the rest.

    Of a preset's own values, only how often it saves and evaluates stays.
    """
    wanted = flatten(cfg.model_dump(mode="json"))
    best: list[str] | None = None
    for name in [None, *presets()]:
        base = resolve([]) if name is None else load_config(name)
        there = flatten(base.model_dump(mode="json"))
        differing = [key for key, value in wanted.items() if there.get(key, ...) != value]
        if name is not None:
            if any(key in SIZES for key in differing):
                continue
            own = resolve([]).model_dump(mode="json")["train"]
            differing = [
                k for k in differing if k not in OFTEN or wanted[k] != own[k.partition(".")[2]]
            ]
        words = [f"{key}={_text(wanted[key])}" for key in differing]
        words = words if name is None else [name, *words]
        if best is None or len(words) < len(best):
            best = words
    return best or []


SIZES = ("model.vocab", "model.layers", "model.embed", "model.heads", "model.kv_heads", "model.mlp")
OFTEN = ("train.save_every", "train.eval_every", "train.eval_batches")


def _text(value: Any) -> str:
    """Returns a value as the command line takes it."""
    if isinstance(value, list | dict):
        return _flow(value)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return (
        f"{value:.12g}"
        if isinstance(value, float) and value == float(f"{value:.12g}")
        else str(value)
    )


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _text(value)


class _Work:
    """The settings while they are made."""

    def __init__(self, reading: Reading, machine: Machine):
        self.given, self.values, self.machine = reading.given, reading.values, machine
        self.settings: dict[str, Any] = {}
        self.mapped: dict[str, str] = {}  # their key -> ours
        self.reasons: dict[str, str] = {}  # their key -> why it isn't mapped
        self.notes: list[str] = list(reading.notes)

    # --- values

    def number(self, key: str) -> float:
        return maxtext_model.number(self.values, key)

    def whole(self, key: str) -> int:
        return maxtext_model.whole(self.values, key)

    def truth(self, key: str) -> bool:
        return maxtext_model.truth(self.values, key)

    def text(self, key: str) -> str:
        value = self.values.get(key)
        return "" if value is None else str(value)

    def put(self, ours: str, value: Any, *theirs: str) -> None:
        """Sets one of our keys from theirs."""
        self.settings[ours] = value
        for key in theirs:
            more = f"{self.mapped[key]}, " if key in self.mapped else ""
            self.mapped[key] = f"{more}{ours}={_text(value)}"

    def name(self, why: str, *theirs: str) -> None:
        """Says why keys aren't mapped."""
        self.reasons |= dict.fromkeys(theirs, why)

    # --- parts

    def model(self) -> str | None:
        """Sets the model; returns what it lacks, if it can't be built."""
        for key in _MODEL:
            if key in self.given:
                self.mapped[key] = "the model's settings"
        try:
            keys = maxtext_model.model_keys(self.values)
        except maxtext_model.Lacking as error:
            for key in _MODEL:
                self.mapped.pop(key, None)
                self.reasons[key] = "the model can't be built here"
            return str(error)
        if keys.get("model.head_dim", 0) * keys["model.heads"] == keys["model.embed"]:
            del keys["model.head_dim"]
        if keys.get("model.kv_heads") == keys["model.heads"]:
            del keys["model.kv_heads"]
        defaults = resolve([]).model_dump()
        self.settings |= {
            k: v for k, v in keys.items() if v is not None or _at(defaults, k) is not None
        }
        if (dtype := self.text("dtype")) in ("float32", "bfloat16"):
            self.put("model.dtype", dtype, "dtype")
        else:
            self.settings["model.dtype"] = "bfloat16"
            self.name(
                f"minitext has bfloat16 and float32, not {dtype[:40]}: model.dtype=bfloat16 is assumed",
                "dtype",
            )
        self.put("model.scan_layers", self.truth("scan_layers"), "scan_layers")
        if self.whole("mtp_num_layers"):
            self.notes.append(
                "mtp_num_layers: layers that predict further tokens are left out, and not counted"
            )
        if self.text("weight_dtype") == "bfloat16":
            self.notes.append(
                "weight_dtype=bfloat16: minitext's parameters and moments are float32, so its state needs twice the "
                "memory that MaxText's does"
            )
        self.quantization()
        return None

    def quantization(self) -> None:
        how = self.text("quantization")
        kinds = {"int8": "int8", "fp8": "fp8", "fp8_full": "fp8", "fp8_gpu": "fp8", "fp8_nanoo": "fp8",
                 "te_fp8_currentscaling": "fp8", "nanoo_fp8": "fp8"}  # fmt: skip
        if how in kinds:
            rules = [{"module": "blocks/.*", "dtype": kinds[how]}]
            if (
                self.settings.get("model.attention.kind") == "mla"
            ):  # which generation multiplies head by head
                rules.insert(0, {"module": ".*/attention/(k_up|v_up)", "dtype": "none"})
            self.put("model.quantization", rules, "quantization")
        elif how:
            self.name(f"minitext's products have int8 and fp8, not {how[:40]}", "quantization")

    def batch(self) -> None:
        """A batch for each device, accumulated, is one number here."""
        devices = self.machine.devices * self.machine.slices
        each, parts = (
            self.number("per_device_batch_size"),
            max(1, self.whole("gradient_accumulation_steps")),
        )
        total = each * devices
        if not 0 < total <= MOST_ROWS:
            raise UserError(
                f"per_device_batch_size={each:g} on {devices:,} devices: choose more than 0, and at most {MOST_ROWS:,} "
                "sequences in all"
            )
        if total != int(total):
            how = "MaxText leaves out the rest" if total > 1 else "1 is assumed"
            self.notes.append(
                f"per_device_batch_size={each:g} on {devices:,} devices isn't a whole batch: {how}"
            )
        self.put("train.global_batch", max(1, int(total)) * parts, "per_device_batch_size")
        self.put("train.microbatches", parts, "gradient_accumulation_steps")
        self.put("data.seq_len", self.whole("max_target_length"), "max_target_length")
        if chunks := self.whole("num_vocab_tiling"):
            self.put("train.loss_chunks", chunks, "num_vocab_tiling")

    def mesh(self) -> None:
        within = self.axes("ici", self.machine.devices)
        across = self.axes("dcn", self.machine.slices)
        sizes: dict[str, int] = dict.fromkeys(
            ("data", "fsdp", "tensor", "context", "expert", "stage"), 1
        )
        for name in ICI:
            sizes[AXES[name]] *= within[name] * across[name]
        for axis, size in sizes.items():
            theirs = [
                f"{net}_{name}_parallelism"
                for net in ("ici", "dcn")
                for name in ICI
                if AXES[name] == axis
            ]
            self.put(f"mesh.{axis}", size, *theirs)
        crossing: dict[str, list[str]] = {}
        for name in ICI:
            if across[name] > 1:
                crossing.setdefault(AXES[name], []).append(name)
        for axis, names in crossing.items():
            factor = math.prod(across[name] for name in names)
            self.put(f"mesh.dcn.{axis}", factor, *(f"dcn_{name}_parallelism" for name in names))
        odd = [name for name in ("fsdp_transpose", "autoregressive", "context_autoregressive", "context_usp_ulysses")
               if within[name] * across[name] > 1]  # fmt: skip
        for name in odd:
            self.notes.append(
                f"the axis {name} is counted as mesh.{AXES[name]}: minitext has none that splits so"
            )
        if within["tensor_sequence"] > 1:
            self.put("sharding.rules", "tp_seq", "ici_tensor_sequence_parallelism")
        elif self.truth("shard_optimizer_over_data"):
            self.put("sharding.rules", "zero1", "shard_optimizer_over_data")
        if sizes["context"] > 1 and self.settings.get("model.attention.kind", "gqa") == "gqa":
            how = {"ring": "ring", "all_gather": "allgather"}.get(
                self.text("context_parallel_strategy")
            )
            if how:
                self.put("model.attention.context", how, "context_parallel_strategy")
        if sizes["context"] > 1:
            self.notes.append(
                "mesh.context: minitext stores attention's scores of a split sequence, and MaxText's kernel doesn't"
            )
        if sizes["stage"] > 1:
            self.pipeline()

    def axes(self, network: str, devices: int) -> dict[str, int]:
        """Returns the sizes of the axes of one network, the one that is -1 resolved."""
        sizes = {name: self.whole(f"{network}_{name}_parallelism") for name in ICI}
        free = [name for name, size in sizes.items() if size == -1]
        known = math.prod(size for size in sizes.values() if size > 0)
        if any(size < 1 and size != -1 for size in sizes.values()) or len(free) > 1:
            wrong = next(
                (n for n, s in sizes.items() if s < 1 and s != -1), free[-1] if free else "data"
            )
            raise UserError(
                f"{network}_{wrong}_parallelism={sizes[wrong]}: one axis may be -1, and others are 1 or more"
            )
        if free:
            if devices % known:
                raise UserError(
                    f"{network}_{free[0]}_parallelism=-1: the other {network}_ axes take {known}, which doesn't divide "
                    f"{devices:,} {'devices' if network == 'ici' else 'slices'}: change them, or name another machine "
                    "with --target"
                )
            sizes[free[0]] = devices // known
        elif known != devices:
            raise UserError(
                f"the {network}_ axes multiply to {known:,} and the machine has {devices:,} "
                f"{'devices in a slice' if network == 'ici' else 'slices'}: set one axis to -1, or name another "
                "machine with --target"
            )
        return sizes

    def pipeline(self) -> None:
        repeats, parts = self.whole("num_pipeline_repeats"), self.whole("num_pipeline_microbatches")
        if repeats > 1:
            self.put("pipeline.schedule", "circular", "num_pipeline_repeats")
            self.put("pipeline.repeats", repeats, "num_pipeline_repeats")
        if parts > 0:
            self.put("pipeline.microbatches", parts, "num_pipeline_microbatches")

    def memory(self) -> None:
        """What a layer keeps for its backward pass."""
        policy = self.text("remat_policy")
        if policy in ("full", "none", ""):
            self.put("model.remat", "none" if policy == "none" else "full", "remat_policy")
        elif policy == "custom":
            self.custom_remat()
        elif policy in REMAT:
            kept = REMAT[policy]
            if kept is None:
                self.put("model.remat", "dots", "remat_policy")
            else:
                self.keep(kept)
            if "offloaded" in policy:
                self.notes.append(
                    f"remat_policy={policy}: what MaxText keeps in the host's memory is recomputed here"
                )
        else:
            self.name(
                f"minitext has no policy {policy[:40]}: model.remat=full is assumed", "remat_policy"
            )
            self.put("model.remat", "full")
        if self.truth("optimizer_memory_host_offload"):
            self.put("optim.offload", True, "optimizer_memory_host_offload")
        attention = self.text("attention")
        impl = {"dot_product": "xla", "cudnn_flash_te": "cudnn", "cudnn_flash_jax": "cudnn"}.get(
            attention
        )
        if impl:
            self.put("model.attention.impl", impl, "attention")
        elif attention in ("flash", "autoselected", ""):
            self.mapped["attention"] = (
                "model.attention.impl=auto, which takes the chip's own kernel where it can"
            )
        else:
            self.name(
                f"minitext has no attention {attention[:40]}: model.attention.impl=auto is assumed",
                "attention",
            )

    def custom_remat(self) -> None:
        kept, moved = dict[str, None](), list[str]()
        for theirs, ours in TENSORS.items():
            where = self.text(theirs)
            if where == "device":
                kept[ours] = None
                self.mapped[theirs] = f"model.remat_save has {ours}"
            elif where == "offload":
                moved.append(theirs)
                self.reasons[theirs] = "what MaxText keeps in the host's memory is recomputed here"
            elif theirs in self.given:
                self.mapped[theirs] = (
                    "recomputed, as model.remat=names does with all that it doesn't keep"
                )
        for theirs in ("decoder_layer_input", "mlpwo", "moe_mlpwo", "mla_q", "mla_kv"):
            if self.text(theirs) == "offload":
                moved.append(theirs)
        if "latents" in kept and self.settings.get("model.attention.kind") != "mla":
            del kept["latents"]
        self.keep(tuple(kept))
        if moved:
            self.notes.append(
                f"remat_policy=custom: {', '.join(moved)} would be in the host's memory there; here a layer's input "
                "stays on the device, and the rest is recomputed"
            )

    def keep(self, names: tuple[str, ...]) -> None:
        self.put("model.remat", "names" if names else "full", "remat_policy")
        if names:
            self.put("model.remat_save", list(names), "remat_policy")

    def optimizer(self) -> None:
        kinds = {"adamw": "adamw", "adam_pax": "adamw", "sgd": "sgd", "muon": "muon"}
        kind = kinds.get(self.text("opt_type"))
        if kind is None:
            self.name(
                f"adamw, adam_pax, sgd and muon are read, not {self.text('opt_type')[:40]}: adamw is assumed",
                "opt_type",
            )
        else:
            self.put("optim.kind", kind, "opt_type")
        steps, schedule = self.whole("steps"), self.whole("learning_rate_schedule_steps")
        if (said := steps) < 1:
            steps = schedule if schedule > 0 else 150_001
        if said < 1 and said != -1:  # which stands for the schedule's
            self.settings["train.steps"] = steps
            self.name(f"{said} is no number of steps: {steps:,} are assumed", "steps")
        else:
            self.put("train.steps", steps, "steps")
        self.put("train.save_every", max(1, self.whole("checkpoint_period")), "checkpoint_period")
        length = schedule if schedule > 0 else steps
        if 0 < schedule != steps:
            self.name("the schedule ends with train.steps", "learning_rate_schedule_steps")
        self.put(
            "optim.warmup_steps",
            int(length * self.number("warmup_steps_fraction")),
            "warmup_steps_fraction",
        )
        self.put("optim.learning_rate", self.number("learning_rate"), "learning_rate")
        self.put(
            "optim.min_ratio",
            self.number("learning_rate_final_fraction"),
            "learning_rate_final_fraction",
        )
        if (how := self.text("lr_schedule_type")) in ("cosine", "wsd"):
            self.put("optim.schedule", how, "lr_schedule_type")
        if how == "wsd":
            self.put(
                "optim.decay_share",
                self.number("wsd_decay_steps_fraction"),
                "wsd_decay_steps_fraction",
            )
        self.moments(kind)
        clip = self.number("gradient_clipping_threshold")
        if clip > 0:
            self.put("optim.clip_norm", clip, "gradient_clipping_threshold")
        else:
            self.put("optim.clip_norm", 1e6, "gradient_clipping_threshold")
        if self.text("mu_dtype") == "bfloat16":
            self.notes.append(
                "mu_dtype=bfloat16: moments are float32 here, two bytes more for each parameter"
            )

    def moments(self, kind: str | None) -> None:
        """What the optimizer keeps of gradients, and how weights decay."""
        muon = kind == "muon"
        self.put(
            "optim.b1",
            self.number("muon_beta" if muon else "adam_b1"),
            "muon_beta" if muon else "adam_b1",
        )
        self.put("optim.b2", self.number("adam_b2"), "adam_b2")
        self.put("optim.eps", self.number("adam_eps"), "adam_eps")
        decay = "muon_weight_decay" if muon else "adam_weight_decay"
        self.put("optim.weight_decay", self.number(decay), decay)
        if kind == "sgd":  # which has no other setting there than its rate
            for ours, theirs in (
                ("optim.b1", "adam_b1"),
                ("optim.weight_decay", "adam_weight_decay"),
            ):
                self.put(ours, 0.0, "opt_type")
                del self.mapped[theirs]
                self.name("MaxText's sgd has no momentum and no weight decay", theirs)

    def data(self) -> None:
        kind = self.text("dataset_type")
        path = self.text("dataset_path")
        match kind:
            case "synthetic":
                self.put("data.source", "grammar", "dataset_type")
            case "tfds":
                self.put("data.source", "tfds", "dataset_type")
                self.put("data.tfds_name", self.text("dataset_name") or "c4/en", "dataset_name")
                self.put("data.tfds_split", self.text("train_split"), "train_split")
                if path and ":" not in path:
                    self.put("data.path", path, "dataset_path")
            case "hf":
                self.put("data.source", "hf", "dataset_type")
                self.put(
                    "data.hf_name", self.text("hf_path") or self.text("dataset_name"), "hf_path"
                )
                if self.text("hf_name"):
                    self.put("data.hf_subset", self.text("hf_name"), "hf_name")
                self.put("data.hf_split", self.text("train_split"), "train_split")
            case "grain" if (files := self.text("grain_train_files")) and ":" not in files:
                parquet = self.text("grain_file_type") == "parquet"
                self.put(
                    "data.source",
                    "files" if parquet else "arrayrecord",
                    "dataset_type",
                    "grain_file_type",
                )
                self.put("data.path", files, "grain_train_files")
            case _:
                self.name(
                    f"no data of the kind {kind[:40]} that this machine has: data.source stays stdlib",
                    "dataset_type",
                )
        for key in ("dataset_path", "grain_train_files", "hf_train_files"):
            if ":" in self.text(key):
                self.name("minitext reads local files: copy it, and set data.path", key)
        columns = self.values.get("train_data_columns")
        if (
            isinstance(columns, list)
            and len(columns) == 1
            and self.settings.get("data.source") in ("hf", "tfds")
        ):
            self.put("data.text_key", str(columns[0]), "train_data_columns")

    def objective(self) -> None:
        """Post-training."""
        name = str(self.given.get("hf_path") or self.given.get("dataset_name") or "")
        chats = None
        if self.truth("use_sft"):
            chats = "conversations"
            self.mapped["use_sft"] = "minitext sft RUN, with data.source=conversations"
        elif self.truth("use_dpo"):
            chats = "preferences"
            self.put("objective.kind", "preference", "use_dpo")
            self.fill("objective.beta", "dpo.dpo_beta")
            self.fill("objective.label_smoothing", "dpo.dpo_label_smoothing")
        elif any(key.startswith("rl.") for key in self.given):
            chats = "prompts"
            self.put("objective.kind", "grpo")
            for ours, theirs in (
                ("group", "num_generations"), ("iterations", "num_iterations"), ("kl", "grpo_beta"),
                ("clip", "grpo_epsilon"), ("clip_high", "epsilon_high"),
            ):  # fmt: skip
                self.fill(f"objective.{ours}", f"rl.{theirs}")
            self.fill("objective.temperature", "decode_sampling_temperature")
            self.reinforcement()
        if chats:
            for ours in (
                "data.source",
                "data.hf_name",
                "data.tfds_name",
                "data.tfds_split",
                "data.text_key",
                "data.path",
                "data.hf_subset",
            ):
                self.settings.pop(ours, None)
                for theirs in [k for k, v in self.mapped.items() if v.startswith(f"{ours}=")]:
                    del self.mapped[theirs]
            self.put("data.source", chats, "dataset_type")
            self.put("data.hf_name", name or "json", "hf_path", "dataset_name")
        if self.given.get("lora.enable_lora") or (self.given.get("lora.lora_rank") or 0):
            self.fill("model.lora.rank", "lora.lora_rank")
            self.mapped["lora.enable_lora"] = "model.lora.rank above 0"
            self.fill("model.lora.alpha", "lora.lora_alpha")

    def reinforcement(self) -> None:
        """Sets the length of reinforcement learning and its batches, which there have keys of their own."""
        for key in ("steps", "learning_rate_final_fraction"):
            self.mapped.pop(key, None)
        self.name("num_batches says it in reinforcement learning", "steps")
        values = RL | self.values
        times = ("num_batches", "rl.num_iterations", "train_fraction", "num_epoch")
        steps = max(1, int(math.prod(maxtext_model.number(values, key) for key in times)))
        self.put("train.steps", steps, "num_batches")
        schedule = self.whole("learning_rate_schedule_steps")
        length = schedule if 0 < schedule != self.whole("steps") else steps
        warmup = int(length * self.number("warmup_steps_fraction"))
        self.put("optim.warmup_steps", warmup, "warmup_steps_fraction")
        self.settings["optim.min_ratio"] = 0.0
        self.name(
            "reinforcement learning there ends at a rate of 0", "learning_rate_final_fraction"
        )
        prompts, group, part = (
            maxtext_model.whole(values, key)
            for key in ("batch_size", "rl.num_generations", "train_micro_batch_size")
        )
        if "batch_size" in self.given:
            self.put("objective.prompts", prompts, "batch_size")
            self.put("train.global_batch", prompts * group, "batch_size")
            self.mapped.pop("per_device_batch_size", None)
            self.name("batch_size says it in reinforcement learning", "per_device_batch_size")
        if 0 < part < prompts and prompts % part == 0:
            self.put("train.microbatches", prompts // part, "train_micro_batch_size")
        answer = self.whole("max_target_length") - self.whole("max_prefill_predict_length")
        if answer > 0:
            self.put("objective.max_tokens", answer, "max_prefill_predict_length")

    def fill(self, ours: str, theirs: str) -> None:
        """Maps a key of post-training where it is given, a number or nothing."""
        if self.given.get(theirs) is not None and theirs in self.given:
            value = maxtext_model.number(self.given, theirs)
            self.put(
                ours, int(value) if value == int(value) and ours not in _FLOATS else value, theirs
            )

    def run(self) -> None:
        """The rest: rows that are one key of ours, under its name there."""
        if self.text("profiler") in ("xplane", "nsys"):
            first = self.whole("skip_first_n_steps_for_profiler") + 1
            steps = max(1, self.whole("profiler_steps") or 5)
            first = min(first, max(1, self.settings["train.steps"] - steps + 1))
            self.put("profile.first_step", first, "profiler", "skip_first_n_steps_for_profiler")
            self.put("profile.steps", min(steps, self.settings["train.steps"]), "profiler_steps")
        else:
            self.name(
                "no trace is asked for (profiler is empty)",
                "profiler",
                "profiler_steps",
                "skip_first_n_steps_for_profiler",
            )
        if self.machine.target and (topology := self.text("compile_topology")):
            slices = max(1, self.whole("compile_topology_num_slices"))
            if (slices, machine_of(topology, slices)) == (
                self.machine.slices,
                (self.machine.chip, self.machine.shape),
            ):
                said = f"target={self.machine.target}"
                self.mapped |= dict.fromkeys(
                    ("compile_topology", "compile_topology_num_slices"), said
                )
        for key, value in self.given.items():
            ours = same_key(key)
            if ours is None or key in self.mapped or key in self.reasons or value in ("", None):
                continue
            if is_variable(value):
                continue
            if ours == "data.epochs" and self.settings.get("data.source") in (
                "grammar",
                "hf",
                "prompts",
            ):
                self.name("rows are read until train.steps", key)
            elif isinstance(value, str) and ":" in value:
                self.name(f"{value[:60]} is not on this machine: set {ours} yourself", key)
            elif key in ("load_parameters_path", "load_full_state_path"):
                self.name(
                    f"first minitext maxtext import {value[:60]} RUN, then checkpoint.load_parameters=RUN",
                    key,
                )
            elif not _takes(ours, value):
                self.name(f"{ours} doesn't take {_text(value)[:40]}, which turns it off there" if value in (-1, 0) else
                          f"{ours} doesn't take {_text(value)[:40]}", key)  # fmt: skip
            else:
                self.put(ours, _typed(ours, value), key)

    # --- the report

    def report(self, key: str, value: Any) -> Key:
        """Returns what became of a key."""
        if is_variable(value):
            return Key(
                key,
                value,
                "none",
                "a variable that has no value here: MaxText's default is assumed",
            )
        shown = "..." if key in OF_THE_TRAINING_ONLY or len(str(value)) > 200 else value
        if key in self.mapped:
            return Key(key, shown, "mapped", self.mapped[key])
        default = self.values_default(key)
        if default is not ... and _same(value, default):
            return Key(key, shown, "default", "MaxText's own value")
        if key in self.reasons:
            return Key(key, shown, "none", self.reasons[key])
        row = maxtext.row(key)
        if row is None:
            known = [k for group in maxtext.groups() for r in group["rows"] for k in r["maxtext"]]
            return Key(
                key,
                shown,
                "unknown",
                f"MaxText of August 2026 has no such key{did_you_mean(key, known)}",
            )
        if "here" in row:
            return Key(key, shown, "by hand", row["here"])
        return Key(key, shown, "none", row["none"])

    def values_default(self, key: str) -> Any:
        return maxtext_model.facts()["defaults"].get(key, ...)


_FLOATS = ("objective.beta", "objective.label_smoothing", "objective.kl", "objective.clip", "objective.clip_high",
           "objective.temperature", "model.lora.alpha")  # fmt: skip


def same_key(key: str) -> str | None:
    """Returns our key of the same meaning and values, or None."""
    row = maxtext.row(key)
    here = (
        row.get("here", "")
        if row and key not in ("use_qwix_quantization", "quant_cfg_path")
        else ""
    )
    return here if here in layout().keys else None


def _takes(ours: str, value: Any) -> bool:
    try:
        resolve([("MaxText", {ours: _typed(ours, value)})])
    except ConfigError as error:
        # Rules between keys don't speak against the value; they are checked when all are there.
        return not any(f"{ours}=" in problem or f"{ours}:" in problem for problem in error.problems)
    return True


def _typed(ours: str, value: Any) -> Any:
    """Returns a number that YAML took for a text, such as 1e-4, as a number."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?[\d_.]+(?:[eE][-+]?\d+)?", value):
        return float(value)
    if (
        isinstance(value, float)
        and value.is_integer()  # infinity isn't
        and layout().keys[ours].annotation in (int, int | None)
    ):
        return int(value)
    return value


def _same(a: Any, b: Any) -> bool:
    try:
        return a == b or float(a) == float(b)
    except (TypeError, ValueError):
        return str(a).lower() == str(b).lower()


def _at(tree: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None  # pyright: ignore
    return tree


# Machines.

TWO_CORES = ("v2", "v3", "v4", "v5p")  # whose names count cores, of which a chip has two
LITE = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
NAMES = {"v5litepod": "v5e", "v5lite": "v5e", "v5e": "v5e", "v6e": "v6e", "v5p": "v5p", "v4": "v4", "tpu7x": "tpu7x",
         "v5": "v5p", "trillium": "v6e", "ironwood": "tpu7x"}  # fmt: skip


def machine_of(device: str, slices: int) -> tuple[str, tuple[int, ...]] | None:
    """Returns the chip and the shape of a slice that a device type names, such as v5p-128 or tpu7x-4x4x8; or None.

    v4 and v5p are counted in cores, two to a chip, as tpu7x is; others in chips.

    Raises:
      UserError: for a number of chips in which they don't come.
    """
    match = re.fullmatch(r"([a-z]+\d*[a-z]*)-?(\d+(?:x\d+)*)", device.strip().lower())
    if match is None or match[1] not in NAMES:
        gpus = re.match(r"h100\S*-(\d+)$", device.strip().lower())
        return ("h100", (1, slices, int(gpus[1]))) if gpus else None
    chip, sizes = NAMES[match[1]], match[2]
    if "x" in sizes:
        return chip, tuple(map(int, sizes.split("x")))
    count = int(sizes)
    if chip in ("v5e", "v6e"):
        if count not in LITE:
            raise UserError(
                f"{device}: {chip} comes in slices of {', '.join(map(str, LITE))} chips"
            )
        return chip, tuple(map(int, LITE[count].split("x")))
    chips = count // 2
    if count % 2 or chips < 1 or chips & (chips - 1):
        raise UserError(
            f"{device}: give the shape of the slice with --target, such as --target {chip}:4x4x8"
        )
    shape = [1, 1, 1]
    for i in range(chips.bit_length() - 1):
        shape[i % 3] *= 2
    return chip, tuple(sorted(shape))
