"""A simulation of a schedule: one core, and queues for asynchronous transfers.

The core executes operations in order. A transfer begins once it has been started and its resources are free: the links
of the torus dimensions that its group spans, the chip's memory, or PCIe in one direction. The core waits where the
program does: at a transfer's done, or at a transfer that blocks. How long a transfer takes follows from its bytes and
the chip's row in `minitext.hardware.CHIPS`; nothing is fitted to measured steps.

Two bounds need no schedule: the busiest of core and queues, if everything overlaps, and the sum of all, if nothing
does. The simulation ignores that transfers slow down others' access to memory.

Chapters: 22.
"""

import copy
import math
from collections.abc import Mapping
from typing import NamedTuple

from minitext.compiler.schedule import COMPUTE, DCN, DMA, HOST, ICI, KERNEL, QUEUES, Operation
from minitext.hardware import LINK_SECONDS, Chip

MAX_ITERATIONS = 64  # of a loop that are simulated; the rest are taken to be like the last of them
SAME = 1e-11  # seconds: rounding of sums


class Event(NamedTuple):
    """What one queue does for a while, to be drawn; only a loop's first iteration has events.

    Attributes:
      name: the operation's name.
      queue: one of `QUEUES`, `loop` for a whole loop, or `wait` where the core waits.
      start: seconds since the step's start.
      end: seconds since the step's start.
      trips: how often a loop's body runs.
    """

    name: str
    queue: str
    start: float
    end: float
    trips: int = 1


class Machine(NamedTuple):
    """What transfers and cycles cost.

    Attributes:
      chip: the chip.
      shape: chips of a slice along each dimension.
      wrap: which dimensions are rings.
      coords: coordinates of each device's chip, in the order of the program's partitions.
      kernels: seconds of each custom call, by the operation's name.
    """

    chip: Chip
    shape: tuple[int, ...]
    wrap: tuple[bool, ...]
    coords: tuple[tuple[int, ...], ...]
    kernels: Mapping[str, float] = {}

    def spans(self, members: tuple[int, ...]) -> dict[int, tuple[int, bool]]:
        """Returns dimension -> (a group's chips along it, whether they are a whole ring) where these are several."""
        group = [self.coords[m] for m in members if m < len(self.coords)]
        sizes = {k: len({coords[k] for coords in group}) for k in range(len(self.shape))}
        return {k: (n, self.wrap[k] and n == self.shape[k]) for k, n in sizes.items() if n > 1}

    def seconds(self, operation: Operation) -> float:
        """Returns how long an operation takes if nothing delays it."""
        chip, size = self.chip, operation.bytes
        if operation.queue == KERNEL:
            return self.kernels.get(operation.name, 0.0)
        if operation.queue == ICI:
            return self._collective(operation)
        rates = {DMA: chip.hbm_bandwidth, HOST: chip.host_bandwidth, DCN: chip.dcn_bandwidth}
        rate = rates.get(operation.queue, chip.hbm_bandwidth)
        # The devices of a chip share all of these.
        return operation.cycles / chip.clock + chip.devices * size / rate

    def _collective(self, operation: Operation) -> float:
        """Returns the time of a collective: bytes over the links of its dimensions, and a delay for each hop.

        A ring sends both ways; the last chip of a line has one link. In an all-to-all, the middle of each dimension
        carries what one half of the chips sends the other: half of each chip's bytes. All devices of a chip use its
        links, in this group or in another that does the same.
        """
        spans, rate = self.spans(operation.members), self.chip.link_rate
        if not spans:  # devices of one chip, or unknown ones
            return operation.bytes / self.chip.hbm_bandwidth
        hops = sum(size // 2 if ring else size - 1 for size, ring in spans.values())
        links = sum(2 if ring else 1 for _, ring in spans.values())
        group, size = max(1, len(operation.members)), operation.bytes
        if operation.opcode.endswith("all-to-all"):
            size *= self.chip.devices
            return hops * LINK_SECONDS + max(
                size * n / (8 if ring else 4) / rate for n, ring in spans.values()
            )
        if operation.opcode == "collective-permute":
            return LINK_SECONDS + self.chip.devices * size / rate
        # A ring enters and leaves a chip once, however many of its devices belong to it.
        chips = len({self.coords[m] for m in operation.members if m < len(self.coords)})
        size *= (group - 1) / group * self.chip.devices * chips / group
        passes = 2 if operation.opcode == "all-reduce" else 1
        return passes * (hops * LINK_SECONDS + size / (links * rate))

    def needs(self, operation: Operation) -> tuple[str, ...]:
        """Returns the names of the resources that a transfer occupies."""
        if operation.queue == ICI:
            return tuple(f"ici {k}" for k in self.spans(operation.members)) or ("ici",)
        return (f"{operation.queue} {operation.opcode}".strip(),)


class Walk:
    """A simulated schedule; `run` leaves the result in the attributes.

    Attributes:
      clock: seconds until the core is done.
      busy: seconds that each of `QUEUES` works.
      occupied: seconds that each resource of `Machine.needs` works.
      waited: seconds that the core waits for each queue.
      events: what to draw.
    """

    def __init__(self, machine: Machine):
        self.machine = machine
        self.clock = 0.0
        self.busy: dict[str, float] = dict.fromkeys(QUEUES, 0.0)
        self.waited: dict[str, float] = dict.fromkeys(QUEUES, 0.0)
        self.occupied: dict[str, float] = {}
        self.events: list[Event] = []
        self._free: dict[str, float] = {}
        self._ends: dict[str, tuple[float, str]] = {}
        self._drawing = True

    def run(self, schedule: tuple[Operation, ...]) -> "Walk":
        """Simulates a whole step, and waits for what is still in flight at its end."""
        self._walk(schedule)
        for resource, end in sorted(self._free.items(), key=lambda free: free[1]):
            self._wait(end, resource.split()[0])
        return self

    @property
    def lower(self) -> float:
        """Seconds if everything overlaps: those of the busiest resource or the core."""
        core = self.busy[COMPUTE] + self.busy[KERNEL]
        return max(core, *self.occupied.values()) if self.occupied else core

    @property
    def upper(self) -> float:
        """Seconds if nothing overlaps."""
        return math.fsum(self.busy.values())

    def _walk(self, schedule: tuple[Operation, ...]) -> None:
        for operation in schedule:
            if operation.kind == "loop":
                self._loop(operation)
            elif operation.kind == "branch":
                self._branch(operation)
            elif operation.kind == "done":
                end, queue = self._ends.pop(operation.token, (0.0, COMPUTE))
                self._wait(end, queue)
            elif operation.kind == "run":
                end = self.clock + self.machine.seconds(operation)
                self.busy[operation.queue] += end - self.clock
                self._draw(Event(operation.name, operation.queue, self.clock, end))
                self.clock = end
            else:
                end = self._transfer(operation)
                if operation.kind == "block":
                    self._wait(end, operation.queue)
                else:
                    self._ends[operation.token] = end, operation.queue

    def _transfer(self, operation: Operation) -> float:
        needs, seconds = self.machine.needs(operation), self.machine.seconds(operation)
        start = max(self.clock, *(self._free.get(resource, 0.0) for resource in needs))
        for resource in needs:
            self._free[resource] = start + seconds
            self.occupied[resource] = self.occupied.get(resource, 0.0) + seconds
        self.busy[operation.queue] += seconds
        self._draw(Event(operation.name, operation.queue, start, start + seconds))
        return start + seconds

    def _wait(self, until: float, queue: str) -> None:
        if until > self.clock:
            self.waited[queue] += until - self.clock
            self._draw(Event(queue, "wait", self.clock, until))
            self.clock = until

    def _draw(self, event: Event) -> None:
        if self._drawing and event.end > event.start:
            self.events.append(event)

    def _backlog(self) -> dict[str, float]:
        """Returns how long each resource stays occupied, which together with the program decides what follows."""
        return {r: free - self.clock for r, free in self._free.items() if free - self.clock > SAME}

    def _loop(self, loop: Operation) -> None:
        """Simulates iterations until one leaves the queues as it found them: all others take as long."""
        begin, drawing, left = self.clock, self._drawing, loop.trips
        while left:
            before, start = self._backlog(), self.clock
            counts = (self.busy, self.waited, self.occupied)
            marks = [dict(count) for count in counts]
            self._walk(loop.bodies[0])
            self._drawing = False
            left -= 1
            after = self._backlog()
            steady = before.keys() == after.keys() and all(
                abs(before[r] - after[r]) < SAME for r in after
            )
            if left and (steady or loop.trips - left >= MAX_ITERATIONS):
                for count, mark in zip(counts, marks, strict=True):
                    for key in count:
                        count[key] += left * (count[key] - mark.get(key, 0.0))
                shift = left * (self.clock - start)
                self._free = {r: f + shift for r, f in self._free.items() if f > start}
                self.clock += shift
                left = 0
        self._drawing = drawing
        self._draw(Event(loop.name, "loop", begin, self.clock, loop.trips))

    def _branch(self, branch: Operation) -> None:
        """Takes the branch that ends last: which one runs depends on values."""
        ways = []
        for body in branch.bodies:
            way = copy.deepcopy(self, {id(self.machine): self.machine})
            way._walk(body)
            ways.append(way)
        if ways:
            self.__dict__ = max(ways, key=lambda way: way.clock).__dict__
