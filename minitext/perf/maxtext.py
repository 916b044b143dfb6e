"""What a command or configuration of MaxText needs and does, before anyone pays for it: `minitext maxtext explain`.

Its settings become ours (`minitext.config.maxtext_map`), and then the predictions for ours are asked: memory, bytes on
both networks, a step's time. Nothing is compiled unless that is wanted, and no chip is needed.

Chapters: 27.
"""

import contextlib
import math
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.text import Text

from minitext import files
from minitext.compiler.report import DCN
from minitext.compiler.targets import Target, parse_target
from minitext.config import maxtext_command, maxtext_map, maxtext_model
from minitext.config.config import Config
from minitext.config.maxtext_command import Reading
from minitext.config.maxtext_map import Machine, Translation
from minitext.errors import UserError
from minitext.models.flops import count_flops, count_params
from minitext.perf import comms, memory, plan, step_time
from minitext.sharding.check import check_mesh
from minitext.sharding.mesh import abstract_mesh, with_slices
from minitext.terminal import print_tables, show_bytes, table

MOST_CHANGES = 3
ROOM = 0.7  # of the memory: below it, a step may take more
FULL: dict[str, Any] = {"model.remat": "full", "model.remat_save": ()}


@dataclass(frozen=True)
class Change:
    """A change worth making.

    Attributes:
      settings: our keys with their values.
      maxtext: the same in MaxText's words.
      memory: predicted bytes on a device.
      seconds: of a step for as many tokens as before, if everything overlaps.
      why: what it does.
    """

    settings: dict[str, Any]
    maxtext: str
    memory: int
    seconds: float
    why: str


@dataclass(frozen=True)
class Answers:
    """What is known of the step before it runs.

    Attributes:
      target: the chips.
      parameters: of the model.
      tokens: of a step.
      memory: predicted bytes on a device.
      usable: bytes that a program may use there.
      state: the part of the memory that parameters and the optimizer's state take.
      ici: what is sent within a slice -> bytes that a device sends in a step.
      dcn: bytes that a device sends across slices in a step.
      times: seconds by what they are spent on.
      lower: seconds of a step if everything overlaps.
      upper: if nothing does.
      mfu: model FLOPs of a step over what the chips could do in `lower` seconds.
      changes: what to change, the best first.
      compiled: what is known of the compiled step, if it was asked for: its `memory`, whether it `fits`, and
        the time if its schedule can be read (`minitext.perf.step_time.StepTime.to_json`).
      notes: what the predictions leave out.
    """

    target: str
    parameters: int
    tokens: int
    memory: int
    usable: int
    state: int
    ici: dict[str, float]
    dcn: float
    times: dict[str, float | None]
    lower: float
    upper: float
    mfu: float
    changes: tuple[Change, ...]
    compiled: dict[str, Any] | None
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the step fits: the compiler's verdict, or else the prediction's."""
        return self.memory <= self.usable if self.compiled is None else self.compiled["fits"]

    @property
    def limit(self) -> int:
        """The predicted memory up to which a change should fit, which may be as wrong as it was for this step."""
        if self.compiled is None or self.fits:
            return self.usable
        return int(self.usable * min(1, self.memory / self.compiled["memory"]))


@dataclass(frozen=True)
class Explanation:
    """What `explain` found."""

    translation: Translation
    answers: Answers | None

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        t = self.translation
        found = {
            "refused": t.refused, "keys": [asdict(key) for key in t.keys], "train": t.words, "target": t.machine.target,
            "notes": t.notes, "answers": None,
        }  # fmt: skip
        if self.answers is not None:
            found["answers"] = asdict(self.answers) | {"fits": self.answers.fits}
        return found


def explain(text: str, target: str | None = None, compiled: bool = False) -> Explanation:
    """Maps a command or file of MaxText, and predicts its step.

    Args:
      text: the command, or the name of a file.
      target: the chips, such as `v5p:4x4x8`; by default those that the command names.
      compiled: whether to compile the step and read the compiler's schedule, which takes minutes.

    Raises:
      UserError: for a text that can't be read, or chips that aren't known.
    """
    reading = maxtext_command.read(text)
    machine, wanted = machine_for(reading, target)
    if compiled and wanted is None:
        raise UserError(
            "--compile needs chips, and the command names none: add --target, such as v5p:4x4x8"
        )
    found = maxtext_map.translate(reading, machine)
    if found.cfg is None or wanted is None:
        return Explanation(found, None)
    try:
        return Explanation(found, answer(found, wanted, compiled))
    except UserError as error:
        found.notes.append(f"no prediction: {error}")
        return Explanation(found, None)


def machine_for(reading: Reading, target: str | None) -> tuple[Machine, Target | None]:
    """Returns the chips that a command is for, and the same as a target if its shape is known."""
    if target is not None:
        wanted = parse_target(target)
        return Machine(
            wanted.chip.name, wanted.devices // wanted.slices, wanted.slices, wanted.shape
        ), wanted
    device, slices = reading.device, reading.slices
    if device is None and reading.values.get("compile_topology"):
        device = str(reading.values["compile_topology"])
        slices = max(1, maxtext_model.whole(reading.values, "compile_topology_num_slices"))
    found = maxtext_map.machine_of(device, slices) if device else None
    if found is not None:
        chip, shape = found
        slices = 1 if chip == "h100" else slices
        text = f"{chip}:{'x'.join(map(str, shape))}" + (f" slices={slices}" if slices > 1 else "")
        try:
            return machine_for(reading, text)
        except UserError as error:  # a shape in which they don't come
            reading.notes.append(f"the device type {files.shorten(device or '')}: {error}")
    elif device:
        reading.notes.append(
            f"the device type {files.shorten(device)} isn't known: name the chips with --target"
        )
    # Without a machine, the axes say how many devices there are, if they all do.
    sizes = [reading.values.get(f"ici_{name}_parallelism", 1) for name in maxtext_map.ICI]
    whole = [size for size in sizes if isinstance(size, int) and size > 0]
    across = [reading.values.get(f"dcn_{name}_parallelism", 1) for name in maxtext_map.ICI]
    slices = math.prod(size for size in across if isinstance(size, int) and size > 0)
    return Machine(None, math.prod(whole), max(slices, reading.slices)), None


def answer(found: Translation, target: Target, compiled: bool = False) -> Answers:
    """Predicts the step of a configuration that came from MaxText.

    Raises:
      UserError: for what the formulas don't know.
    """
    cfg = found.cfg
    assert cfg is not None
    if target.devices > 1 and not target.chip.link_rate:
        raise UserError(
            f"the rate of {target.chip.name}'s links isn't known: compile the step with minitext compile"
        )
    notes = list[str]()
    if getattr(cfg.model.attention, "impl", "") == "cudnn":
        cfg = cfg.replace({"model.attention.impl": "auto"})
        notes.append(
            "the prediction is for model.attention.impl=auto: cudnn needs CUDA's libraries even to be counted"
        )
    plain = cfg
    if cfg.model.quantization:
        plain = cfg.replace({"model.quantization": ()})
        notes.append("memory and bytes are predicted without model.quantization")
    work, used = plan.Work(cfg, target), _memory(plain, target)
    times = plan.predict(plain, target, work)
    plain = with_slices(plain, plain.mesh.sizes(), target.slices)
    terms = comms.predict(plain, abstract_mesh(plain.mesh), "tpu", target)
    sent: dict[str, float] = {}
    for term in terms:
        if not term.kind.endswith(DCN):
            sent[term.kind] = sent.get(term.kind, 0.0) + term.moved
    tokens = cfg.train.global_batch * cfg.data.seq_len
    flops = count_flops(cfg.model, tokens, cfg.data.seq_len)
    kind = "bfloat16" if cfg.model.dtype == "bfloat16" else "float32"
    peak = target.chip.peak(kind) * target.devices / target.chip.devices
    base = Answers(
        target=str(target), parameters=count_params(cfg.model), tokens=tokens,
        memory=used.total, usable=target.chip.usable_bytes, state=used.parameters + used.optimizer, ici=sent,
        dcn=comms.sum_across(terms), times=_shown(times), lower=times.hidden, upper=times.waited,
        mfu=flops / times.hidden / peak, changes=(), compiled=None, notes=(*notes, *_notes(plain, target)),
    )  # fmt: skip
    if compiled:
        base = _compile(cfg, target, base)
    return replace(base, changes=tuple(_changes(cfg, target, work, base))[:MOST_CHANGES])


def _compile(cfg: Config, target: Target, base: Answers) -> Answers:
    """Adds what the compiler says. Where it says nothing a note tells why, and the predictions remain."""
    try:
        step_time.check_target(target)
        report, text = step_time.compile_program(cfg, str(target))
    except UserError as error:
        return replace(base, notes=(*base.notes, f"not compiled: {error}"))
    found: dict[str, Any] = {"memory": report.total_bytes, "fits": report.fits}
    notes = base.notes
    if report.fits:
        try:
            found |= step_time.predict_program(text, cfg, target).to_json()
        except UserError as error:
            notes = (*notes, f"compiled, without a time: {error}")
    return replace(base, compiled=found, notes=notes)


def _memory(cfg: Config, target: Target) -> memory.Memory:
    check_mesh(cfg, abstract_mesh(cfg.mesh))
    return memory.predict(
        cfg, abstract_mesh(cfg.mesh), target.chip.platform, target.chip.vmem_bytes or 0
    )


def _shown(times: plan.Times) -> dict[str, float | None]:
    return {"compute": times.compute, "HBM": times.hbm, "ICI": times.ici, "DCN": times.dcn}


def _notes(cfg: Config, target: Target) -> Iterator[str]:
    mesh = abstract_mesh(cfg.mesh)
    yield from comms.across_slices(cfg, mesh)
    yield from comms.notes(cfg, mesh, target.chip.platform)
    if target.chip.platform == "gpu":
        yield "these are the formulas for TPUs: XLA for GPUs plans differently"
    if cfg.optim.offload:
        yield "optim.offload: the optimizer's state is in the host's memory, and its way there isn't counted"


def _changes(cfg: Config, target: Target, work: plan.Work, now: Answers) -> Iterator[Change]:
    """Yields what would fit where this doesn't, or be faster where it does."""
    found: list[Change] = []
    for settings, words, why in _tries(cfg, now):
        with contextlib.suppress(UserError):
            new = cfg.replace(settings)
            plain = new.replace({"model.quantization": ()}) if new.model.quantization else new
            used, times = _memory(plain, target), plan.predict(plain, target, work)
            ratio = now.tokens / (new.train.global_batch * new.data.seq_len)
            found.append(Change(settings, words, used.total, times.hidden * ratio, why))
    if not now.fits:
        fitting = [change for change in found if change.memory <= now.limit]
        # If none does, the one that needs least.
        yield from (
            sorted(fitting, key=lambda c: c.seconds) or sorted(found, key=lambda c: c.memory)[:1]
        )
        return
    better = [c for c in found if c.memory <= now.usable and c.seconds < 0.97 * now.lower]
    yield from sorted(better, key=lambda c: c.seconds)


def _tries(cfg: Config, now: Answers) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yields changes to try: ours, MaxText's words, and what they do."""
    batch, parts, axes = cfg.train.global_batch, cfg.train.microbatches, cfg.mesh.sizes()
    each = batch // max(1, axes["data"] * axes["fsdp"] * axes["expert"])
    if cfg.model.remat != "full":
        yield (
            FULL,
            "remat_policy=full",
            "recompute everything",
        )
    for more in (2, 4, 8):
        if each % (more * parts) == 0 and not now.fits:
            settings = {"train.microbatches": more * parts}
            yield (
                settings,
                f"gradient_accumulation_steps={more * parts} and per_device_batch_size divided by {more}",
                ("the same batch in smaller parts"),
            )
            if cfg.model.remat != "full":
                yield (
                    settings | FULL,
                    f"remat_policy=full, gradient_accumulation_steps={more * parts} and per_device_batch_size divided "
                    f"by {more}",
                    ("the same batch in smaller parts, everything recomputed"),
                )
    for fewer in (2, 4):
        if batch % fewer == 0 and not now.fits:
            settings = {"train.global_batch": batch // fewer}
            yield settings, f"per_device_batch_size divided by {fewer}", "a smaller batch"
            if cfg.model.remat != "full":
                yield (
                    settings | FULL,
                    f"remat_policy=full and per_device_batch_size divided by {fewer}",
                    "a smaller batch, everything recomputed",
                )
    dcn = cfg.mesh.dcn
    within = {axis: axes[axis] // getattr(dcn, axis) for axis in ("data", "fsdp", "tensor")}
    if within["data"] > 1 and not now.fits:
        whole = within["fsdp"] * within["data"]
        yield (
            {"mesh.data": dcn.data, "mesh.fsdp": whole * dcn.fsdp},
            f"ici_fsdp_parallelism={whole} ici_data_parallelism=1",
            f"parameters split over all devices{' of a slice' if dcn.factors() else ''}",
        )
    if within["tensor"] > 1:
        whole = within["fsdp"] * within["tensor"]
        yield (
            {"mesh.tensor": dcn.tensor, "mesh.fsdp": whole * dcn.fsdp},
            f"ici_tensor_parallelism=1 ici_fsdp_parallelism={whole}",
            "parameters split by rows instead of features",
        )
    if now.fits and now.memory < ROOM * now.usable:
        yield (
            {"train.global_batch": 2 * batch},
            "per_device_batch_size doubled",
            "more tokens for each message",
        )
        for remat, words in (("dots", "remat_policy=minimal"), ("none", "remat_policy=none")):
            if cfg.model.remat not in (remat, "none"):
                yield {"model.remat": remat, "model.remat_save": ()}, words, "recompute less"


# What is printed.

ORDER = {
    "unknown": "no key of MaxText", "none": "no counterpart", "by hand": "set it yourself", "mapped": "mapped",
    "default": "MaxText's default",
}  # fmt: skip


def print_explanation(found: Explanation) -> None:
    """Prints an explanation on stdout: the keys, the answers, and the command at the end."""
    t = found.translation
    rows: list[tuple[str, str, str]] = []
    for status, words in ORDER.items():
        groups: dict[str, list[str]] = {}
        for key in t.keys:
            if key.status == status:
                shown = f"{key.name}={key.value}" if status == "mapped" else key.name
                groups.setdefault(key.ours, []).append(shown)
        for ours, names in groups.items():
            rows.append((words, _some(names), ours))
    mapped = sum(key.status == "mapped" for key in t.keys)
    lines: list[Any] = [f"{mapped} of {len(t.keys)} keys are mapped"]
    if rows:
        lines.append(table(("", "MaxText", "minitext"), rows, ()))
    if t.refused is not None:
        lines.append(Text(f"minitext can't build this: {t.refused}"))
    if found.answers is not None:
        lines += list(_answers(found.answers))
    elif t.refused is None and t.machine.target is None:
        lines.append(
            "name the machine to see whether it fits and how long a step takes: --target v5p:4x4x8"
        )
    if notes := [*t.notes, *(found.answers.notes if found.answers is not None else ())]:
        lines.append(Text("\n".join(f"note: {line}" for line in notes)))
    print_tables(*lines)
    if t.words:  # in one line, whatever the terminal's width, to be copied
        print("\nminitext train", shlex.join(t.words))


TIMES = {
    "compute": "operations bound by arithmetic", "HBM": "operations bound by HBM", "ICI": "messages within a slice",
    "DCN": "messages across slices",
}  # fmt: skip


def _some(names: list[str]) -> str:
    shown = [name if len(name) <= 60 else name[:57] + "..." for name in names[:6]]
    return ", ".join(shown) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _answers(a: Answers) -> Iterator[Any]:
    """Yields the lines of the answers."""
    verdicts = {True: "fits", False: "does NOT fit"}
    rows = [
        ("parameters", f"{a.parameters:,}"),
        ("tokens in a step", f"{a.tokens:,}"),
        ("memory of a device, in minitext",
         f"{show_bytes(a.memory)} of {show_bytes(a.usable)}: {verdicts[a.memory <= a.usable]}"),
        ("  parameters and moments", show_bytes(a.state)),
        *((f"within a slice (ICI): {kind}", f"{show_bytes(round(size))} sent by a device in a step")
          for kind, size in sorted(a.ici.items(), key=lambda item: -item[1])),
        ("across slices (DCN)", f"{show_bytes(round(a.dcn))} sent by a device in a step"),
        *((TIMES[name], "bandwidth unknown" if s is None else f"{s:,.4g} s") for name, s in a.times.items()),
        ("a step, everything overlapped", f"{a.lower:,.4g} s: {a.tokens / a.lower:,.0f} tokens/s, {a.mfu:.1%} of peak"),
        ("a step, nothing overlapped", f"{a.upper:,.4g} s"),
    ]  # fmt: skip
    if a.compiled is not None:
        c = a.compiled
        size = f"{show_bytes(c['memory'])} of {show_bytes(a.usable)}: {verdicts[c['fits']]}"
        rows.append(("memory of a device, as compiled", size))
        if "seconds" in c:
            bounds = f"({c['lower']:,.4g} to {c['upper']:,.4g})"
            rows.append(
                (
                    "a step, as compiled",
                    f"{c['seconds']:,.4g} s {bounds}: {a.tokens / c['seconds']:,.0f} tokens/s, {c['mfu']:.1%} of peak",
                )
            )
            for name, seconds in c["parts"].items():
                if seconds:
                    rows.append((f"  {step_time.NAMES[name]}", f"{seconds:,.4g} s"))
    yield table((f"on {a.target}", "predicted"), rows, ())
    if not a.fits and not any(change.memory <= a.limit for change in a.changes):
        yield "nothing that was tried fits: take more chips, or a shorter max_target_length"
    if a.changes:
        changes = [
            (change.why, change.maxtext, show_bytes(change.memory), f"{change.seconds / a.lower:.2f}")
            for change in a.changes
        ]  # fmt: skip
        yield table(
            ("what to change", "in MaxText", "memory", "time for as many tokens"),
            changes,
            right=(2, 3),
        )
