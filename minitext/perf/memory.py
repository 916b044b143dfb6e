"""Memory of a train step on each device: predicted by short formulas, and beside it what the compiler planned.

Parameters, optimizer state and batch are there from the beginning to the end. What comes and goes is highest at one
of three moments:

- at the loss, when every layer's activations are kept and nothing has been freed: the logits and their gradient;
- in the backward pass of a layer: the gradients of all layers, which a scan writes into one stack that is as large from
  its first turn as after its last, and what the layer computes again;
- at the update, where the optimizer's state comes back from the host, if that is where it waits, and where the
  gradients of large tables are still whole.

The largest of the three is the peak (Korthikanti et al. 2022 count the kept activations, Rajbhandari et al. 2020 the
state); `minitext.perf.step_memory` has their parts. Arrays in a TPU's memory are laid out
in tiles, and incomplete tiles take as much as full ones: `stored_bytes`.

Chapters: 14.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from minitext.compiler import aot
from minitext.compiler.report import print_tables, show_bytes, table
from minitext.compiler.targets import topology_mesh
from minitext.config.model import MoEConfig
from minitext.config.sections import Config
from minitext.hardware import find_chip
from minitext.perf.step_memory import VMEM_SHARE, Moments, Shares, heap, moments
from minitext.sharding.mesh import make_mesh
from minitext.training.step import abstract_batch, abstract_state, make_train_step

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
    report = aot.compile_preset(cfg, target)
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
