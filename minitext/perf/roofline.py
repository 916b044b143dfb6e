"""Rooflines: how long the operations of a function should take on this machine or any chip.

An operation takes as long as its FLOPs at the matmul peak or its bytes at the memory's bandwidth, whichever is longer
(Williams et al. 2009), and a step takes the sum over its operations. Nothing is fitted: both rates are measured, or
come from the data sheet.

Chapters: 3.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from minitext import hardware, kernels
from minitext.config.config import Config
from minitext.errors import UserError
from minitext.perf.cost import PARTS, Operation, count
from minitext.perf.sizes import check_products
from minitext.sharding.mesh import abstract_mesh
from minitext.terminal import print_tables, table
from minitext.training.step import abstract_batch, abstract_state, make_train_step

# How often their loops run hangs on how many tokens each expert gets, which a jaxpr doesn't say.
DATA_DEPENDENT = (("grouped_matmul", "xla_blocked"), ("grouped_matmul", "pallas_gpu"))


@dataclass(frozen=True)
class Machine:
    """The rates of a processor that a prediction needs.

    Attributes:
      name: the chip's name, or `this machine`.
      peaks: matmul peak in FLOP/s by dtype; float32's applies to missing types.
      bandwidth: bytes/s between the processor and its memory.
    """

    name: str
    peaks: dict[str, float]
    bandwidth: float

    def peak(self, dtype: str) -> float:
        """The matmul peak in FLOP/s for operands of a type."""
        return self.peaks.get(dtype, self.peaks["float32"])

    def ridge(self, dtype: str) -> float:
        """The intensity in FLOPs per byte above which products are bound by arithmetic instead of memory."""
        return self.peak(dtype) / self.bandwidth

    def seconds(self, op: Operation) -> float:
        """How long all runs of an operation take if either arithmetic or memory is always busy."""
        return op.runs * max(self._arithmetic(op), op.bytes / self.bandwidth)

    def limit(self, op: Operation) -> str:
        """What bounds an operation: `compute` or `memory`."""
        return "compute" if self._arithmetic(op) > op.bytes / self.bandwidth else "memory"

    def _arithmetic(self, op: Operation) -> float:
        # Elementwise arithmetic runs on other units, which are bound by memory.
        return op.flops / self.peak(op.dtype) if op.is_product else 0.0


def this_machine(dtype: str = "float32") -> Machine:
    """Measures JAX's default device in a few seconds; the result is cached for a day.

    Args:
      dtype: the type whose matmul peak to measure, in addition to float32.
    """
    peaks = {name: hardware.measure_matmul_peak(name) for name in ("float32", dtype)}
    return Machine("this machine", peaks, hardware.measure_bandwidth())


def chip_machine(chip: hardware.Chip) -> Machine:
    """Returns one JAX device of a chip of the table, from its data sheet."""
    kinds = {"float32": "float32", "bfloat16": "bf16"}
    # A narrow type that the matrix unit doesn't take is multiplied as a wider one.
    for dtype, kind in ("int8", "int8"), ("float8_e4m3fn", "f8"), ("float8_e5m2", "f8"):
        kinds[dtype] = kind if kind in chip.flops else "bf16"
    peaks = {dtype: chip.peak(kind) / chip.devices for dtype, kind in kinds.items()}
    return Machine(chip.name, peaks, chip.hbm_bandwidth / chip.devices)


def count_step(cfg: Config, chip: str | None = None) -> list[Operation]:
    """Counts the operations of a train step, with the kernels that it uses on a chip (None: on this machine).

    Nothing is allocated and no compiler runs, so counting a model of any size takes a second. For a GPU with `auto`,
    XLA's attention is counted, because our kernel's programs choose what they load while they run. For the same reason,
    the products of experts are counted as XLA's on a GPU and on a CPU.
    """
    row = hardware.CHIPS[chip] if chip else None
    if row and row.platform == "gpu" and cfg.model.attention.impl == "auto":
        cfg = cfg.replace({"model.attention.impl": "xla"})
    mesh = abstract_mesh(chip=row)
    with jax.sharding.use_abstract_mesh(mesh), kernels.leave_out(*DATA_DEPENDENT):
        step = make_train_step(cfg, mesh)
        return count(step, abstract_state(cfg, mesh), abstract_batch(cfg, mesh))


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a train step.

    Attributes:
      machine: the processor.
      devices: how many share the work evenly.
      parts: seconds of each of `minitext.perf.cost.PARTS`.
      rows: a dict for each operation, longest first; operations that differ only in their layer are summed.
      product_flops: FLOPs of all devices' products in a step, including recomputation.
    """

    machine: Machine
    devices: int
    parts: dict[str, float]
    rows: list[dict[str, Any]]
    product_flops: float

    @property
    def seconds(self) -> float:
        """The whole step's time."""
        return sum(self.parts.values())

    def to_json(self) -> dict[str, Any]:
        """Returns the prediction as JSON values."""
        return asdict(self) | {"seconds": self.seconds}


def predict(ops: Iterable[Operation], machine: Machine, devices: int = 1) -> Prediction:
    """Predicts a train step from its operations, which do not include what devices send each other."""
    parts, products = dict.fromkeys(PARTS, 0.0), 0.0
    rows: dict[tuple, dict[str, Any]] = {}
    for op in ops:
        share = replace(op, flops=op.flops / devices, bytes=op.bytes / devices)
        seconds = machine.seconds(share)
        parts[op.part] += seconds
        products += op.is_product * op.flops * op.runs
        row = rows.setdefault(
            (op.part, op.name, op.result, op.dtype, op.flops, op.bytes),
            {
                "part": op.part, "operation": op.name, "result": op.result, "dtype": op.dtype, "runs": 0.0,
                "flops": op.flops, "bytes": op.bytes, "intensity": op.intensity,
                "limit": machine.limit(share), "seconds": 0.0,
            },
        )  # fmt: skip
        row["runs"] += op.runs
        row["seconds"] += seconds
    ordered = sorted(rows.values(), key=lambda row: -row["seconds"])
    return Prediction(machine, devices, parts, ordered, products)


def predict_step(cfg: Config, chip: str | None = None) -> Prediction:
    """Predicts the train step of a configuration on this machine, or on `mesh.*` devices of a chip.

    Raises:
      UserError: if the table has no such chip, or if products are quantized and no chip is named.
    """
    if chip is None:
        check_products(cfg.model, "a step's roofline on this machine")
        # Simulated devices share one machine.
        return predict(count_step(cfg), this_machine(cfg.model.dtype))
    if chip not in hardware.CHIPS:
        raise UserError(f"there is no chip {chip!r}: choose chip={', '.join(hardware.CHIPS)}")
    devices = math.prod(size for size in cfg.mesh.sizes().values() if size > 0)
    return predict(count_step(cfg, chip), chip_machine(hardware.CHIPS[chip]), devices)


def print_prediction(prediction: Prediction, dtype: str, shown: int = 20) -> None:
    """Prints the longest operations, and each part's time, on stdout."""
    machine, total = prediction.machine, prediction.seconds
    rows = [
        (
            row["part"], row["operation"], row["result"], f"{row['runs']:,.0f}", f"{row['flops'] / 1e6:,.1f}",
            f"{row['bytes'] / 1e6:,.2f}", f"{row['intensity']:,.1f}", row["limit"], f"{row['seconds'] * 1e3:,.2f}",
        )
        for row in prediction.rows[:shown]
    ]  # fmt: skip
    heads = ("part", "operation", "result", "runs", "MFLOP", "MB", "FLOP/B", "bound by", "ms")
    peak = machine.peak(dtype)
    print_tables(
        f"{machine.name}: {peak / 1e12:,.3g} TFLOP/s in {dtype}, {machine.bandwidth / 1e9:,.3g} GB/s, ridge at "
        f"{machine.ridge(dtype):,.3g} FLOP/byte; {prediction.devices:,} device(s)",
        table(heads, rows, right=(3, 4, 5, 6, 8)),
        table(
            ("part", "ms", "share"),
            [(name, f"{s * 1e3:,.2f}", f"{s / total:.0%}") for name, s in prediction.parts.items()],
            right=(1, 2),
        ),
        f"a step: {total * 1e3:,.2f} ms if nothing but arithmetic and memory takes time; its products run at "
        f"{prediction.product_flops / prediction.devices / peak / total:.0%} of the peak",
    )
