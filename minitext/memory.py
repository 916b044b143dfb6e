"""Memory of a train step on each device: predicted by short formulas, and beside it what the compiler planned.

Parameters, optimizer state and batch are there from the beginning to the end. What comes and goes is highest at one
of three moments:

- at the loss, when every layer's activations are kept and nothing has been freed: the logits and their gradient;
- in the backward pass of a layer: the gradients of all layers, which a scan writes into one stack that is as large from
  its first turn as after its last, and what the layer computes again;
- at the update, where the optimizer's state comes back from the host, if that is where it waits.

The largest of the three is the peak (Korthikanti et al. 2022 count the kept activations, Rajbhandari et al. 2020 the
state). Arrays in a TPU's memory are laid out in tiles, and incomplete tiles take as much as full ones: `stored_bytes`.

Chapters: 14.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from minitext import aot
from minitext.compile_report import print_tables, show_bytes, table
from minitext.config import Config
from minitext.mesh import make_mesh
from minitext.sharding import RULES
from minitext.targets import topology_mesh
from minitext.train import abstract_batch, abstract_state, make_train_step

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
    moments: Mapping[str, Mapping[str, int]]

    @property
    def peak(self) -> str:
        """The moment at which most is there: `loss`, `layer` or `update`."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def temporaries(self) -> int:
        """What is there at the peak besides the arguments."""
        return sum(self.moments[self.peak].values())

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


def predict(cfg: Config, mesh: Mesh | AbstractMesh, platform: str) -> Memory:
    """Predicts the memory of `cfg`'s train step on each device of a mesh of `cpu`, `gpu` or `tpu` devices."""
    state = abstract_state(cfg, mesh)

    def stored(tree, wanted=lambda x: True):
        return sum(
            stored_bytes(x.sharding.shard_shape(x.shape), x.dtype.itemsize, platform)
            for x in jax.tree.leaves(tree)
            if wanted(x)
        )

    optimizer = stored(state.opt_state)
    return Memory(
        parameters=stored(state.params),
        optimizer=0 if cfg.optim.offload else optimizer,
        batch=stored((abstract_batch(cfg, mesh), state.step)),
        host=optimizer if cfg.optim.offload else 0,
        replicated=stored(
            (state.params, state.opt_state), lambda x: x.sharding.is_fully_replicated
        ),
        moments=_moments(
            cfg, _Shares(cfg, dict(mesh.shape), platform), stored(state.params), optimizer
        ),
    )


class _Shares:
    """Sizes of one device's part of everything, in numbers; `size` and `operand` are bytes of a number."""

    def __init__(self, cfg: Config, mesh: dict[str, int], platform: str):
        rules, model = RULES[cfg.sharding.rules], cfg.model

        def ways(name: str) -> int:
            return math.prod(mesh[axis] for axis in rules.table[name])

        self.rows = cfg.train.global_batch // cfg.train.microbatches // ways("batch")
        self.T = cfg.data.seq_len // ways("seq")
        self.X = self.rows * self.T  # tokens
        self.residual = self.X * model.embed * ways("seq") // ways("residual")
        self.q = model.heads * model.H // ways("heads")
        self.kv = 2 * model.K * model.H // ways("kv_heads")
        ring = ways("seq") > 1 and model.attention.context == "ring"
        self.N, self.S = model.heads // ways("heads"), self.T if ring else cfg.data.seq_len
        self.F, self.V = model.mlp // ways("mlp"), model.vocab // ways("vocab")
        self.D = model.embed
        # A layer's matrices, gathered for use, and as they are stored.
        self.layer = self.D * (2 * self.q + self.kv + 3 * self.F)
        self.fsdp = ways("embed")
        self.size = 2 if model.dtype == "bfloat16" else 4
        # A TPU multiplies in bfloat16, and stores so what only products read.
        self.operand = 2 if platform == "tpu" else self.size


def _moments(cfg: Config, s: _Shares, params: int, optimizer: int) -> dict[str, dict[str, int]]:
    """Returns bytes at each moment; `params` and `optimizer` are the bytes of those on the device."""
    size, layers, chunks = s.size, cfg.model.layers, cfg.train.loss_chunks
    # What needs no recomputation in a loop needs none for each microbatch: the sum has a place of its own.
    summed = params if cfg.train.microbatches > 1 else 0
    # Casts of the stacked weights do not depend on the layer: the compiler makes them once, before the loop.
    cast = layers * s.layer // s.fsdp * size if size < 4 else 0
    head = s.V * s.D
    always = {
        "activations kept": layers * kept(cfg, s),
        "weights in the compute type": cast,
        "gradients": summed,
    }
    loss = {
        "output layer's weight": head * size,
        # Softmax reads the logits and writes their gradient; in chunks, the weight's gradient is summed up.
        "logits": 2 * s.X // chunks * s.V * size,
        "residual stream": s.residual * 4,
        "gradients": summed + (0 if chunks == 1 else head // s.fsdp * 4 + head * size),
    }
    layer = {
        "gradients": summed + params,
        "a layer's gathered weights": s.layer * size if s.fsdp > 1 else 0,
        "a layer's working set": working_set(cfg, s),
    }
    update = {"gradients": params, "state from the host": optimizer * cfg.optim.offload}
    return {"loss": always | loss, "layer": always | layer, "update": update}


def kept(cfg: Config, s: _Shares) -> int:
    """Returns the bytes of the activations that a layer keeps for its backward pass.

    Rematerialised, its input and the tensors with names that are saved. Otherwise what autodiff saves: for each norm
    three float32 arrays of the residual stream's size, the inputs and outputs of the projections, and attention's
    probabilities twice, in float32 for softmax's gradient and as the input of a product.
    """
    if cfg.model.remat == "none":
        scores = s.rows * s.N * s.T * s.S
        products = 2 * s.residual + s.X * (2 * s.q + s.kv + s.F) + scores
        return 4 * (6 * s.residual + scores) + 2 * s.X * s.F * s.size + products * s.operand
    tensors = {
        "qkv": s.X * (s.q + s.kv),
        "attention": s.X * s.q,
        "attention_out": s.residual,
        "gate_up": 2 * s.X * s.F,
        "hidden": s.X * s.F,
    }
    return s.size * (s.residual + sum(tensors[name] for name in set(cfg.model.saved)))


def working_set(cfg: Config, s: _Shares) -> int:
    """Returns the bytes of what a layer's backward pass works on.

    The residual stream and its gradient in float32, and the larger of the gradient of attention's scores and the
    feed-forward layer's five arrays: gate, up, their product, and the gradients of two. Rematerialisation adds what was
    kept, which its barrier has taken out of the stacks before anything is computed, and the scores in float32, which
    it computes first of all.
    """
    scores = s.rows * s.N * s.T * s.S
    again = 0 if cfg.model.remat == "none" else kept(cfg, s) + 4 * scores
    return again + 8 * s.residual + max(scores, 5 * s.X * s.F) * s.size


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
    compiled = _compile_here(cfg, mesh) if target is None else _compile_for(cfg, target)
    return {
        "target": target or device.device_kind,
        "devices": mesh.size,
        "mesh": {name: size for name, size in mesh.shape.items() if size > 1},
        "predicted": predict(cfg, mesh, platform).to_json(),
        "compiled": compiled,
    }


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
    report = aot.compile_preset(cfg, target)
    parts = report.arguments
    return {
        "parameters": parts.get("state.params", 0),
        "optimizer": parts.get("state.opt_state", 0),
        "batch": parts.get("batch", 0) + parts.get("state.step", 0),
        "temporaries": report.total_bytes - report.argument_bytes - report.code_bytes,
        "total": report.total_bytes - report.code_bytes,
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
    )


def print_optimizers(found: Mapping[str, Mapping[str, int]]) -> None:
    """Prints the table of `minitext.train.optimizer_memory`'s figures on stdout."""
    rows = [
        (kind, *(show_bytes(size) for size in (*parts.values(), sum(parts.values()))))
        for kind, parts in found.items()
    ]
    heads = ("optimizer", "parameters", "gradients", "state", "sum")
    print_tables(table(heads, rows, right=(1, 2, 3, 4)))
