"""How long a step should take before it is compiled: its work by a roofline, its messages at the rates of the links.

Chapters: 22.
"""

import math
from dataclasses import dataclass

from jax.sharding import AbstractMesh, AxisType

from minitext.compiler.targets import Target
from minitext.config.sections import Config
from minitext.hardware import Chip
from minitext.models.transformer import count_params
from minitext.perf import comms, roofline
from minitext.sharding.mesh import AXES


@dataclass(frozen=True)
class Times:
    """Seconds of a step on one device, by what is busy.

    Attributes:
      compute: products that wait for arithmetic.
      hbm: operations that wait for the chip's memory.
      ici: messages within a slice.
      dcn: messages across slices; None if the chip's bandwidth there is not known.
    """

    compute: float
    hbm: float
    ici: float
    dcn: float | None

    @property
    def hidden(self) -> float:
        """The step's time if all messages are hidden behind the work, or work and messages behind the slowest."""
        return max(self.compute + self.hbm, self.ici, self.dcn or 0.0)

    @property
    def waited(self) -> float:
        """The step's time if nothing overlaps."""
        return self.compute + self.hbm + self.ici + (self.dcn or 0.0)

    @property
    def limit(self) -> str:
        """What takes longest."""
        parts = {
            "compute": self.compute,
            "HBM bandwidth": self.hbm,
            "ICI": self.ici,
            "DCN": self.dcn or 0.0,
        }
        return max(parts, key=lambda name: parts[name])


class Work:
    """The arithmetic and the memory traffic of one row on each device, counted once for each policy."""

    def __init__(self, cfg: Config, target: Target):
        self.cfg, self.target = cfg, target
        self.counted: dict[str, dict[tuple[bool, str], float]] = {}

    def seconds(self, cfg: Config, shards: int, rows: float) -> dict[str, float]:
        """Seconds by what is waited for; replicas repeat the update of the parameters that they hold."""
        if cfg.model.remat not in self.counted:
            self.counted[cfg.model.remat] = self._count(cfg.model.remat)
        sums = {"compute": 0.0, "memory": 0.0}
        for (update, limit), seconds in self.counted[cfg.model.remat].items():
            sums[limit] += seconds * (self.target.devices / shards if update else rows)
        return sums

    def _count(self, remat: str) -> dict[tuple[bool, str], float]:
        devices, chip = self.target.devices, self.target.chip
        one_row = {"train.global_batch": devices, "train.microbatches": 1, "model.remat": remat}
        ops = roofline.count_step(self.cfg.replace(one_row), chip.name)
        sums: dict[tuple[bool, str], float] = {}
        for row in roofline.predict(ops, roofline.chip_machine(chip), devices).rows:
            key = row["part"] == "optimizer", row["limit"]
            sums[key] = sums.get(key, 0.0) + row["seconds"]
        return sums


def abstract_mesh(sizes: dict[str, int]) -> AbstractMesh:
    """Returns a mesh of these axes, those that are not named of size 1, and of no devices."""
    return AbstractMesh(
        tuple(sizes.get(axis, 1) for axis in AXES), AXES, (AxisType.Explicit,) * len(AXES)
    )


def shards(cfg: Config) -> int:
    """Returns over how many devices the parameters are divided."""
    axes = cfg.mesh.sizes()
    return axes["fsdp"] * axes["tensor"] * axes["expert"] * axes["stage"]


def predict(cfg: Config, target: Target, work: Work) -> Times:
    """Predicts a step's times on a target; the axes of the configuration's mesh are all given."""
    axes = cfg.mesh.sizes()
    seconds = work.seconds(cfg, shards(cfg), cfg.train.global_batch / target.devices)
    # Within a slice a step is that of one slice alone with its part of the batch.
    alone = cfg.replace(
        {
            "mesh.data": axes["data"] // target.slices,
            "train.global_batch": cfg.train.global_batch // target.slices,
        }
    )
    terms = comms.predict(alone, abstract_mesh(alone.mesh.sizes()), "tpu")
    ici = sum(term.moved / link_rate(target, term.group) for term in terms)
    dcn = dcn_seconds(sent_across(cfg, target), target.chip)
    return Times(seconds["compute"], seconds["memory"], ici, dcn)


def link_rate(target: Target, group: int) -> float:
    """Bytes/s that a device sends to a group over ICI: both links of each dimension that a ring of the group needs."""
    rate, reached = 0.0, 1
    for size, ring in sorted(zip(target.shape, target.wrap(), strict=False), reverse=True):
        if reached < group or not rate:
            rate += target.chip.link_rate * (2 if ring else 1)
            reached *= size
    return rate / target.chip.devices


def sent_across(cfg: Config, target: Target) -> float:
    """Bytes that a device sends over the data-centre network: its part of the gradients, summed over all slices.

    A slice has summed them before, so that each device sends what no other of its slice does.
    """
    axes, slices = cfg.mesh.sizes(), target.slices
    if slices == 1:
        return 0.0
    within = math.prod(axes[axis] for axis in AXES) // slices
    size = 2 if cfg.model.dtype == "bfloat16" else 4
    part = count_params(cfg.model) * size / within
    return 2 * (slices - 1) / slices * part * cfg.train.microbatches


def dcn_seconds(sent: float, chip: Chip) -> float | None:
    """Returns how long a device sends these bytes over the data-centre network; None if its bandwidth is not known."""
    if not sent:
        return 0.0
    return sent / (chip.dcn_bandwidth / chip.devices) if chip.dcn_bandwidth else None
