"""The report of a step compiled for named chips, and its tables.

Chapters: 22.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minitext.compiler.buffers import Buffer
from minitext.sharding.mesh import show_factors
from minitext.terminal import print_tables, show_bytes, table

LISTED = 12  # largest buffers that a report keeps
DCN = " (dcn)"  # ends the kind of a collective between slices


@dataclass(frozen=True)
class Report:
    """What the compiler says about a step. Bytes are per JAX device.

    Attributes:
      target: what it was compiled for.
      devices: devices of the mesh.
      mesh: sizes of the mesh's axes above 1.
      fits: whether the compiler accepts the program (TPU), or the program needs no more memory than there is (GPU,
        whose compiler accepts any size).
      hbm_bytes: memory of the device.
      available_bytes: the part of it that a program may use.
      argument_bytes: state and batch.
      output_bytes: new state and metrics.
      alias_bytes: the part of the outputs that reuses the arguments' memory.
      temp_bytes: everything in between: activations, gradients, gathered weights.
      vector_bytes: what a TPU keeps in its vector memory instead.
      code_bytes: the program itself; 0 if the compiler never made it because it does not fit.
      total_bytes: arguments, outputs with memory of their own, temporaries and code.
      arguments: bytes of each part of the arguments, such as `state.params`.
      lower_seconds: tracing the step and lowering it to StableHLO.
      compile_seconds: compiling it.
      collectives: kind -> (count, bytes) of one step; `minitext.compiler.hlo.collectives` says what counts.
      largest: the largest buffers, largest first; temporaries that live at different times may share memory.
      advice: what to change if it does not fit.
      sent: kind -> bytes that each device sends for these in one step.
      slices: how many TPU slices the devices form; the kinds of collectives between them end in ` (dcn)`.
      across: axes that cross slices, with the factor of each (`minitext.sharding.mesh.factors_across`).
      changed: settings changed to suit the slices, with their values (`targets.fit_slices`).
    """

    target: str
    devices: int
    mesh: Mapping[str, int]
    fits: bool
    hbm_bytes: int
    available_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    vector_bytes: int
    code_bytes: int
    total_bytes: int
    arguments: Mapping[str, int]
    lower_seconds: float
    compile_seconds: float
    collectives: Mapping[str, tuple[int, int]]
    largest: tuple[Buffer, ...]
    advice: tuple[str, ...] = ()
    sent: Mapping[str, float] = field(default_factory=dict)
    slices: int = 1
    across: Mapping[str, int] = field(default_factory=dict)
    changed: Mapping[str, int] = field(default_factory=dict)

    @property
    def networks(self) -> dict[str, tuple[int, int, float]]:
        """Collectives, their bytes and what each device sends, within slices (`ici`; GPUs: all) and across (`dcn`)."""
        sums = {"ici": (0, 0, 0.0), "dcn": (0, 0, 0.0)}
        for kind, (count, size) in self.collectives.items():
            name = "dcn" if kind.endswith(DCN) else "ici"
            counts, sizes, sent = sums[name]
            sums[name] = counts + count, sizes + size, sent + self.sent.get(kind, 0.0)
        return sums

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        kinds = {kind: (*sums, self.sent.get(kind, 0.0)) for kind, sums in self.collectives.items()}
        tables = {
            table: {
                name: dict(zip(("count", "bytes", "sent"), sums, strict=True))
                for name, sums in rows.items()
            }
            for table, rows in {"collectives": kinds, "networks": self.networks}.items()
        }
        return dataclasses.asdict(self) | tables


def print_report(report: Report) -> None:
    """Prints the tables of a report on stdout."""
    from rich.text import Text

    axes = ", ".join(f"mesh.{name}={size}" for name, size in report.mesh.items())
    verdict, style = ("fits", "bold green") if report.fits else ("does not fit", "bold red")
    rest = f"  ({report.devices} devices; {axes or 'no mesh axis above 1'})"
    head = Text.assemble((f"{report.target}: {verdict}", style), rest)
    available = show_bytes(report.available_bytes)
    share = report.total_bytes / report.available_bytes
    memory = [("arguments", show_bytes(report.argument_bytes))]
    memory += [(f"  {part}", show_bytes(size)) for part, size in report.arguments.items()]
    memory += [
        ("outputs with memory of their own", show_bytes(report.output_bytes - report.alias_bytes)),
        ("temporaries", show_bytes(report.temp_bytes)),
        ("program", show_bytes(report.code_bytes)),
        (f"total, {share:,.0%} of {available} available", show_bytes(report.total_bytes)),
    ]
    largest = [
        (show_bytes(buffer.bytes), buffer.kind, buffer.shape, _short(buffer.op))
        for buffer in report.largest[: 5 if report.fits else LISTED]
    ]
    changed = " ".join(f"{key}={value}" for key, value in report.changed.items())
    times = f"lowered in {report.lower_seconds:.1f} s, compiled in {report.compile_seconds:.1f} s"
    last = [f"to make it fit: {line}" for line in report.advice]
    last += [f"set for {report.slices} slices: {changed}"] if changed else []
    crossing = show_factors(report.across)
    last += [f"across {report.slices} slices: {crossing}"] if crossing else []
    print_tables(
        head,
        table(("memory of one device", "bytes"), memory, right=(1,)),
        *_collectives(report),
        table(("largest tensors", "kind", "shape", "what"), largest, right=(0,)),
        Text("\n".join([*last, times])),
    )


def _collectives(report: Report) -> list[Any]:
    """Returns the tables of collectives: one, or with several slices one for each of the two networks."""
    columns, right = ("count", "bytes", "sent by each device"), (1, 2, 3)

    def rows(across: bool | None) -> list[tuple[str, ...]]:
        found = [
            (kind, f"{count:,}", show_bytes(size), show_bytes(report.sent.get(kind, 0.0)))
            for kind, (count, size) in report.collectives.items()
            if across is None or kind.endswith(DCN) == across
        ]
        if across is not None and len(found) > 1:
            count, size, sent = report.networks["dcn" if across else "ici"]
            found.append(("together", f"{count:,}", show_bytes(size), show_bytes(sent)))
        return found or [("none",)]

    if report.slices == 1:
        return [table(("collectives of one step", *columns), rows(None), right)]
    return [
        table(("collectives within a slice (ICI)", *columns), rows(False), right),
        table((f"collectives across {report.slices} slices (DCN)", *columns), rows(True), right),
    ]


def _short(op: str) -> str:
    """Shortens a JAX operation's path to the pass it belongs to and its own name."""
    path = re.sub(r"^jit\(\w+\)/|\b(while|body|cond|closed_call|checkpoint)/", "", op)
    path = re.sub(r"transpose\(jvp\((.*?)\)\)", r"backward \1", path)
    path = re.sub(r"jvp\((.*?)\)", r"forward \1", path)
    return path.replace("rematted_computation", "recomputed").replace(" /", " ")
