"""What a train step should send by prediction, and what its compiled program sends.

`audit` compiles the step for the devices of a mesh, which may be ahead-of-time devices, and `print_audit` shows both
sides and their differences. `minitext comms` does this for a preset.

Chapters: 11, 12, 13.
"""

import dataclasses
import tempfile
from collections import Counter
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from minitext.compiler import hlo
from minitext.compiler.aot import dump_to, no_cache, read_dump
from minitext.compiler.buffers import OutOfMemory, parse_out_of_memory
from minitext.compiler.targets import topology_mesh
from minitext.config.config import Config
from minitext.distributed.devices import quick_compile
from minitext.perf.comms import Term, across_slices, check, notes, predict
from minitext.sharding.mesh import count_slices, make_mesh, with_slices
from minitext.terminal import print_tables, show_bytes, table
from minitext.training.step import abstract_batch, abstract_state, make_train_step


class Row(NamedTuple):
    """All collectives of one kind in one step; see `minitext.perf.comms.Term`."""

    kind: str
    count: int
    bytes: int
    moved: float


@dataclasses.dataclass(frozen=True)
class Audit:
    """What a step should send by prediction, and what its program sends.

    Attributes:
      backend: `cpu` or `tpu`.
      terms: the prediction, term by term.
      compiled: a term for each instruction of the program that sends something, with the instruction's name.
      small: number and bytes of the program's scalars and integers, which `compiled` leaves out.
      notes: settings that the prediction does not cover.
      across: which axes cross slices, and what is sent there; empty with one slice.
      too_large: what the program needs and the chip has, if it doesn't fit; "" if it does.
    """

    backend: str
    terms: list[Term]
    compiled: list[Term]
    small: tuple[int, int]
    notes: list[str]
    across: list[str]
    too_large: str = ""

    def differences(self) -> dict[tuple[str, int, int], tuple[int, int]]:
        """Returns (kind, group, bytes of an array) -> arrays (predicted, compiled), where those differ."""
        want, got = (_arrays(terms) for terms in (self.terms, self.compiled))
        return {
            key: (want[key], got[key]) for key in sorted({*want, *got}) if want[key] != got[key]
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the audit as JSON values."""
        return {
            "backend": self.backend,
            "terms": [
                t._asdict() | {"count": t.count, "bytes": t.bytes, "moved": t.moved}
                for t in self.terms
            ],
            "predicted": [row._asdict() for row in by_kind(self.terms)],
            "compiled": [row._asdict() for row in by_kind(self.compiled)],
            "notes": self.notes,
            "across": self.across,
            "too_large": self.too_large,
            "small": {"count": self.small[0], "bytes": self.small[1]},
            "differences": [
                {"kind": kind, "group": group, "bytes": size, "predicted": want, "compiled": got}
                for (kind, group, size), (want, got) in self.differences().items()
            ],
        }


def audit_preset(cfg: Config, target: str | None = None) -> Audit:
    """Audits a configuration on its mesh, over this machine's devices or those of a target such as `v5e:2x4`."""
    mesh = topology_mesh(target, cfg.mesh) if target else make_mesh(cfg.mesh)
    return audit(cfg, mesh)


def audit(cfg: Config, mesh: Mesh) -> Audit:
    """Compiles the train step for the devices of a mesh and compares what it sends with the prediction.

    A program that doesn't fit is compared too: a TPU's compiler refuses it after it has decided what is sent.

    Args:
      cfg: the configuration; its layers are always scanned.
      mesh: of simulated CPU devices, or of ahead-of-time TPUs (`minitext.compiler.targets.topology_mesh`).
    """
    check(cfg)  # before the step is compiled
    cfg = cfg.replace({"model.scan_layers": True})
    backend = mesh.devices.flat[0].platform
    step = make_train_step(cfg, mesh)
    args = (abstract_state(cfg, mesh), abstract_batch(cfg, mesh))
    with jax.set_mesh(mesh), no_cache(), tempfile.TemporaryDirectory(prefix="minitext-") as folder:
        refusal = _refusal(step.lower(*args), quick_compile(backend) | dump_to(folder))
        text = read_dump(folder)[1]
    found = read(text, cfg, mesh, backend)
    if refusal is None:
        return found
    used, available = show_bytes(refusal.used), show_bytes(refusal.available)
    return dataclasses.replace(found, too_large=f"the step needs {used} and there are {available}")


def _refusal(lowered: jax.stages.Lowered, options: dict[str, Any]) -> OutOfMemory | None:
    """Compiles a program; returns what it needs if it doesn't fit, else None."""
    try:
        lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if (refusal := parse_out_of_memory(str(error))) is None:
            raise
        return refusal
    return None


def read(text: str, cfg: Config, mesh: Mesh, backend: str) -> Audit:
    """Compares the text of a compiled step with the prediction."""
    cfg = with_slices(cfg, dict(mesh.shape), count_slices(cfg.mesh, list(mesh.devices.flat)))
    compiled, small = [], (0, 0)
    for found in hlo.Module(text).collectives():
        sizes = tuple(size for dtype, size in found.arrays if not _is_small(dtype, size))
        rest = [size for dtype, size in found.arrays if _is_small(dtype, size)]
        small = small[0] + found.runs * len(rest), small[1] + found.runs * sum(rest)
        if sizes:
            compiled.append(Term(found.name, found.kind, found.group, sizes, found.runs))
    args = cfg, mesh, backend
    across = across_slices(cfg, mesh)
    return Audit(backend, predict(*args), compiled, small, notes(*args), across)


def _is_small(dtype: str, size: int) -> bool:
    """Whether an array is a scalar or holds integers."""
    return size <= 4 or (dtype[0] in "sup" and dtype != "s8")


def by_kind(terms: list[Term]) -> list[Row]:
    """Sums terms by kind."""
    rows: dict[str, Row] = {}
    for t in terms:
        row = rows.get(t.kind, Row(t.kind, 0, 0, 0))
        rows[t.kind] = Row(t.kind, row.count + t.count, row.bytes + t.bytes, row.moved + t.moved)
    return [rows[kind] for kind in sorted(rows)]


def _arrays(terms: list[Term]) -> Counter:
    """Counts arrays by kind, group and bytes; a permute has pairs instead of groups."""
    found = Counter()
    for term in terms:
        group = 0 if term.kind == "collective-permute" else term.group
        for size in term.arrays:
            found[term.kind, group, size] += term.runs
    return found


def print_audit(found: Audit) -> None:
    """Prints the predicted terms, their sums beside the program's, and the differences, on stdout."""
    lines = [
        (t.name, t.kind, f"{t.group}", f"{t.count:,}", show_bytes(t.bytes), show_bytes(t.moved))
        for t in found.terms
    ]
    heads = ("what is sent", "kind", "group", "arrays", "bytes", "sent by each device")
    sides = [{row.kind: row for row in by_kind(terms)} for terms in (found.terms, found.compiled)]
    sums = []
    for kind in sorted({*sides[0], *sides[1]}):
        rows = [side.get(kind, Row(kind, 0, 0, 0.0)) for side in sides]
        cells = [(f"{r.count:,}", show_bytes(r.bytes), show_bytes(r.moved)) for r in rows]
        sums.append((kind, *(cell for pair in zip(*cells, strict=True) for cell in pair)))
    columns = ("arrays", "bytes", "sent by each device")
    both = tuple(f"{c}, {side}" for c in columns for side in ("predicted", "compiled"))
    differ = [
        (kind, f"{group or ''}", show_bytes(size), f"{want:,}", f"{got:,}")
        for (kind, group, size), (want, got) in found.differences().items()
    ]
    count, size = found.small
    too_large = [f"{found.too_large}: what it would send"] if found.too_large else []
    print_tables(
        *too_large,
        *found.across,
        table(heads, lines or [("nothing",)], right=(2, 3, 4, 5)),
        table(("kind", *both), sums or [("none",)], right=(1, 2, 3, 4, 5, 6)),
        *(f"not predicted: {note}" for note in found.notes),
        f"and {count:,} scalars and integers of {show_bytes(size)}, which the formula leaves out",
        table(("differs", "group", "an array", "predicted", "compiled"), differ, right=(1, 2, 3, 4))
        if differ
        else "the program sends what the formula says: every kind, group, size and number is equal",
    )
