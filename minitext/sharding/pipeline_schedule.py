"""Pipeline schedules: which stage works on which microbatch in which tick.

Layers are split into S stages, a batch into M microbatches, and time into ticks; after each tick every stage sends its
result to the next. The same integer arithmetic drives the compiled program (on traced integers) and the tables that one
can print, draw and count idle slots in (on Python integers).

Chapters: 13.
"""

from typing import Any, NamedTuple

from minitext.config.sections import PipelineConfig
from minitext.errors import UserError


class Work(NamedTuple):
    """A stage's work in a tick, as Python or traced values.

    Attributes:
      active: whether the stage has work; if not, ignore the other fields.
      microbatch: the microbatch's number.
      group: which of the stage's groups of layers; above 0 only in a circular pipeline.
    """

    active: Any
    microbatch: Any
    group: Any


class Slot(NamedTuple):
    """One entry of a schedule's table: `kind` is `forward` or `backward`."""

    kind: str
    microbatch: int
    group: int


def forward_work(tick: Any, stage: Any, stages: int, microbatches: int, repeats: int = 1) -> Work:
    """Returns a stage's forward work in a tick.

    Stage s lags s ticks behind stage 0. With several groups, S consecutive microbatches circle the ring once for each
    group before the next S enter (Narayanan et al. 2021): what stage S-1 sends back arrives at stage 0 just in time.
    """
    number = tick - stage
    lap, offset = number // stages, number % stages
    active = (number >= 0) & (number < microbatches * repeats)
    return Work(active, lap // repeats * stages + offset, lap % repeats)


def backward_work(tick: Any, stage: Any, stages: int, microbatches: int) -> Work:
    """Returns a stage's backward work in a tick of 1F1B.

    The last stage begins in the tick in which a microbatch reaches it, and stage s follows S-1-s ticks later. So stage
    s has at most 2(S-1-s) + 1 microbatches in flight, between their forward and backward passes.
    """
    number = tick - 2 * (stages - 1) + stage
    return Work((number >= 0) & (number < microbatches), number, 0)


def forward_ticks(stages: int, microbatches: int, repeats: int = 1) -> int:
    """Returns the number of ticks that all microbatches take to pass all stages."""
    return microbatches * repeats + stages - 1


def one_f_one_b_ticks(stages: int, microbatches: int) -> int:
    """Returns the number of ticks of 1F1B; each has a forward and a backward slot."""
    return microbatches + 2 * (stages - 1)


def bubble(schedule: str, stages: int, microbatches: int, repeats: int = 1) -> float:
    """Returns the share of a step in which a stage is idle: (S-1) / (R*M + S-1).

    In units of one group's work, a stage is busy for R*M and waits for S-1, in the forward and the backward pass alike
    (Huang et al. 2019; Narayanan et al. 2021, section 2.2, divide by the busy time instead). 1F1B waits as long as
    GPipe but saves memory. Only more groups, R > 1, shorten the wait.

    Args:
      schedule: `gpipe`, `1f1b` or `circular`.
      stages: S.
      microbatches: M.
      repeats: R, the groups of layers of each stage; matters only in `circular`.
    """
    groups = repeats if schedule == "circular" else 1
    return (stages - 1) / (groups * microbatches + stages - 1)


def make_table(
    schedule: str, stages: int, microbatches: int, repeats: int = 1
) -> list[list[Slot | None]]:
    """Returns the schedule: a row for each time slot, a column for each stage; None is idle.

    A tick of 1F1B is two rows, forward and backward. Rows without work take no time and are left out: 1F1B has no
    backward work in the first S-1 ticks and no forward work in the last. In the other schedules the backward pass is
    autodiff's, which reverses the forward pass.
    """
    S, M, every = stages, microbatches, range(stages)

    def row(kind: str, works: list[Work]) -> list[Slot | None]:
        return [Slot(kind, work.microbatch, work.group) if work.active else None for work in works]

    if schedule == "1f1b":
        rows = []
        for t in range(one_f_one_b_ticks(S, M)):
            rows.append(row("forward", [forward_work(t, s, S, M) for s in every]))
            rows.append(row("backward", [backward_work(t, s, S, M) for s in every]))
        return [slots for slots in rows if any(slots)]
    R = repeats if schedule == "circular" else 1
    works = [[forward_work(t, s, S, M, R) for s in every] for t in range(forward_ticks(S, M, R))]
    forward = [row("forward", one) for one in works]
    return forward + [row("backward", one) for one in reversed(works)]


def idle_share(table: list[list[Slot | None]]) -> float:
    """Returns the share of idle slots in a table."""
    slots = [slot for row in table for slot in row]
    return slots.count(None) / len(slots)


def groups_per_stage(cfg: PipelineConfig) -> int:
    """Returns R, the number of groups that a stage's layers form."""
    return cfg.repeats if cfg.schedule == "circular" else 1


def stored_groups(cfg: PipelineConfig, stages: int) -> int:
    """Returns the number of groups that the layers' parameters are stored in; above 1 only in a circular pipeline."""
    return groups_per_stage(cfg) if stages > 1 else 1


def count_microbatches(cfg: PipelineConfig, stages: int, rows: int) -> int:
    """Returns M, as configured or by default.

    The default is the largest number up to 4S that divides a device's rows. With 4S the bubble is already below a fifth
    ("negligible", Huang et al. 2019), and more, smaller microbatches make smaller, slower matrix products. A circular
    pipeline takes only multiples of S.

    Args:
      cfg: the pipeline.
      stages: S.
      rows: sequences of one pass through the pipeline on each device.

    Raises:
      UserError: if there is no such number, or the configured one doesn't divide the rows.
    """
    step = stages if cfg.schedule == "circular" else 1
    fits = [m for m in range(step, rows + 1, step) if rows % m == 0]
    if cfg.microbatches is None:
        if not fits:
            raise UserError(
                f"pipeline.schedule=circular with mesh.stage={stages} needs a multiple of {stages} sequences a device, "
                f"and there are {rows}: raise train.global_batch, or set pipeline.schedule=1f1b"
            )
        return max(m for m in fits if m <= 4 * stages)
    if cfg.microbatches not in fits:
        shown = ", ".join(map(str, fits[:12]))
        rule = f"be a multiple of mesh.stage={stages} and divide" if step > 1 else "divide"
        fix = f"choose pipeline.microbatches among {shown}" if fits else "raise train.global_batch"
        raise UserError(
            f"pipeline.microbatches={cfg.microbatches} must {rule} the {rows} sequences a device: {fix}"
        )
    return cfg.microbatches
