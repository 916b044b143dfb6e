"""Memory of a train step on each device: predicted by short formulas, and beside it what the compiler planned.

Parameters, optimizer state and batch are there from the beginning to the end. What comes and goes is highest at one
of three moments:

- at the loss, when every layer's activations are kept and nothing has been freed: the logits and their gradient;
- in the backward pass of a layer: the gradients of all layers, which a scan writes into one stack that is as large from
  its first turn as after its last, and what the layer computes again;
- at the update, where the optimizer's state comes back from the host, if that is where it waits, and where the
  gradients of large tables are still whole.

The largest of the three is the peak (Korthikanti et al. 2022 count the kept activations, Rajbhandari et al. 2020 the
state); `minitext.perf.memory` has their parts. Arrays in a TPU's memory are laid out
in tiles, and incomplete tiles take as much as full ones: `stored_bytes`.

Chapters: 14.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from minitext import kernels
from minitext.compiler import aot
from minitext.compiler.targets import topology_mesh
from minitext.config.config import Config
from minitext.config.model import MoEConfig
from minitext.hardware import find_chip
from minitext.models.flops import count_attention
from minitext.models.moe import capacity
from minitext.sharding.mesh import make_mesh
from minitext.sharding.pipeline_schedule import count_microbatches, forward_ticks, groups_per_stage
from minitext.sharding.rules import RULES
from minitext.terminal import print_tables, show_bytes, table
from minitext.training import compile
from minitext.training.step import abstract_batch, abstract_state, make_train_step

Moments = Mapping[str, Mapping[str, int]]

# Single large arrays, which need one piece of memory; the other parts are many small ones.
WHOLE = ("output layer's weight", "logits", "tables' gradients")

# Softmax over more keys than this writes its differences from the maximum beside the scores, in float32 as well: seen
# at 4,096 and not at 2,048 keys.
LONG = 2048

# Of the TPU's vector memory the compiler leaves a part to itself: 112 of 128 MiB are planned at most.
VMEM_SHARE = 7 / 8


class Shares:
    """Sizes of one device's part of everything, in numbers; `size` and `operand` are bytes of a number.

    Args:
      cfg: the configuration.
      mesh: axis -> size.
      platform: `cpu`, `gpu` or `tpu`.
      vmem: bytes of a TPU's vector memory; 0 plans everything in main memory.
    """

    def __init__(self, cfg: Config, mesh: dict[str, int], platform: str, vmem: int = 0):
        rules, model = RULES[cfg.sharding.rules], cfg.model

        def ways(name: str) -> int:
            return math.prod(mesh[axis] for axis in rules.table[name])

        self.vmem = int(vmem * VMEM_SHARE)
        self.stages = ways("layers")
        self.layers = model.layers // self.stages
        self.rows = cfg.train.global_batch // cfg.train.microbatches // ways("batch")
        self.loss_rows = self.rows
        self.passes, self.flying = 1, 0
        self.pipeline = None if self.stages == 1 else cfg.pipeline.schedule
        if self.pipeline:
            M = count_microbatches(cfg.pipeline, self.stages, self.rows)
            self.rows //= M
            if self.pipeline == "1f1b":
                self.loss_rows = self.rows
                self.flying = 2 * self.stages - 1 + 2
            else:
                groups = groups_per_stage(cfg.pipeline)
                ticks = forward_ticks(self.stages, M, groups)
                self.passes, self.flying = ticks / groups, ticks + M
        self.T = cfg.data.seq_len // ways("seq")
        self.X = self.rows * self.T  # tokens in a layer
        self.residual = self.X * model.embed * ways("seq") // ways("residual")
        heads = count_attention(model)
        self.q, self.out = heads.q // ways("heads"), heads.out // ways("heads")
        self.kv, self.latents = (heads.k + heads.v) // ways("kv_heads"), heads.latents
        self.ring = ways("seq") > 1 and model.attention.context == "ring"
        self.N, self.S = model.heads // ways("heads"), self.T if self.ring else cfg.data.seq_len
        stored = self.pipeline or not _flash(cfg, platform, ways("seq"))
        self.scores = self.rows * self.N * self.T * self.S if stored else 0
        self.D, self.V = model.embed, model.vocab // ways("vocab")
        # Of experts, F are the features of all slots of a token, and a device has the matrices of some.
        slots, matrices = _experts(cfg, ways("expert"))
        self.F, wide = (int(n * model.mlp) // ways("mlp") for n in (slots, matrices))
        # A layer's matrices as they are used; `fsdp` stores parts of them.
        self.layer = heads.split // ways("heads") + heads.whole + 3 * self.D * wide
        self.head, self.tables = self.V * self.D, 1 if model.tie_embeddings else 2
        self.fsdp = ways("embed")
        scatter = rules.of_optimizer.table["embed"] if rules.scatter else ()
        self.scattered = math.prod(mesh[axis] for axis in scatter)
        self.flat = ways("seq") == ways("residual") == 1  # rows are joined to [B*T, ...]
        self.size = 2 if model.dtype == "bfloat16" else 4
        # A TPU multiplies in bfloat16, and stores so what only products read.
        self.operand = 2 if platform == "tpu" else self.size
        self.tile = 128 if platform == "tpu" else 1

    def beyond_vector_memory(self, array: int) -> int:
        """Returns the bytes that an array much in use takes in main memory: none if the vector memory can hold it."""
        return 0 if array <= self.vmem else array


def _flash(cfg: Config, platform: str, context: int) -> bool:
    """Whether attention is the TPU's kernel, which stores no scores; over a split sequence it is not."""
    m = cfg.model
    if m.attention.impl not in ("auto", "pallas_tpu") or platform != "tpu" or context > 1:
        return False
    heads, shape = count_attention(m), (1, cfg.data.seq_len, m.heads)
    q, v = (
        jax.ShapeDtypeStruct((*shape, width // m.heads), m.dtype) for width in (heads.q, heads.out)
    )
    return kernels.IMPLEMENTATIONS["attention", "pallas_tpu"].supports(q, q, v) is None


def _experts(cfg: Config, ways: int) -> tuple[float, float]:
    """Returns for how many feed-forward layers a token needs room on its device, and how many are stored there."""
    ffn = cfg.model.ffn
    if not isinstance(ffn, MoEConfig):
        return 1, 1
    here = ffn.experts // ways
    slots = ffn.experts_per_token if ways == 1 else ways * min(ffn.experts_per_token, here)
    if C := capacity(ffn, cfg.data.seq_len):
        slots = ffn.experts * C / cfg.data.seq_len
    return slots + ffn.shared_experts, here + ffn.shared_experts


def moments(cfg: Config, s: Shares, params: int, optimizer: int) -> Moments:
    """Returns bytes at each moment; `params` and `optimizer` are the bytes of those on the device."""
    size, chunks = s.size, cfg.train.loss_chunks
    tokens = s.loss_rows * s.T // chunks
    # What needs no recomputation in a loop needs none for each microbatch: the sum has a place of its own.
    summed = params // s.scattered if cfg.train.microbatches > 1 else 0
    once = cfg.model.remat == "none" and not cfg.model.scan_layers
    blocks = params - s.tables * s.head // s.fsdp * 4
    if once:
        blocks //= s.layers  # layers free what they kept, one by one, while gradients come
    # Casts of the stacked weights do not depend on the layer: the compiler makes them once, before the loop.
    cast = s.layers * s.layer // s.fsdp * size if size < 4 else 0
    # Each tick of a pipeline that autodiff turns round keeps what its layers keep, and their weights.
    weights = s.layer // s.fsdp * size if s.passes > 1 else 0
    stacks = int(s.passes * s.layers * (kept(cfg, s) + weights))
    if cfg.model.remat == "none" and not s.pipeline:
        # Vector memory takes what is read most: all layers' probabilities, if they fit.
        probabilities = 0 if s.ring or not cfg.model.scan_layers else 4 * s.scores * s.layers
        stacks += s.beyond_vector_memory(probabilities) - probabilities
    always = {
        "activations kept": stacks if s.pipeline != "1f1b" else 0,
        "weights in the compute type": cast,
        "microbatches under way": s.flying * s.X * s.D * size,
    }
    # Softmax reads the logits and writes their gradient: to the same place, unless [B*T, V] becomes [B, T, V] between.
    # Of a vocabulary that tiles of 128 do not divide, tokens are then the last dimension, and turned round in float32.
    logits = size
    if s.flat and s.loss_rows > 1:
        logits = 4 + 4 if s.V % s.tile else size + s.operand
    # The weight's gradient is made at once if that is smaller than the logits' gradient, which it frees; else last.
    waits = chunks == 1 and tokens < s.D and s.pipeline != "1f1b"
    early = 0 if waits else s.head * size
    loss = {
        "output layer's weight": s.head * size,
        "logits": tokens * s.V * logits,
        "residual stream": s.residual * 4,
        "gradients": summed
        + (0 if chunks == 1 else s.head // s.fsdp * 4 + s.head * size)
        + (params if s.pipeline == "1f1b" else 0),
    }
    # A scan gathers a layer's weights again in its backward pass; what is not scanned keeps them all, for products.
    gathered = s.layers * s.layer * s.operand if once else s.layer * size
    layer = {
        "activations kept": stacks,  # 1F1B computes a microbatch's again after its loss
        "logits": tokens * s.V * s.operand if waits else 0,
        "gradients": summed + (params + params if s.pipeline == "1f1b" else blocks + early),
        "gathered weights": gathered if s.fsdp > 1 else 0,
        "a layer's working set": working_set(cfg, s),
    }
    # Tables' gradients are split over fsdp only after the clipping norm is known: until then they are whole.
    whole = s.tables * (s.head * size - s.head // s.fsdp * 4)
    update = {
        "logits": layer["logits"],
        "gradients": summed or params,
        "tables' gradients": max(0, whole),
        "state from the host": optimizer * cfg.optim.offload,
    }
    return {"loss": always | loss, "layer": always | layer, "update": update}


def kept(cfg: Config, s: Shares) -> int:
    """Returns the bytes of the activations that a layer keeps for its backward pass.

    Rematerialised, its input and the tensors with names that are saved. Otherwise what autodiff saves: for each norm
    three float32 arrays of the residual stream's size, the inputs and outputs of the projections, and attention's
    probabilities twice, in float32 for softmax's gradient and as the input of a product (a ring computes them again).
    Of layers that are not scanned the compiler keeps less, because it sees what is cheap to compute again: norms'
    inputs, queries, keys, values, attention's output, and one copy of the probabilities.
    """
    if cfg.model.remat == "none":
        scores, norms = 0 if s.ring else s.scores, 2
        products = s.X * (s.q + s.out + s.kv + s.latents)
        if cfg.model.scan_layers:
            norms, products = 6, products + 2 * s.residual + s.X * s.F + scores
        return 4 * (norms * s.residual + scores) + 2 * s.X * s.F * s.size + products * s.operand
    tensors = {
        "qkv": s.X * (s.q + s.kv),
        "attention": s.X * s.out,
        "attention_out": s.residual,
        "gate_up": 2 * s.X * s.F,
        "hidden": s.X * s.F,
        "latents": s.X * s.latents,
    }
    return s.size * (s.residual + sum(tensors[name] for name in set(cfg.model.saved)))


def working_set(cfg: Config, s: Shares) -> int:
    """Returns the bytes of what a layer's backward pass works on.

    The residual stream and its gradient in float32, and the larger of the gradient of attention's scores and the
    feed-forward layer's five arrays: gate, up, their product, and the gradients of two. Rematerialisation adds what was
    kept, which its barrier has taken out of the stacks before anything is computed, and the scores in float32, which
    it computes first of all. If attention's result is not kept either, the probabilities have been multiplied with the
    values before the feed-forward layer's turn.
    """
    attention, ffn = s.scores * s.size, 5 * s.X * s.F * s.size
    rest = 8 * s.residual
    if s.residual < s.X * s.D:
        rest += s.X * s.D * s.size  # tokens that a product gathered
    if cfg.model.remat == "none":
        if not cfg.model.scan_layers:
            ffn //= 5  # all but the product's gradient is in place
    else:
        scores = s.beyond_vector_memory(4 * s.scores)
        if s.S > LONG:
            attention = scores
        if not {"attention", "attention_out"} & set(cfg.model.saved):
            ffn += s.scores * s.size
        rest += scores + kept(cfg, s)
    return rest + max(attention, ffn)


def heap(found: Moments) -> dict[str, int]:
    """Returns the highest address in use at each moment, one after another.

    Addresses are given in the order of the program: an array takes the lowest hole that it fits into, and stays there.
    So memory that is free may be of no use, because the holes are too small. Small arrays fill any hole.
    """
    places: list[tuple[int, int, str]] = []  # begin, end, part
    tops = {}
    for moment, parts in found.items():
        held, still = dict.fromkeys(parts, 0), []
        for begin, end, part in sorted(places):
            stays = min(end - begin, parts.get(part, 0) - held.get(part, 0))
            if stays > 0:
                held[part] += stays
                still.append((begin, begin + stays, part))
        places = still
        for part, size in parts.items():
            while missing := size - held[part]:
                begin, end = _hole(places, missing if part in WHOLE else 1, missing)
                held[part] += end - begin
                places.append((begin, end, part))
        tops[moment] = max((end for _, end, _ in places), default=0)
    return tops


def _hole(places: list[tuple[int, int, str]], least: int, most: int) -> tuple[int, int]:
    """Returns begin and end of the lowest free addresses, at least so many and at most; above all places is no end."""
    free = 0
    for begin, end, _ in sorted(places):
        if begin - free >= least:
            return free, min(begin, free + most)
        free = max(free, end)
    return free, free + most


MOMENTS = {
    "loss": "at the loss",
    "layer": "in the backward pass of a layer",
    "update": "at the optimizer's update",
}


@dataclass(frozen=True)
class Memory:
    """Bytes of a train step on one device.

    Attributes:
      parameters: float32 parameters, padding of their layout included.
      optimizer: the optimizer's state, likewise; 0 if it waits on the host.
      batch: the step's arguments besides them.
      host: the optimizer's state in the host's memory.
      replicated: the part of parameters and optimizer that is whole on every device.
      moments: moment -> what is there then -> bytes, besides the arguments.
    """

    parameters: int
    optimizer: int
    batch: int
    host: int
    replicated: int
    moments: Moments

    @property
    def peak(self) -> str:
        """The moment at which the most memory is in use: `loss`, `layer` or `update`."""
        tops = heap(self.moments)
        return max(tops, key=lambda moment: tops[moment])

    @property
    def temporaries(self) -> int:
        """Memory in use at the peak besides the arguments, holes that nothing fits into included."""
        return max(heap(self.moments).values())

    @property
    def total(self) -> int:
        """Arguments and what is there at the peak besides them."""
        return self.parameters + self.optimizer + self.batch + self.temporaries

    def to_json(self) -> dict[str, Any]:
        """Returns the prediction as JSON-able values."""
        names = (
            "parameters",
            "optimizer",
            "batch",
            "host",
            "replicated",
            "temporaries",
            "total",
            "peak",
        )
        moments = {name: dict(parts) for name, parts in self.moments.items()}
        return {name: getattr(self, name) for name in names} | {"moments": moments}


def stored_bytes(shape: tuple[int, ...], itemsize: int, platform: str) -> int:
    """Returns what an array takes in a device's memory.

    A TPU stores the last two dimensions in tiles of 8 x 128 numbers of 32 bits (of 1, 2 or 4 rows if there are no more
    than that; 16 x 128 for 16 bits) and fills up incomplete ones; the compiler makes that dimension the last one which
    wastes less. A vector is filled up to a multiple of 128 numbers, and of 1,024 if it is longer than 512; a scalar
    takes 512 bytes. Other devices store numbers one after another.
    """
    size = math.prod(shape) * itemsize
    if platform != "tpu":
        return size
    if len(shape) < 2:
        tile = min(1024, max(128, 2 ** math.ceil(math.log2(max(1, size // itemsize)))))
        return itemsize * tile * math.ceil(max(1, size // itemsize) / tile)
    *rest, a, b = shape

    def tiled(rows, columns):
        height = min(8, 2 ** math.ceil(math.log2(rows))) * (4 // itemsize)
        return math.ceil(rows / height) * height * math.ceil(columns / 128) * 128

    return math.prod(rest) * min(tiled(a, b), tiled(b, a)) * itemsize


def predict(
    cfg: Config, mesh: Mesh | AbstractMesh, platform: str, vmem_bytes: int | None = None
) -> Memory:
    """Predicts the memory of `cfg`'s train step on each device of a mesh.

    Args:
      cfg: the configuration.
      mesh: the mesh; its shape is all that counts.
      platform: `cpu`, `gpu` or `tpu`.
      vmem_bytes: a TPU's vector memory, which the largest arrays of a layer leave main memory for, if they fit. Of a
        step whose temporaries fit all together, the prediction is what both memories hold. By default none.
    """
    state = abstract_state(cfg, mesh)

    def stored(tree, wanted=lambda x: True):
        return sum(
            stored_bytes(x.sharding.shard_shape(x.shape), x.dtype.itemsize, platform)
            for x in jax.tree.leaves(tree)
            if wanted(x)
        )

    optimizer = stored(state.opt_state)
    sizes = stored(state.params), optimizer
    found = moments(cfg, Shares(cfg, dict(mesh.shape), platform), *sizes)
    if vmem_bytes and max(heap(found).values()) > VMEM_SHARE * vmem_bytes:
        found = moments(cfg, Shares(cfg, dict(mesh.shape), platform, vmem_bytes), *sizes)
    return Memory(
        parameters=stored(state.params),
        optimizer=0 if cfg.optim.offload else optimizer,
        batch=stored((abstract_batch(cfg, mesh), state.step)),
        host=optimizer if cfg.optim.offload else 0,
        replicated=stored(
            (state.params, state.opt_state), lambda x: x.sharding.is_fully_replicated
        ),
        moments=found,
    )


def predict_and_compile(cfg: Config, target: str | None = None) -> dict[str, Any]:
    """Returns what `minitext memory --json` prints: a prediction and the compiler's figures for the same step.

    Args:
      cfg: the configuration.
      target: such as `v5e:2x4`; by default the devices that are there.

    Raises:
      UserError: for a bad target, or a mesh that fits neither the target nor the model.
    """
    mesh = make_mesh(cfg.mesh) if target is None else topology_mesh(target, cfg.mesh)
    device = mesh.devices.flat[0]
    platform = "gpu" if device.platform == "cuda" else device.platform
    chip = find_chip(device)
    vmem = 0 if chip is None else chip.vmem_bytes or 0
    predicted = predict(cfg, mesh, platform, vmem)
    compiled = _compile_here(cfg, mesh) if target is None else _compile_for(cfg, target)
    remarks = list(_notes(cfg, platform))
    if not compiled.get("fits", True):
        used, there = (show_bytes(compiled[name]) for name in ("total", "available"))
        remarks.insert(
            0, f"does not fit: {used} of {there}; the compiled figures are of a plan given up"
        )
    if "vector" in compiled and predicted.temporaries <= VMEM_SHARE * vmem:
        for name in ("temporaries", "total"):
            compiled[name] += compiled["vector"]
        inside = show_bytes(compiled["vector"])
        remarks.append(
            f"temporaries fit into vector memory, which holds {inside} of them, counted here; "
            "the rest is mostly scratch"
        )
    elif predicted.temporaries <= 2 * vmem:
        remarks.append(
            f"temporaries are little more than the {show_bytes(vmem)} of vector memory, and the compiler's choice of "
            "what it holds decides"
        )
    return {
        "target": target or device.device_kind,
        "devices": mesh.size,
        "mesh": {name: size for name, size in mesh.shape.items() if size > 1},
        "predicted": predicted.to_json(),
        "compiled": compiled,
        "notes": remarks,
    }


def _notes(cfg: Config, platform: str) -> Iterator[str]:
    """Yields a line for each setting that the formulas do not describe."""
    model, attention = cfg.model, cfg.model.attention
    if platform != "tpu":
        yield f"the formulas are those of the TPU compiler: XLA for {platform} plans otherwise"
    if not model.scan_layers and model.remat != "none":
        yield "of unrolled layers the compiler recomputes as it sees fit: model.remat is counted as in a scan"
    if attention.impl == "xla_blocked" or (attention.impl == "auto" and platform != "tpu"):
        yield "attention in blocks or by a kernel never holds all the scores that are counted here"
    if cfg.train.loss_impl != "xla":
        yield f"train.loss_impl={cfg.train.loss_impl}: logits are counted, which a kernel does not store"
    if attention.kind != "gqa":
        yield f"model.attention.kind={attention.kind}: norms and rotations of its own are not counted"
    if isinstance(model.ffn, MoEConfig):
        yield (
            "model.ffn.kind=moe: features of all slots are counted, full or empty; not the buffers of tokens' vectors "
            "before and after the experts, nor what ragged products take"
        )
    if cfg.optim.kind == "muon":
        yield "optim.kind=muon gathers whole matrices for the update, which are not counted here"


def _compile_here(cfg: Config, mesh: Mesh) -> dict[str, int]:
    step = make_train_step(cfg, mesh)
    with jax.set_mesh(mesh):
        compiled = step.lower(abstract_state(cfg, mesh), abstract_batch(cfg, mesh)).compile()
    sizes = aot.compiled_sizes(compiled)
    temporaries = sizes["temp_bytes"] + sizes["output_bytes"] - sizes["alias_bytes"]
    return {
        "arguments": sizes["argument_bytes"],
        "temporaries": temporaries,
        "total": sizes["argument_bytes"] + temporaries,
        "program": sizes["code_bytes"],
    }


def _compile_for(cfg: Config, target: str) -> dict[str, int]:
    report = compile.compile_preset(cfg, target)
    parts = report.arguments
    return {
        "parameters": parts.get("state.params", 0),
        "optimizer": parts.get("state.opt_state", 0),
        "batch": parts.get("batch", 0) + parts.get("state.step", 0),
        "temporaries": report.total_bytes - report.argument_bytes - report.code_bytes,
        "vector": report.vector_bytes,
        "total": report.total_bytes - report.code_bytes,
        "fits": report.fits,
        "available": report.available_bytes,
        "program": report.code_bytes,
    }


def print_memory(found: Mapping[str, Any]) -> None:
    """Prints the table of `predict_and_compile`'s figures on stdout."""
    predicted, compiled = found["predicted"], found["compiled"]
    names = {"parameters": "parameters", "optimizer": "optimizer state", "batch": "batch and step"}
    rows = [(label, predicted[name], compiled.get(name)) for name, label in names.items()]
    rows.append(("  whole on every device", predicted["replicated"], None))
    if "arguments" in compiled:
        arguments = sum(predicted[name] for name in names)
        rows.append(("arguments", arguments, compiled["arguments"]))
    peak = predicted["moments"][predicted["peak"]]
    rows.append(("temporaries at the peak", predicted["temporaries"], compiled["temporaries"]))
    rows += [(f"  {label}", size, None) for label, size in peak.items() if size]
    if holes := predicted["temporaries"] - sum(peak.values()):
        rows.append(("  holes too small for what came next", holes, None))
    rows.append(("total", predicted["total"], compiled["total"]))
    rows.append(("program", None, compiled["program"]))
    rows.append(("optimizer state on the host", predicted["host"], None))
    axes = ", ".join(f"mesh.{name}={size}" for name, size in found["mesh"].items())
    off = predicted["total"] / compiled["total"] - 1
    print_tables(
        f"{found['target']}: one of {found['devices']} devices ({axes or 'no mesh axis above 1'})",
        table(
            ("memory of one device", "predicted", "compiled"),
            [(name, *("" if x is None else show_bytes(x) for x in sizes)) for name, *sizes in rows],
            right=(1, 2),
        ),
        f"peak: {MOMENTS[predicted['peak']]}; predicted total {off:+.1%} of the compiled one",
        *(f"note: {line}" for line in found["notes"]),
    )


def print_optimizers(found: Mapping[str, Mapping[str, int]]) -> None:
    """Prints the table of `minitext.training.step.optimizer_memory`'s figures on stdout."""
    rows = [
        (kind, *(show_bytes(size) for size in (*parts.values(), sum(parts.values()))))
        for kind, parts in found.items()
    ]
    heads = ("optimizer", "parameters", "gradients", "state", "sum")
    print_tables(table(heads, rows, right=(1, 2, 3, 4)))
