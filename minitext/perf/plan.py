"""A search for the mesh, batch and rematerialisation with which a model trains fastest on named chips.

The search tries every division of a slice between `mesh.data`, `fsdp`, `tensor` and `expert` with every batch size and
every remat policy. It predicts a candidate's time from a roofline (`minitext.perf.roofline`) and from what its devices
send each other (`minitext.perf.comms`), and its memory by `minitext.perf.memory`. It then compiles the fastest
candidates that should fit, and ranks them by what the compiler made: whether they fit, and how long the compiled
schedule takes (`minitext.perf.step_time`).

A time is an interval, from all messages hidden behind arithmetic to no overlap at all.

Chapters: 22.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from minitext.compiler.report import DCN, Report
from minitext.compiler.targets import Target, is_free, parse_target, topology_mesh
from minitext.config.config import Config
from minitext.config.model import MoEConfig
from minitext.errors import UserError
from minitext.hardware import Chip
from minitext.models.flops import all_layers, count_params
from minitext.perf import comms, memory, roofline, step_time
from minitext.perf.sizes import Sizes
from minitext.sharding.check import check_mesh
from minitext.sharding.mesh import AXES, abstract_mesh, factors_across, show_factors, with_slices
from minitext.terminal import print_tables, show_bytes, table


@dataclass(frozen=True)
class Times:
    """Seconds of a step on one device.

    Attributes:
      compute: operations bound by arithmetic.
      hbm: operations bound by the chip's memory.
      ici: messages within a slice.
      dcn: messages across slices; None if the chip's bandwidth there is not known.
    """

    compute: float
    hbm: float
    ici: float
    dcn: float | None

    @property
    def hidden(self) -> float:
        """The step's time if work and messages overlap perfectly."""
        return max(self.compute + self.hbm, self.ici, self.dcn or 0.0)

    @property
    def waited(self) -> float:
        """The step's time if nothing overlaps."""
        return self.compute + self.hbm + self.ici + (self.dcn or 0.0)

    @property
    def limit(self) -> str:
        """What takes longest."""
        times = self.compute, self.hbm, self.ici, self.dcn or 0.0
        return ("compute", "HBM bandwidth", "ICI", "DCN")[times.index(max(times))]


class Work:
    """Arithmetic and memory traffic of one row on each device, counted once for each remat policy."""

    def __init__(self, cfg: Config, target: Target):
        self.cfg, self.target = cfg, target
        self.counted: dict[str, dict[tuple[str, str], float]] = {}

    def seconds(self, cfg: Config, rows: float) -> dict[str, float]:
        """Returns seconds by what bounds them; a replica updates all the parameters it holds, with ZeRO its part."""
        if cfg.model.remat not in self.counted:
            self.counted[cfg.model.remat] = self._count(cfg.model.remat)
        counted = self.counted[cfg.model.remat]
        updated = parameters(cfg) / Sizes(cfg, abstract_mesh(cfg.mesh), "tpu").optimizer
        share = self.target.devices * updated / count_params(cfg.model)
        sums = {"compute": 0.0, "memory": 0.0}
        for (part, limit), seconds in counted.items():
            sums[limit] += seconds * (share if part == "optimizer" else rows)
        # Each product with experts reads all that a device has, however few rows they get.
        multiplied = rows * sum(counted.get(("experts", limit), 0.0) for limit in sums)
        more = self._read_experts(cfg) - multiplied
        return sums | {"memory": sums["memory"] + max(0.0, more)}

    def _read_experts(self, cfg: Config) -> float:
        """Returns the seconds that a device takes to read its experts for all products with them.

        These are forward, for the tokens' gradient and, written, for their own, and forward again if recomputed.
        """
        s, chip = Sizes(cfg, abstract_mesh(cfg.mesh), "tpu"), self.target.chip
        size = sum(kind.layers * sum(kind.routed) for kind in s.kinds) * s.operand
        passes = cfg.train.microbatches * (3 + s.recomputes)
        return passes * size / (chip.hbm_bandwidth / chip.devices)

    def _count(self, remat: str) -> dict[tuple[str, str], float]:
        devices, chip = self.target.devices, self.target.chip
        one_row = {"train.global_batch": devices, "train.microbatches": 1, "model.remat": remat}
        ops = roofline.count_step(self.cfg.replace(one_row), chip.name)
        machine = roofline.chip_machine(chip)
        sums: dict[tuple[str, str], float] = {}
        for op in ops:
            experts = op.is_product and "moe" in op.where and op.part != "optimizer"
            share = dataclasses.replace(op, flops=op.flops / devices, bytes=op.bytes / devices)
            key = "experts" if experts else op.part, machine.limit(share)
            sums[key] = sums.get(key, 0.0) + machine.seconds(share)
        return sums


def parameters(cfg: Config) -> int:
    """Returns the number of parameters on a device: only experts are split over `mesh.expert`."""
    s = Sizes(cfg, abstract_mesh(cfg.mesh), "tpu")
    experts = sum(
        repeats * 3 * layer.ffn.experts * layer.embed * layer.mlp
        for repeats, layer in all_layers(cfg.model)
        if isinstance(layer.ffn, MoEConfig)
    )
    others = count_params(cfg.model) - experts
    return (others + experts // s.experts) // (s.fsdp * s.tensor * s.stages)


def predict(cfg: Config, target: Target, work: Work) -> Times:
    """Predicts a step's times on a target; no axis of the configuration's mesh may be -1."""
    seconds = work.seconds(cfg, cfg.train.global_batch / target.devices)
    sliced = with_slices(cfg, cfg.mesh.sizes(), target.slices)
    terms = comms.predict(sliced, abstract_mesh(cfg.mesh), "tpu", target)
    ici = sum(send_seconds(target, term) for term in terms if not term.kind.endswith(DCN))
    dcn = dcn_seconds(comms.sum_across(terms), target.chip)
    return Times(seconds["compute"], seconds["memory"], ici, dcn)


def link_rate(target: Target, group: int) -> float:
    """Returns the bytes/s that a device sends within a group over ICI, on all dimensions that the group spans."""
    rate, reached = 0.0, 1
    for size, ring in sorted(zip(target.shape, target.wrap(), strict=False), reverse=True):
        if reached < group or not rate:
            rate += target.chip.link_rate * (2 if ring else 1)
            reached *= size
    return rate / target.chip.devices


def send_seconds(target: Target, term: comms.Term) -> float:
    """Returns how long sending a term takes if nothing else uses the links.

    In an all-to-all, the middle of each dimension carries what one half of the chips sends the other.
    """
    if not term.kind.endswith("all-to-all"):
        return term.moved / link_rate(target, term.group)
    longest, rest = 0.0, term.group
    for size, ring in sorted(zip(target.shape, target.wrap(), strict=False), reverse=True):
        chips = min(size, rest)
        longest = max(longest, chips / (8 if ring and chips == size else 4))
        rest = math.ceil(rest / chips)
    return longest * term.bytes / (target.chip.link_rate / target.chip.devices)


def dcn_seconds(sent: float, chip: Chip) -> float | None:
    """Returns how long sending these bytes over the data-centre network takes; None if its bandwidth is unknown."""
    if not sent:
        return 0.0
    return sent / (chip.dcn_bandwidth / chip.devices) if chip.dcn_bandwidth else None


ROWS = (1, 2, 4, 8)  # of a microbatch on one device, if the batch may change
MICROBATCHES = (1, 2, 4, 8, 16)  # if it may not
REMAT = ("none", "dots", "full")
TENSOR = (1, 2, 4, 8, 16)
SEARCHED = ("mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.expert")
STATE_BYTES = 12  # of a parameter and its two moments: if these do not fit, no prediction is needed
MAX_PREDICTED = 300  # candidates whose memory is predicted, once one fits

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to train.

    Attributes:
      settings: the searched keys with their values.
      tokens: tokens in a step.
      times: the predicted times.
      memory: predicted bytes on one device; None if not predicted.
      crowded: whether a faster candidate was dropped because it needs too much memory.
      report: the compiler's report, if compiled.
      step: the time of the compiled step; None if it does not fit or its schedule cannot be read.
    """

    settings: dict[str, Any]
    tokens: int
    times: Times
    memory: int | None = None
    crowded: bool = False
    report: Report | None = None
    step: step_time.StepTime | None = None

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Seconds of a step: lower bound, estimate, upper bound. Until compiled, the estimate is the lower bound."""
        if self.step is not None:
            return self.step.lower, self.step.seconds, self.step.upper
        return self.times.hidden, self.times.hidden, self.times.waited

    @property
    def rows(self) -> float:
        """Rows of a microbatch."""
        return self.settings["train.global_batch"] / self.settings.get("train.microbatches", 1)

    @property
    def mesh_and_remat(self) -> tuple[Any, ...]:
        """The settings without the batch."""
        return tuple(self.settings[key] for key in (*SEARCHED, "model.remat"))

    @property
    def order(self) -> tuple[float, float]:
        """What candidates are ranked by: estimated seconds per token, then the upper bound."""
        return self.seconds[1] / self.tokens, self.seconds[2] / self.tokens

    @property
    def limit(self) -> str:
        """What keeps it from being faster."""
        if self.report is not None and not self.report.fits:
            return "memory"
        found, times = self.times.limit, self.times
        if self.step is not None:
            names = {"ici": "ICI", "dcn": "DCN", "host": "host", "dma": "HBM bandwidth"}
            parts = self.step.parts
            work = sum(seconds for name, seconds in parts.items() if name not in names)
            waits = {names[name]: seconds for name, seconds in parts.items() if name in names}
            longest = max(waits, key=lambda name: waits[name], default="")
            own = "compute" if times.compute >= times.hbm else "HBM bandwidth"
            found = longest if waits.get(longest, 0.0) > work else own
        return found + (", memory" if self.crowded else "")

    def to_json(self) -> dict[str, Any]:
        """Returns the candidate as JSON values."""
        found = dataclasses.asdict(dataclasses.replace(self, report=None, step=None))
        found["seconds"] = dict(zip(("lower", "best", "upper"), self.seconds, strict=True))
        found["step"] = self.step.to_json() if self.step else None
        return found | {
            "limit": self.limit,
            "report": self.report.to_json() if self.report else None,
        }


@dataclass(frozen=True)
class Plan:
    """The result of a search.

    Attributes:
      target: the chips.
      tried: how many candidates the model, its batch and the chips allow.
      too_large: how many faster ones need too much memory by prediction.
      ranked: the compiled candidates, best first; those that the compiler refuses last.
      smallest: the smallest predicted memory in bytes; None if none was predicted.
      notes: what the times leave out.
    """

    target: str
    tried: int
    too_large: int
    ranked: tuple[Candidate, ...]
    smallest: int | None
    notes: tuple[str, ...]

    @property
    def best(self) -> Candidate | None:
        """The first that the compiler accepts."""
        return next((c for c in self.ranked if c.report is not None and c.report.fits), None)

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON values."""
        found = dataclasses.asdict(dataclasses.replace(self, ranked=()))
        return found | {"ranked": [candidate.to_json() for candidate in self.ranked]}


def search(
    cfg: Config, target: str, count: int = 3, progress: Progress = lambda what, done, total: None
) -> Plan:
    """Searches for the fastest way to train a configuration on a target.

    Keys set on the command line or in a file are kept; a preset's mesh, batch and remat policy may change.

    Args:
      cfg: the configuration.
      target: such as `v5e:16x16 slices=2`.
      count: how many to compile.
      progress: called with the current activity, the steps done and the steps in total.

    Raises:
      UserError: for a bad target, GPUs, a model whose memory cannot be predicted, or if no mesh suits the model and the
        keys that were set.
    """
    parsed = parse_target(target)
    if parsed.chip.platform != "tpu":
        raise UserError(
            f"target={target}: plan knows the memory and the network of TPUs only: use minitext compile to try settings"
        )
    found, refusal = [], None
    choices = list(enumerate_settings(cfg, parsed))
    work = Work(cfg, parsed)
    for i, settings in enumerate(choices):
        progress("predicting times", i, len(choices))
        one = cfg.replace(settings)
        mesh = abstract_mesh(one.mesh)
        with contextlib.suppress(UserError):  # the model cannot be split this way
            check_mesh(one, mesh)
            try:
                memory.check(one, mesh, "tpu")
                comms.check(one)
            except UserError as error:
                refusal = error
                continue
            tokens = one.train.global_batch * one.data.seq_len
            found.append(Candidate(settings, tokens, predict(one, parsed, work)))
    if not found and refusal:
        raise refusal
    if not found:
        raise UserError(
            f"no mesh of {parsed.devices} devices goes with this model and the keys you set: leave mesh.*, "
            "train.global_batch or model.remat to the search"
        )
    found.sort(key=lambda c: c.order)
    fitting, too_large, smallest = _select_fitting(cfg, found, parsed, count, progress)
    compiled = []
    for i, candidate in enumerate(fitting):
        progress("compiling", i, len(fitting))
        compiled.append(_compile(cfg, candidate, parsed))
    ranked = sorted(compiled, key=lambda c: (c.report is None or not c.report.fits, c.order))
    return Plan(
        str(parsed), len(found), too_large, tuple(ranked), smallest, tuple(_notes(cfg, parsed))
    )


def enumerate_settings(cfg: Config, target: Target) -> Iterator[dict[str, Any]]:
    """Yields every choice of mesh, batch and remat policy, whether the model allows it or not."""
    per_slice = target.devices // target.slices
    across = dict.fromkeys(AXES, 1) | _across(cfg, target)
    others = math.prod(
        max(1, getattr(cfg.mesh, name) // across[name]) for name in ("context", "stage")
    )
    if per_slice % others:
        return
    ways = per_slice // others
    ffns = [layer.ffn for _, layer in all_layers(cfg.model)]
    counts = {ffn.experts for ffn in ffns if isinstance(ffn, MoEConfig)}
    experts = math.gcd(*counts) if counts else 1
    divisors = [n for n in range(1, ways + 1) if ways % n == 0]
    remats = REMAT if is_free(cfg, "model.remat") else (cfg.model.remat,)
    for fsdp, tensor, expert in itertools.product(divisors, TENSOR, divisors):
        if ways % (fsdp * tensor * expert) or experts % expert:
            continue
        within = ways // (fsdp * tensor * expert), fsdp, tensor, expert
        mesh: dict[str, Any] = {
            key: size * across[key[5:]] for key, size in zip(SEARCHED, within, strict=True)
        }
        kept = {key: getattr(cfg.mesh, key[5:]) for key in SEARCHED if not is_free(cfg, key)}
        if any(size not in (-1, mesh[key]) for key, size in kept.items()):
            continue
        rows = mesh["mesh.data"] * mesh["mesh.fsdp"] * mesh["mesh.expert"]
        for batch, remat in itertools.product(_batches(cfg, rows), remats):
            yield mesh | batch | {"model.remat": remat}


def _across(cfg: Config, target: Target) -> dict[str, int]:
    """Returns the axes that cross slices with their factors, the same in every candidate: by default `data` crosses."""
    sizes = dict.fromkeys(AXES, 1) | {"data": target.slices} | cfg.mesh.dcn.factors()
    return factors_across(cfg.mesh, sizes, target.slices)


def _batches(cfg: Config, ways: int) -> Iterator[dict[str, int]]:
    if is_free(cfg, "train.global_batch"):
        for rows in ROWS:
            yield {"train.global_batch": ways * rows * cfg.train.microbatches}
        return
    free = is_free(cfg, "train.microbatches")
    for parts in MICROBATCHES if free else (cfg.train.microbatches,):
        if cfg.train.global_batch % (ways * parts) == 0:
            yield {"train.global_batch": cfg.train.global_batch, "train.microbatches": parts}


def _notes(cfg: Config, target: Target) -> Iterator[str]:
    if crossing := show_factors(_across(cfg, target)):
        yield f"across {target.slices} slices: {crossing}"
    if target.slices > 1 and not target.chip.dcn_bandwidth:
        yield (
            f"the bandwidth of {target.chip.name} on the data-centre network is not known: the times leave out what "
            f"{target.slices} slices send each other"
        )


def _select_fitting(
    cfg: Config, found: list[Candidate], target: Target, count: int, progress: Progress
) -> tuple[list[Candidate], int, int | None]:
    """Returns the first candidates that should fit, how many before them should not, and the smallest memory."""
    kept, too_large, sizes = [], 0, {}
    usable = target.chip.usable_bytes
    # Of the same mesh and remat policy, the one with the fewest rows needs least.
    least = {c.mesh_and_remat: c for c in sorted(found, key=lambda c: -c.rows)}
    for candidate in found:
        if len(kept) == count or (kept and len(sizes) >= MAX_PREDICTED):
            break
        progress("predicting memory", len(kept), count)
        for one in (least[candidate.mesh_and_remat], candidate):
            if one not in sizes:
                sizes[one] = _predict_memory(cfg.replace(one.settings), target)
            if sizes[one] > usable:
                too_large += 1
                break
        else:
            with contextlib.suppress(UserError):  # the chips are not wired for such axes
                topology_mesh(target, cfg.replace(candidate.settings).mesh)
                crowded, size = too_large > 0, sizes[candidate]
                kept.append(dataclasses.replace(candidate, memory=size, crowded=crowded))
    return kept, too_large, min(sizes.values(), default=None)


def _predict_memory(cfg: Config, target: Target) -> int:
    """Returns the bytes that a step should need on a device; of the state alone if that is too much already."""
    size = STATE_BYTES * parameters(cfg)
    # Beside adapters, parameters have no moments, and may be stored in fewer bits.
    here = cfg.optim.kind == "adamw" and not cfg.optim.offload and not cfg.model.lora.rank
    if here and size > target.chip.usable_bytes:
        return size
    return memory.predict(cfg, abstract_mesh(cfg.mesh), "tpu", target.chip.vmem_bytes or 0).total


def _compile(cfg: Config, candidate: Candidate, target: Target) -> Candidate:
    """Compiles a candidate, and replaces its predicted messages and times by those of the program."""
    one, step = cfg.replace(candidate.settings), None
    report, program = step_time.compile_program(one, str(target))
    with contextlib.suppress(UserError):  # a kernel's time is unknown: the prediction stays
        step = step_time.predict_program(program, one, target) if report.fits else None
    (_, _, within), (_, _, across) = report.networks["ici"], report.networks["dcn"]
    factors = factors_across(one.mesh, one.mesh.sizes(), target.slices)
    sizes = {name: size // factors.get(name, 1) for name, size in one.mesh.sizes().items()}
    groups = max(size for name, size in sizes.items() if name not in ("data", "stage"))
    groups = groups if groups > 1 else sizes["data"]
    times = dataclasses.replace(
        candidate.times,
        ici=within / link_rate(target, groups),
        dcn=dcn_seconds(across, target.chip),
    )
    return dataclasses.replace(candidate, report=report, times=times, step=step)


def print_plan(plan: Plan) -> None:
    """Prints the ranking on stdout."""
    rows, target = [], parse_target(plan.target)
    sliced = target.slices > 1
    for candidate in plan.ranked:
        s, report = candidate.settings, candidate.report
        least, best, most = candidate.seconds
        axes = " ".join(f"{key[5:]}={s[key]}" for key in SEARCHED if s[key] > 1)
        batch = f"{s['train.global_batch']:,}"
        parts = f" in {n}" if (n := s.get("train.microbatches", 1)) > 1 else ""
        fits = show_bytes(report.total_bytes) if report else ""
        across = show_bytes(round(report.networks["dcn"][2])) if report else ""
        rows.append(
            (
                axes, batch + parts, s["model.remat"], show_bytes(candidate.memory or 0), fits,
                f"{best:,.4g} ({least:,.4g} to {most:,.4g})", f"{candidate.tokens / best:,.0f}", candidate.limit,
                *([across] if sliced else []),
            )
        )  # fmt: skip
    heads = (
        "mesh", "batch", "remat", "predicted", "compiled", "seconds a step", "tokens/s", "limited by",
        *(["sent across slices"] if sliced else []),
    )  # fmt: skip
    usable = target.chip.usable_bytes
    print_tables(
        f"{plan.target}: {plan.tried:,} candidates; {plan.too_large:,} faster ones need more than {show_bytes(usable)}",
        table(heads, rows or [("none fits",)], right=(1, 3, 4, 5, 6, 8)),
        *(f"note: {line}" for line in plan.notes),
    )


def advise(plan: Plan, cfg: Config) -> str:
    """Returns one line that says what to change if nothing fits."""
    target = parse_target(plan.target)
    least = show_bytes(plan.smallest or 0)
    if any(c.report is not None for c in plan.ranked):
        return (
            "the compiler refuses what should have fitted: raise --compile, or set model.remat=full"
        )
    state = "" if cfg.optim.offload else ", optim.offload=true"
    return (
        f"the smallest prediction is {least} of {show_bytes(target.chip.usable_bytes)}: choose more chips a slice than "
        f"{target.devices // target.slices}, a data.seq_len below {cfg.data.seq_len}{state}, or leave mesh.*, "
        "train.global_batch and model.remat to the search"
    )
