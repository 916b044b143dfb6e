"""Memory of a train step on each device: predicted by short formulas, and beside it what the compiler planned.

Parameters, optimizer state and batch stay from beginning to end. What comes and goes peaks at one of three moments:

- at the loss, when every layer's activations are kept and nothing has been freed: the logits and their gradient;
- in a layer's backward pass: the gradients of all layers, which a scan writes into one stack that has its full size
  from the first iteration, and what the layer recomputes;
- at the update, when offloaded optimizer state comes back from the host, and the gradients of large tables are still
  whole.

The largest of the three is the peak memory (Korthikanti et al. 2022 count the kept activations, Rajbhandari et al. 2020
the state). A TPU stores arrays in tiles, and an incomplete tile takes as much memory as a full one: `stored_bytes`.

Chapters: 14.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from minitext import kernels
from minitext.compiler import aot
from minitext.compiler.targets import topology_mesh
from minitext.config.config import Config
from minitext.config.model import DeltaNetConfig, ModelConfig, MoEConfig
from minitext.errors import UserError
from minitext.hardware import find_chip
from minitext.models.deltanet import CHUNK
from minitext.models.flops import all_layers, count_attention
from minitext.models.moe import capacity
from minitext.perf.sizes import Sizes, check_products
from minitext.sharding.mesh import make_mesh
from minitext.sharding.pipeline_schedule import groups_per_stage
from minitext.terminal import print_tables, show_bytes, table
from minitext.training import compile
from minitext.training.step import (
    abstract_batch,
    abstract_state,
    check_trainable,
    make_train_step,
)

Moments = Mapping[str, Mapping[str, int]]
MOMENTS = {
    "loss": "at the loss",
    "layer": "in the backward pass of a layer",
    "update": "at the optimizer's update",
}

# Parts that are one large array and need one contiguous piece of memory; the others are many small arrays.
CONTIGUOUS = ("output layer's weight", "logits", "tables' gradients")

# Softmax over more keys than this also writes the scores minus their maximum, in float32: seen at 4,096 keys and not at
# 2,048.
LONG = 2048

# Rows on a device up to which the compiler's layouts for DeltaNet's chunks have little padding: seen at 4 and not at 8.
MOST_ROWS = 4
LANES = 128  # elements in a row of a TPU's vector register

# The TPU compiler plans at most 112 of the 128 MiB of vector memory.
VMEM_SHARE = 7 / 8


def _logit_bytes(s: Sizes, vocab: int) -> int:
    """Returns the bytes that a logit and its gradient take, of so many logits on a device."""
    # Softmax writes the logits' gradient over the logits, unless [B*T, V] is reshaped to [B, T, V] in between. If tiles
    # of 128 do not divide the vocabulary, tokens are then the last dimension, and transposed in float32.
    flat = s.context * s.sequence == 1
    if flat and s.rows // (s.parts if s.one_f_one_b else 1) > 1:
        return 4 + 4 if vocab % (128 if s.tpu else 1) else s.itemsize + s.operand
    return s.itemsize


def moments(s: Sizes, params: int, optimizer: int, vmem: int = 0, adapters: int = 0) -> Moments:
    """Returns the bytes of temporaries at each moment.

    Args:
      s: sizes of the step on one device.
      params: bytes of the device's parameters.
      optimizer: bytes of its optimizer state.
      adapters: bytes of its adapters, if only they are trained.
      vmem: bytes of vector memory that the compiler may use; 0 plans everything in main memory.
    """
    cfg, size, kinds = s.cfg, s.itemsize, s.kinds
    layers = sum(kind.layers for kind in kinds)
    chunks, vocab = cfg.train.loss_chunks, cfg.model.vocab // s.vocab
    tables, unrolled = 1 if cfg.model.tie_embeddings else 2, not cfg.model.scan_layers
    tokens, weights = s.tokens // chunks, sum(kind.layers * kind.weights for kind in kinds)
    # Accumulated gradients take memory of their own, which ZeRO-2 splits.
    scattered = s.optimizer if s.scatters else 1
    trained = adapters or params
    summed = trained // scattered if cfg.train.microbatches > 1 else 0
    unrolled_whole = cfg.model.remat == "none" and unrolled
    blocks = params - tables * s.table // s.fsdp * 4
    if unrolled_whole:
        blocks //= layers  # each layer frees what it kept while gradients arrive
    # The stacked weights are cast once, before the loop: their cast does not depend on the layer. Those that are stored
    # or sent in fewer bits are made layer by layer.
    casts = size < 4 and not cfg.model.is_stored and not s.rounded
    cast = weights // s.fsdp * size if casts else 0
    _, in_flight = _pipeline(s)
    stacks = _stacks(s, weights, vmem)
    always = {
        "activations kept": 0 if s.one_f_one_b else stacks,
        "weights in the compute type": cast,
        "microbatches under way": in_flight * s.layer_tokens * cfg.model.embed * size,
    }
    # The weight's gradient comes first if it is smaller than the logits' gradient, which it then frees; otherwise last.
    waits = chunks == 1 and tokens < cfg.model.embed and not s.one_f_one_b
    early = 0 if waits or adapters else s.table * size
    if adapters:
        blocks, waits = adapters, False
    loss = {
        "output layer's weight": s.table * size,
        "logits": tokens * vocab * _logit_bytes(s, vocab),
        "residual stream": _residual(s) * 4,
        "gradients": summed
        + (0 if chunks == 1 or adapters else s.table // s.fsdp * 4 + s.table * size)
        + (params if s.one_f_one_b else 0),
    }
    layer = {
        "activations kept": stacks,  # 1F1B recomputes a microbatch's after its loss
        "logits": tokens * vocab * s.operand if waits else 0,
        "gradients": summed + (params + params if s.one_f_one_b else blocks + early),
        "gathered weights": _gathered(s, weights),
        "a layer's working set": max(working_set(kind, vmem) for kind in kinds),
    }
    # Tables' gradients are split over fsdp only once the clipping norm is known: until then they are whole.
    whole = tables * (s.table * size - s.table // s.fsdp * 4)
    update = {
        "logits": layer["logits"],
        "gradients": summed or trained,
        "tables' gradients": 0 if adapters else max(0, whole),
        "state from the host": optimizer * cfg.optim.offload,
    }
    return {"loss": always | loss, "layer": always | layer, "update": update}


def _gathered(s: Sizes, weights: int) -> int:
    """Returns the bytes of weights, so many elements in all layers, that are made for a layer's backward pass."""
    largest = max(kind.weights for kind in s.kinds)
    if s.cfg.model.is_stored:  # made of the stored numbers, in float32 only inside a fusion
        return largest * s.itemsize
    if s.fsdp == 1:
        return 0
    # A scan gathers a layer's weights again; an unrolled stack keeps them all, for products.
    whole = s.cfg.model.remat == "none" and not s.cfg.model.scan_layers and not s.rounded
    return weights * s.operand if whole else largest * s.itemsize


def _stacks(s: Sizes, weights: int, vmem: int) -> int:
    """Returns the bytes of the activations that all layers keep, whose weights have so many elements."""
    passes, _ = _pipeline(s)
    found = sum(kind.layers * kept(kind) for kind in s.kinds)
    # Each tick of a pipeline that autodiff reverses keeps its layers' activations, and their weights.
    found = int(passes * (found + (weights // s.fsdp * s.itemsize if passes > 1 else 0)))
    if s.cfg.model.remat == "none" and s.stages == 1 and s.cfg.model.scan_layers:
        # The probabilities of all layers are read most: they go to vector memory if they fit.
        probabilities = sum(4 * _scores(kind) * kind.layers for kind in s.kinds if not _ring(kind))
        found += _beyond(vmem, probabilities) - probabilities
    return found


def kept(s: Sizes) -> int:
    """Returns the bytes of the activations that a layer keeps for its backward pass.

    With rematerialisation, these are its input and the named tensors that are saved. Without, they are what autodiff
    saves: for each norm three float32 arrays of the residual stream's size, the inputs and outputs of the projections,
    and attention's probabilities twice, in float32 for softmax's gradient and as an operand (a ring recomputes them).
    Of unrolled layers the compiler keeps less, because it sees what is cheap to recompute: norms' inputs, queries,
    keys, values, attention's output, and one copy of the probabilities.
    """
    tokens, features, residual = s.layer_tokens, _features(s), _residual(s)
    heads = count_attention(s.model)
    q, out = tokens * (heads.q // s.tensor), tokens * (heads.out // s.tensor)
    kv, latents = tokens * ((heads.k + heads.v) // s.tensor), tokens * heads.latents
    if s.model.remat == "none":
        scores, norms = 0 if _ring(s) else _scores(s), len(s.norms)
        products = q + out + kv + latents
        if s.model.scan_layers:
            norms, products = 3 * norms, products + 2 * residual + features + scores
        norms = norms * residual + scores
        return 4 * norms + 2 * features * s.itemsize + products * s.operand + _kept_more(s)
    tensors = {
        "qkv": q + kv + tokens * (_gates(s.model) // s.tensor),
        "attention": out,
        "attention_out": residual,
        "gate_up": 2 * features,
        "hidden": features,
        "latents": latents,
    }
    return s.itemsize * (residual + sum(tensors[name] for name in set(s.model.saved)))


def _gates(model: ModelConfig) -> int:
    """Returns the features of attention's gate and of DeltaNet's degrees of writing and fading, kept with the keys."""
    a = model.attention
    if isinstance(a, DeltaNetConfig):
        return a.value_heads * (a.value_dim + 2)
    return count_attention(model).q if getattr(a, "gate", False) else 0


def _kept_more(s: Sizes) -> int:
    """Returns the bytes that autodiff keeps of a layer for what a plain one lacks; found by compiling for v5e."""
    model, heads, tokens = s.model, count_attention(s.model), s.layer_tokens
    q, k = tokens * (heads.q // s.tensor), tokens * (heads.k // s.tensor)
    found = 9 * (q + k) if _norms_heads(s) else 0
    found += 6 * q if getattr(model.attention, "gate", False) else 0
    found += 4 * _residual(s) if model.norms == "both" else 0
    slots = _slots(s) * tokens
    features, inputs = int(slots * model.mlp) // s.tensor, int(slots) * model.embed
    found += 3 * features + 4 * inputs
    if s.moe and s.moe.bias:
        found += 4 * features + inputs
    return found * s.itemsize


def _norms_heads(s: Sizes) -> bool:
    return getattr(s.model.attention, "qk_norm", "none") in ("head", "whole")


def working_set(s: Sizes, vmem: int) -> int:
    """Returns the bytes that a layer's backward pass works on.

    These are the residual stream and its gradient in float32, and the larger of the gradient of attention's scores and
    what the feed-forward layer works on. Rematerialisation adds what was kept, which its barrier takes out of the
    stacks first, what attention's gradient reads later, and the float32 scores, which are recomputed first. If
    attention's result is not kept either, the probabilities are still there when the feed-forward layer is computed.
    """
    model, residual, whole = s.model, _residual(s), s.layer_tokens * s.model.embed
    attention, ffn = _scores(s) * s.itemsize, _ffn(s)
    rest = 8 * residual
    if residual < whole:
        rest += whole * s.itemsize  # tokens gathered for a product
    if model.remat == "none":
        # In an unrolled stack all but the product's gradient is computed in place.
        return rest + max(attention, ffn if model.scan_layers else ffn // 5)
    scores = _beyond(vmem, 4 * _scores(s))
    if _keys(s) > LONG:
        attention = scores
    attending = {"attention", "attention_out"} & set(model.saved)
    probabilities = 0 if attending else _scores(s) * s.itemsize
    rest += kept(s) + _recomputed(s)
    if s.moe and _keys(s) <= LONG:  # experts work before the float32 scores are there
        return rest + probabilities + max(scores + attention, ffn)
    return rest + scores + max(attention, ffn + probabilities)


def _ffn(s: Sizes) -> int:
    """Returns the bytes that the backward pass of a feed-forward layer works on.

    Those of a dense layer are gate, up, their product, and the gradients of two. An expert's slots also hold a token
    each, of which the compiler keeps either more features or more tokens, and, with biases, those of each slot.
    """
    features, tokens = _features(s), int(_slots(s) * s.layer_tokens) * s.model.embed
    if not s.moe:
        # An adapter's gradient reads the product first, and frees it; a weight's is computed last.
        return (4 if s.model.lora.rank else 5) * features * s.itemsize
    bias = 2 * features + tokens if s.moe.bias else 0
    return (max(5 * features + tokens, 3 * features + 6 * tokens) + bias) * s.itemsize


def _recomputed(s: Sizes) -> int:
    """Returns the bytes that a rematerialised layer recomputes for attention's gradient, and holds until then."""
    model, heads, tokens = s.model, count_attention(s.model), s.layer_tokens
    q, k, v, out = (
        tokens * (width // s.tensor) for width in (heads.q, heads.k, heads.v, heads.out)
    )
    found = (0 if "qkv" in model.saved else q + k + v) + (0 if "attention" in model.saved else out)
    # Norms read float32, of which they keep their input.
    found += (q + k) * 4 // s.itemsize if _norms_heads(s) else 0
    found += out if getattr(model.attention, "gate", False) else 0
    found += _residual(s) if model.norms != "before" else 0
    return found * s.itemsize + 4 * tokens * (_chunks(model) // s.tensor)


def _chunks(model: ModelConfig) -> int:
    """Returns the float32 numbers for each token of what DeltaNet's chunks compute, and their gradients: a rough count.

    The compiler orders and pads their dimensions in a way that no short rule foresees (`check`, `MOST_ROWS`).
    """
    a = model.attention
    if not isinstance(a, DeltaNetConfig):
        return 0
    return 16 * a.key_heads * a.key_dim + a.value_heads * (9 * a.value_dim + 14 * CHUNK)


def _beyond(vmem: int, array: int) -> int:
    """Returns the bytes of main memory that a much-used array takes: none if vector memory can hold it."""
    return 0 if array <= vmem else array


def _pipeline(s: Sizes) -> tuple[float, int]:
    """Returns how often a device keeps its layers' activations, and the microbatches in flight; (1, 0) without one."""
    if s.stages == 1:
        return 1, 0
    if s.one_f_one_b:
        return 1, 2 * s.stages - 1 + 2
    return s.ticks / groups_per_stage(s.cfg.pipeline), s.ticks + s.parts


def _residual(s: Sizes) -> int:
    """Returns the elements of the residual stream on a device."""
    return s.layer_tokens * s.model.embed // s.sequence


def _ring(s: Sizes) -> bool:
    return s.context > 1 and s.model.attention.context == "ring"


def _keys(s: Sizes) -> int:
    """Returns the keys that a query meets at a time."""
    return s.cfg.data.seq_len // (s.context if _ring(s) else 1)


def _scores(s: Sizes) -> int:
    """Returns the elements of attention's scores; 0 if the TPU's kernel, or DeltaNet, never stores them."""
    if isinstance(s.model.attention, DeltaNetConfig) or (s.stages == 1 and _flash(s)):
        return 0
    return s.layer_tokens * (s.model.heads // s.tensor) * _keys(s)


def _flash(s: Sizes) -> bool:
    """Whether attention is the TPU's kernel, which does not run over a split sequence."""
    m = s.model
    if m.attention.impl not in ("auto", "pallas_tpu") or not s.tpu or s.context > 1:
        return False
    heads, shape = count_attention(m), (1, s.cfg.data.seq_len, m.heads)
    q, v = (
        jax.ShapeDtypeStruct((*shape, width // m.heads), m.dtype) for width in (heads.q, heads.out)
    )
    return kernels.IMPLEMENTATIONS["attention", "pallas_tpu"].supports(q, q, v) is None


def _slots(s: Sizes) -> float:
    """Returns the slots of routed experts for each token, full or empty; 0 without experts."""
    if not s.moe:
        return 0
    experts, T = s.moe.experts, s.cfg.data.seq_len
    if C := capacity(s.moe, T):
        return experts * C / T
    return s.experts * min(s.moe.experts_per_token, experts // s.experts)


def _features(s: Sizes) -> int:
    """Returns the elements of a feed-forward layer's hidden features: with experts, those of all slots."""
    slots = _slots(s) + s.moe.shared_experts if s.moe else 1
    return s.layer_tokens * (int(slots * s.model.mlp) // s.tensor)


def heap(found: Moments) -> dict[str, int]:
    """Returns the highest address in use at each moment, one after the other.

    Addresses are assigned in program order: an array takes the lowest hole that it fits into, and stays there. Free
    memory can therefore be useless because its holes are too small. Small arrays fill any hole.
    """
    blocks: list[tuple[int, int, str]] = []  # begin, end, part
    tops = {}
    for moment, parts in found.items():
        held, still = dict.fromkeys(parts, 0), []
        for begin, end, part in sorted(blocks):
            stays = min(end - begin, parts.get(part, 0) - held.get(part, 0))
            if stays > 0:
                held[part] += stays
                still.append((begin, begin + stays, part))
        blocks = still
        for part, size in parts.items():
            while missing := size - held[part]:
                begin, end = _hole(blocks, missing if part in CONTIGUOUS else 1, missing)
                held[part] += end - begin
                blocks.append((begin, end, part))
        tops[moment] = max((end for _, end, _ in blocks), default=0)
    return tops


def _hole(blocks: list[tuple[int, int, str]], least: int, most: int) -> tuple[int, int]:
    """Returns begin and end of the lowest hole of at least `least` bytes, cut to `most`; the last one has no end."""
    free = 0
    for begin, end, _ in sorted(blocks):
        if begin - free >= least:
            return free, min(begin, free + most)
        free = max(free, end)
    return free, free + most


@dataclass(frozen=True)
class Memory:
    """Bytes of a train step on one device.

    Attributes:
      parameters: parameters, those that aren't trained too, including their layout's padding.
      optimizer: optimizer state, with padding; 0 if it is offloaded.
      batch: the step's other arguments.
      host: optimizer state in host memory.
      replicated: the part of parameters and optimizer state that every device holds whole.
      moments: moment -> part -> bytes of temporaries.
    """

    parameters: int
    optimizer: int
    batch: int
    host: int
    replicated: int
    moments: Moments

    @property
    def peak(self) -> str:
        """The moment of peak memory: `loss`, `layer` or `update`."""
        tops = heap(self.moments)
        return max(tops, key=lambda moment: tops[moment])

    @property
    def temporaries(self) -> int:
        """Peak memory without the arguments, including holes that nothing fits into."""
        return max(heap(self.moments).values())

    @property
    def total(self) -> int:
        """Peak memory: arguments and temporaries."""
        return self.parameters + self.optimizer + self.batch + self.temporaries

    def to_json(self) -> dict[str, Any]:
        """Returns the prediction as JSON-able values."""
        derived = {name: getattr(self, name) for name in ("temporaries", "total", "peak")}
        return asdict(self) | derived


def stored_bytes(shape: tuple[int, ...], itemsize: int, platform: str) -> int:
    """Returns the bytes that an array takes in a device's memory.

    A TPU stores two of the dimensions in tiles of 8 x 128 elements of 32 bits (1, 2 or 4 rows if that is enough; 16 x
    128 for 16 bits) and pads incomplete tiles; the compiler chooses the two, and their order, that waste least. A
    vector is padded to a multiple of 128 elements, and of 1,024 if it is longer than 512; a scalar takes 512 bytes.
    Other devices do not pad.
    """
    size = math.prod(shape) * itemsize
    if platform != "tpu":
        return size
    if itemsize < 4:  # stored weights have dimensions of size 1, which the compiler leaves out
        shape = tuple(n for n in shape if n > 1)
    if len(shape) < 2:
        tile = min(1024, max(128, 2 ** math.ceil(math.log2(max(1, size // itemsize)))))
        return itemsize * tile * math.ceil(max(1, size // itemsize) / tile)

    def waste(rows, columns):
        packed = 4 // itemsize  # rows in one of 32 bits
        height = min(8, 2 ** math.ceil(math.log2(math.ceil(rows / packed)))) * packed
        tiled = math.ceil(rows / height) * height * math.ceil(columns / 128) * 128
        return Fraction(tiled, rows * columns)

    return int(size * min(itertools.starmap(waste, itertools.permutations(shape, 2))))


def predict(
    cfg: Config, mesh: Mesh | AbstractMesh, platform: str, vmem_bytes: int | None = None
) -> Memory:
    """Predicts the memory of `cfg`'s train step on each device of a mesh.

    Args:
      cfg: the configuration.
      mesh: the mesh; only its shape counts.
      platform: `cpu`, `gpu` or `tpu`.
      vmem_bytes: a TPU's vector memory, to which the largest arrays of a layer go if they fit. If all temporaries of
        the step fit into it, the prediction counts both memories. By default none.

    Raises:
      UserError: for what the formulas don't know; see `check`.
    """
    check(cfg, mesh, platform)
    state = abstract_state(cfg, mesh)

    def stored(tree, wanted=lambda x: True):
        return sum(
            stored_bytes(x.sharding.shard_shape(x.shape), x.dtype.itemsize, platform)
            for x in jax.tree.leaves(tree)
            if wanted(x)
        )

    s, optimizer = Sizes(cfg, mesh, platform), stored(state.opt_state)
    params = stored((state.params, state.frozen))
    adapters = stored(state.params) if cfg.model.lora.rank else 0
    found = moments(s, params, optimizer, adapters=adapters)
    if vmem_bytes and max(heap(found).values()) > VMEM_SHARE * vmem_bytes:
        found = moments(s, params, optimizer, int(VMEM_SHARE * vmem_bytes), adapters)
    return Memory(
        parameters=params,
        optimizer=0 if cfg.optim.offload else optimizer,
        batch=stored((abstract_batch(cfg, mesh), state.step)),
        host=optimizer if cfg.optim.offload else 0,
        replicated=stored(
            (state.params, state.frozen, state.opt_state), lambda x: x.sharding.is_fully_replicated
        ),
        moments=found,
    )


def check(cfg: Config, mesh: Mesh | AbstractMesh, platform: str) -> None:
    """Refuses quantized products, and what the formulas don't know of weights sent in int8 and of gated DeltaNet.

    Raises:
      UserError: naming the setting.
    """
    model = cfg.model
    if model.lora.rank:  # beside which the weights may be stored in any form
        model = model.model_copy(update={"storage": ()})
    check_products(model, "memory")
    s = Sizes(cfg, mesh, platform)
    ticks = f"pipeline.schedule={cfg.pipeline.schedule}" if _pipeline(s)[0] > 1 else ""
    other = "model.ffn.kind=moe" if any(kind.moe for kind in s.kinds) else ticks
    if s.rounded and other:
        raise UserError(
            f"sharding.gather_dtype=int8 with {other}: the formulas for memory don't know it: set "
            "sharding.gather_dtype=auto, or measure by `minitext compile`"
        )
    for kind in s.kinds:
        a, rows = kind.model.attention, s.rows // s.parts
        if not isinstance(a, DeltaNetConfig):
            continue
        if cfg.model.remat == "none":
            found, fix = "model.remat=none", "set model.remat=full or dots"
        elif narrow := [n for n in ("key_dim", "value_dim") if getattr(a, n) % LANES]:
            found = f"model.attention.{narrow[0]}={getattr(a, narrow[0])}"
            fix = f"choose a multiple of {LANES}"
        elif rows > MOST_ROWS:
            found = f"train.global_batch={cfg.train.global_batch}, {rows} rows on a device"
            fix = f"choose at most {MOST_ROWS}, for instance by train.microbatches"
        else:
            continue
        raise UserError(
            f"{found}: the formulas for memory don't know model.attention.kind=deltanet with it: {fix}, or measure by "
            "`minitext compile`"
        )


def predict_and_compile(cfg: Config, target: str | None = None) -> dict[str, Any]:
    """Returns what `minitext memory --json` prints: a prediction and the compiler's figures for the same step.

    Args:
      cfg: the configuration.
      target: such as `v5e:2x4`; by default this machine's devices.

    Raises:
      UserError: for a bad target, or a mesh that fits neither the target nor the model.
    """
    mesh = make_mesh(cfg.mesh) if target is None else topology_mesh(target, cfg.mesh)
    check_trainable(cfg, mesh)
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
            0, f"does not fit: {used} of {there}; the compiler gave up on the plan shown here"
        )
    if "vector" in compiled and predicted.temporaries <= VMEM_SHARE * vmem:
        for name in ("temporaries", "total"):
            compiled[name] += compiled["vector"]
        inside = show_bytes(compiled["vector"])
        remarks.append(
            f"temporaries fit into vector memory: the figures include the {inside} that it holds; "
            "the rest is mostly scratch"
        )
    elif predicted.temporaries <= 2 * vmem:
        remarks.append(
            f"temporaries barely exceed the {show_bytes(vmem)} of vector memory: the total depends on what the "
            "compiler puts there"
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
    """Yields a line for each setting that the formulas do not cover."""
    model, attention = cfg.model, cfg.model.attention
    if platform != "tpu":
        yield f"these are the formulas for the TPU compiler: XLA for {platform} plans differently"
    if not model.scan_layers and model.remat != "none":
        yield "the compiler decides what unrolled layers recompute: model.remat is counted as in a scan"
    if attention.impl == "xla_blocked" or (attention.impl == "auto" and platform != "tpu"):
        yield "blocked or fused attention never holds all the scores that are counted here"
    if cfg.train.loss_impl != "xla":
        yield f"train.loss_impl={cfg.train.loss_impl}: logits are counted, but a kernel does not store them"
    if any(isinstance(layer.attention, DeltaNetConfig) for _, layer in all_layers(cfg.model)):
        yield (
            "model.attention.kind=deltanet: what its chunks take depends on layouts that the compiler chooses: the "
            "formula was up to a sixth too low for rows of 2,048 tokens, and closer for longer ones"
        )
    if any(isinstance(layer.ffn, MoEConfig) for _, layer in all_layers(cfg.model)):
        yield (
            "model.ffn.kind=moe: the slots of all experts are counted, full or empty; beside attention that stores its "
            "scores, as MLA's does, the formula was up to a quarter off"
        )
    if cfg.optim.kind == "muon":
        yield "optim.kind=muon gathers whole matrices for the update: they are not counted"


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
        "parameters": parts.get("state.params", 0) + parts.get("state.frozen", 0),
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
    """Prints what `predict_and_compile` returned."""
    predicted, compiled = found["predicted"], found["compiled"]
    names = {"parameters": "parameters", "optimizer": "optimizer state", "batch": "batch and step"}
    rows = [(label, predicted[name], compiled.get(name)) for name, label in names.items()]
    rows.append(("  replicated on every device", predicted["replicated"], None))
    if "arguments" in compiled:
        arguments = sum(predicted[name] for name in names)
        rows.append(("arguments", arguments, compiled["arguments"]))
    peak = predicted["moments"][predicted["peak"]]
    rows.append(("temporaries at the peak", predicted["temporaries"], compiled["temporaries"]))
    rows += [(f"  {label}", size, None) for label, size in peak.items() if size]
    if holes := predicted["temporaries"] - sum(peak.values()):
        rows.append(("  holes too small to use", holes, None))
    rows.append(("total", predicted["total"], compiled["total"]))
    rows.append(("program", None, compiled["program"]))
    rows.append(("optimizer state on the host", predicted["host"], None))
    axes = ", ".join(f"mesh.{name}={size}" for name, size in found["mesh"].items())
    error = predicted["total"] / compiled["total"] - 1
    print_tables(
        f"{found['target']}: one of {found['devices']} devices ({axes or 'no mesh axis above 1'})",
        table(
            ("memory of one device", "predicted", "compiled"),
            [(name, *("" if x is None else show_bytes(x) for x in sizes)) for name, *sizes in rows],
            right=(1, 2),
        ),
        f"peak: {MOMENTS[predicted['peak']]}; the predicted total is {error:+.1%} off the compiled one",
        *(f"note: {line}" for line in found["notes"]),
    )


def print_optimizers(found: Mapping[str, Mapping[str, int]]) -> None:
    """Prints what `minitext.training.step.optimizer_memory` returned."""
    rows = [
        (kind, *(show_bytes(size) for size in (*parts.values(), sum(parts.values()))))
        for kind, parts in found.items()
    ]
    heads = ("optimizer", "parameters", "gradients", "state", "sum")
    print_tables(table(heads, rows, right=(1, 2, 3, 4)))
