"""How long a compiled step should take on chips that this machine need not have: an interval and a best estimate.

`minitext.perf.step_schedule` simulates the compiler's schedule with the compiler's own cycle estimates, the machine
code of the kernels (`minitext.perf.kernel_time`), and the bandwidths of `minitext.hardware.CHIPS`. The interval reaches
from everything overlapped to nothing overlapped. It covers what the schedule leaves open, not errors of the estimates
themselves: benchmarks/step_time.py and benchmarks/blind_predictions.py compare these with published measurements.

Chapters: 22.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from minitext.compiler.aot import read_largest
from minitext.compiler.report import Report
from minitext.compiler.schedule import COMPUTE, DCN, KERNEL, QUEUES, operations, read_schedule
from minitext.compiler.targets import Target, fit_slices, parse_target, topology_mesh
from minitext.config.config import Config
from minitext.errors import DoesNotFit, UserError
from minitext.models.flops import count_flops
from minitext.perf.kernel_time import kernel_seconds
from minitext.perf.step_schedule import Event, Machine, Walk
from minitext.sharding.mesh import factors_across, show_factors
from minitext.terminal import print_tables, show_bytes, table
from minitext.training import compile

NAMES = {
    "compute": "compute", "kernels": "Pallas kernels", "ici": "collectives, exposed",
    "dcn": "between slices, exposed", "dma": "copies, exposed", "host": "host transfers, exposed",
}  # fmt: skip


@dataclass(frozen=True)
class StepTime:
    """A predicted step.

    Attributes:
      target: what it was compiled for.
      chips: the number of chips.
      seconds: the best estimate, which follows the program's schedule.
      lower: seconds if everything overlaps.
      upper: seconds if nothing overlaps.
      parts: the best estimate by what the core does or waits for.
      busy: seconds that each queue works.
      tokens: tokens in a step, all chips together.
      flops: model FLOPs of a step, all chips together (`minitext.models.flops.count_flops`).
      peak: FLOP/s of one chip.
      across: axes that cross slices, with the factor of each.
      sent_across: bytes that each device sends to other slices.
      events: what each queue does when, for `minitext.perf.figures.plot_schedule`.
    """

    target: str
    chips: int
    seconds: float
    lower: float
    upper: float
    parts: dict[str, float]
    busy: dict[str, float]
    tokens: int
    flops: float
    peak: float
    across: dict[str, int] = field(default_factory=dict)
    sent_across: float = 0.0
    events: tuple[Event, ...] = field(default=(), repr=False)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and chip."""
        return self.tokens / self.seconds / self.chips

    @property
    def mfu(self) -> float:
        """Model FLOPs of a step divided by what the chips could do in that time, in products of `model.dtype`.

        Quantized products are faster than that: with them it can be more than 1.
        """
        return self.flops / self.seconds / self.chips / self.peak

    @property
    def shares(self) -> dict[str, float]:
        """`parts` as shares of the best estimate."""
        return {name: seconds / self.seconds for name, seconds in self.parts.items()}

    def to_json(self) -> dict[str, Any]:
        """Returns the prediction as JSON values, without the events."""
        return {
            "target": self.target, "chips": self.chips, "seconds": self.seconds, "lower": self.lower,
            "upper": self.upper, "parts": self.parts, "shares": self.shares, "busy": self.busy,
            "across": self.across, "sent_across": self.sent_across,
            "tokens": self.tokens, "tokens_per_second_per_chip": self.tokens_per_second, "mfu": self.mfu,
        }  # fmt: skip


def predict_preset(cfg: Config, target: str, program: Path | None = None) -> StepTime:
    """Compiles the train step of a configuration for a target and predicts how long it takes there.

    Args:
      cfg: the configuration.
      target: TPUs such as `v5e:2x4`; see `minitext.compiler.targets.parse_target`.
      program: a file to write the compiler's text to; by default none.

    Raises:
      DoesNotFit: if the step needs more memory than the target has.
      UserError: for a bad target or one of GPUs, or a mesh that fits neither the target nor the model.
    """
    parsed = parse_target(target)
    check_target(parsed)
    report, text = compile_program(cfg, target)
    if not report.fits:
        raise DoesNotFit(
            f"target={parsed}: the step does not fit: minitext compile says what to change"
        )
    if program is not None:
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(text)
    return predict_program(text, cfg, parsed)


def compile_program(cfg: Config, target: str) -> tuple[Report, str]:
    """Compiles the train step of a configuration; `predict_preset` documents the arguments and errors.

    Returns:
      The report, and the text of the whole program with its schedule; "" if the step does not fit.
    """
    texts = [""]

    def keep(_lowered: Any, _compiled: Any, folder: str) -> None:
        texts.append(read_largest(folder, "after_codegen.txt"))
        if not texts[-1]:
            raise UserError(
                "the compiler left no *.after_codegen.txt: is libtpu newer than 0.0.51?"
            )

    return compile.compile_preset(cfg, target, keep), texts[-1]


def predict_program(text: str, cfg: Config, target: Target) -> StepTime:
    """Predicts how long a compiled step takes.

    Args:
      text: the compiler's `*.after_codegen.txt`.
      cfg: the configuration of the step.
      target: what it was compiled for.

    Raises:
      UserError: for GPUs, a text that is not a program, or a kernel whose time cannot be determined.
    """
    check_target(target)
    cfg, _ = fit_slices(cfg, target)
    mesh = topology_mesh(target, cfg.mesh)
    walk = predict_step(text, target, mesh)
    tokens = cfg.train.global_batch * cfg.data.seq_len
    waits = {queue: walk.waited[queue] for queue in QUEUES if queue not in (COMPUTE, KERNEL)}
    return StepTime(
        target=str(target),
        chips=target.devices // target.chip.devices,
        seconds=walk.clock,
        lower=walk.lower,
        upper=walk.upper,
        parts={COMPUTE: walk.busy[COMPUTE], KERNEL: walk.busy[KERNEL], **waits},
        busy=dict(walk.busy),
        across=factors_across(cfg.mesh, dict(mesh.shape), target.slices),
        sent_across=walk.busy[DCN] * target.chip.dcn_bandwidth / target.chip.devices,
        tokens=tokens,
        flops=float(count_flops(cfg.model, tokens, cfg.data.seq_len)),
        peak=target.chip.peak(cfg.model.dtype),
        events=tuple(walk.events),
    )


def predict_step(text: str, target: Target, mesh: Mesh) -> Walk:
    """Simulates the schedule of any program for TPUs, whose partitions are the devices of `mesh` in order.

    Raises:
      UserError: for a text that is not a program, or a kernel whose time cannot be determined.
    """
    schedule = read_schedule(text)
    if not schedule:
        raise UserError(
            "the text has no entry computation: give the compiler's *.after_codegen.txt"
        )
    coords = tuple(tuple(device.coords) for device in mesh.devices.flat)
    shape = tuple(max(sizes) + 1 for sizes in zip(*coords, strict=True))
    kernels = kernel_seconds(operations(schedule), target.chip.name)
    machine = Machine(target.chip, shape, tuple(target.wrap()[: len(shape)]), coords, kernels)
    return Walk(machine).run(schedule)


def print_step_time(found: StepTime) -> None:
    """Prints a prediction on stdout."""
    rows = [
        (NAMES[name], f"{seconds * 1e3:,.3f}", f"{found.shares[name]:.1%}")
        for name, seconds in found.parts.items()
        if seconds
    ]
    sent = show_bytes(round(found.sent_across))
    sent = f"across slices: {show_factors(found.across)}; each device sends {sent} to the others"
    print_tables(
        f"a step on {found.target}: {_time(found.seconds)}, between {_time(found.lower)} with everything overlapped "
        f"and {_time(found.upper)} with nothing overlapped",
        table(("what the core does or waits for", "ms", "share"), rows, right=(1, 2)),
        f"{found.tokens_per_second:,.0f} tokens/s/chip, MFU {found.mfu:.1%} ({found.tokens:,} tokens a step on "
        f"{found.chips:,} chips)",
        *([sent] if found.across else []),
    )


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.2f} ms"


def check_target(target: Target) -> None:
    """Checks that a target's compiler says how long its operations take.

    Raises:
      UserError: for GPUs.
    """
    if target.chip.platform != "tpu":
        raise UserError(
            f"target={target}: only the TPU compiler dumps its schedule and cycles: choose a TPU, such as v5e:2x4"
        )
