"""A walk through schedules: waiting, queues, loops, and the two bounds, on random schedules too."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitext.compiler.schedule import COMPUTE, DMA, HOST, ICI, KERNEL, Operation
from minitext.hardware import CHIPS, LINK_SECONDS
from minitext.perf.step_schedule import Machine, Walk

CHIP = CHIPS["v5e"]
MESH = Machine(CHIP, (2, 4), (False, False), tuple((x, y) for x in range(2) for y in range(4)))
RING = Machine(CHIP, (16,), (True,), tuple((x,) for x in range(16)))


def run(seconds: float, name: str = "run") -> Operation:
    return Operation(name, "run", cycles=round(seconds * CHIP.clock))


def start(seconds: float, token: str, queue: str = DMA) -> Operation:
    rate = {DMA: CHIP.hbm_bandwidth, HOST: CHIP.host_bandwidth}[queue]
    return Operation(token, "start", queue, bytes=seconds * rate, token=token)


def done(token: str) -> Operation:
    return Operation(f"{token}-done", "done", token=token)


def walk(*schedule: Operation, machine: Machine = MESH) -> Walk:
    return Walk(machine).run(schedule)


def test_a_transfer_behind_compute_costs_nothing():
    found = walk(start(1, "a"), run(2), done("a"))
    assert found.clock == pytest.approx(2) and found.waited[DMA] == 0
    assert (found.lower, found.upper) == pytest.approx((2, 3))


def test_a_done_waits_for_the_rest():
    found = walk(start(3, "a"), run(1), done("a"), run(1))
    assert found.clock == pytest.approx(4) and found.waited[DMA] == pytest.approx(2)


def test_transfers_of_one_queue_follow_each_other_and_those_of_two_do_not():
    assert walk(start(1, "a"), start(1, "b"), done("a"), done("b")).clock == pytest.approx(2)
    found = walk(start(1, "a"), start(1, "b", HOST), done("a"), done("b"))
    assert found.clock == pytest.approx(1) and found.upper == pytest.approx(2)


def test_what_is_under_way_at_the_end_is_waited_for():
    found = walk(start(2, "a"), run(1))
    assert found.clock == pytest.approx(2) and found.waited[DMA] == pytest.approx(1)


def test_a_blocking_collective_stops_the_core():
    gather = Operation("g", "block", ICI, bytes=45e9, opcode="all-gather", members=tuple(range(8)))
    found = walk(run(1), gather, run(1))
    assert found.clock == pytest.approx(2 + found.waited[ICI]) == pytest.approx(found.upper)
    assert found.waited[ICI] == pytest.approx(found.busy[ICI])


@pytest.mark.parametrize("trips", [1, 2, 3, 80, 1000])
def test_loops_multiply(trips):
    body = (start(3, "a"), run(1), done("a"))
    found = walk(Operation("w", "loop", trips=trips, bodies=(body,)))
    assert found.clock == pytest.approx(3 * trips)
    assert found.busy[COMPUTE] == pytest.approx(trips) == pytest.approx(found.busy[DMA] / 3)


def test_only_the_first_turns_of_a_loop_wait_for_what_was_under_way_before():
    body = (start(0.5, "a"), run(1), done("a"))
    found = walk(start(2.2, "b"), Operation("w", "loop", trips=50, bodies=(body,)), done("b"))
    # The first turn waits for b and then a, 2.7; the others are compute alone.
    assert found.clock == pytest.approx(2.7 + 49)


def test_a_loop_in_a_loop():
    inner = Operation("i", "loop", trips=4, bodies=((run(1),),))
    found = walk(Operation("o", "loop", trips=3, bodies=((inner, run(1)),)))
    assert found.clock == pytest.approx(15)
    assert sum(event.queue == "loop" for event in found.events) == 2  # first turns are drawn


def test_of_branches_the_longest_counts():
    branch = Operation("b", "branch", bodies=((run(1),), (run(3),), ()))
    found = walk(run(1), branch, run(1))
    assert found.clock == pytest.approx(5) == pytest.approx(found.busy[COMPUTE])


def test_kernels_take_what_they_are_said_to_take():
    machine = MESH._replace(kernels={"k": 0.25})
    assert walk(Operation("k", "run", KERNEL), machine=machine).busy[KERNEL] == 0.25


# --- collectives


def seconds(machine: Machine, opcode: str, size: float, members: tuple[int, ...]) -> float:
    return machine.seconds(Operation("c", "block", ICI, bytes=size, opcode=opcode, members=members))


def test_a_ring_gathers_over_both_directions_and_a_line_over_one():
    everyone = tuple(range(16))
    size = 16e9
    assert seconds(RING, "all-gather", size, everyone) == pytest.approx(
        8 * LINK_SECONDS + size * 15 / 16 / (2 * CHIP.link_rate)
    )
    line = RING._replace(wrap=(False,))
    assert seconds(line, "all-gather", size, everyone) == pytest.approx(
        15 * LINK_SECONDS + size * 15 / 16 / CHIP.link_rate
    )
    # Half of a ring is a line.
    half = everyone[:8]
    assert seconds(RING, "all-gather", size, half) == seconds(line, "all-gather", size, half)


def test_an_all_reduce_is_two_passes_and_an_all_to_all_of_a_ring_an_eighth_of_its_gather():
    everyone, size = tuple(range(16)), 1e9
    gather = seconds(RING, "all-gather", size, everyone)
    assert seconds(RING, "reduce-scatter", size, everyone) == gather
    assert seconds(RING, "all-reduce", size, everyone) == 2 * gather
    exchange = seconds(RING, "all-to-all", size, everyone)
    assert exchange == pytest.approx(8 * LINK_SECONDS + 16 * size / 8 / CHIP.link_rate)


@pytest.mark.parametrize("opcode", ["all-gather", "all-reduce", "all-to-all", "collective-permute"])
def test_two_devices_of_a_chip_share_its_links(opcode):
    """If each is in a group of its own, the chip sends what one device with twice as much would."""
    chip, places = CHIPS["tpu7x"], [(x, y) for x in range(2) for y in range(2)]
    two = Machine(chip, (2, 2), (False, False), tuple(at for at in places for _ in range(2)))
    one = two._replace(chip=dataclasses.replace(chip, devices=1), coords=tuple(places))
    size, members = 1e9, (0, 1) if opcode == "collective-permute" else (0, 1, 2, 3)
    apart = seconds(two, opcode, size, tuple(2 * m for m in members))
    assert apart == pytest.approx(seconds(one, opcode, 2 * size, members))
    if opcode in ("all-gather", "all-reduce"):  # both in one group: nothing is sent twice
        passes = 2 if opcode == "all-reduce" else 1
        together = seconds(two, opcode, size, tuple(range(8))) / passes
        assert together == pytest.approx(2 * LINK_SECONDS + size * 7 / 8 / (2 * chip.link_rate))


def test_groups_along_different_dimensions_do_not_wait_for_each_other():
    size = 1e9
    rows = Operation(
        "r", "start", ICI, bytes=size, opcode="all-gather", members=(0, 1, 2, 3), token="r"
    )
    columns = rows._replace(name="c", members=(0, 4), token="c")
    apart = walk(rows, columns, done("r"), done("c"))
    assert apart.clock == pytest.approx(max(map(MESH.seconds, (rows, columns))))
    same = walk(rows, rows._replace(name="s", token="s"), done("r"), done("s"))
    assert same.clock == pytest.approx(2 * MESH.seconds(rows))


# --- bounds

GROUPS = (tuple(range(8)), (0, 1, 2, 3), (0, 4))


@st.composite
def schedules(draw, depth: int = 2) -> tuple[Operation, ...]:
    made: list[Operation] = []
    begun: list[str] = []
    for i in range(draw(st.integers(0, 7))):
        kind = draw(st.sampled_from(["run", "start", "block", "done", "loop"]))
        name = f"{kind}{depth}.{i}"
        time = draw(st.integers(0, 5)) / 10
        group = draw(st.sampled_from(GROUPS))
        collective = Operation(
            name, "block", ICI, bytes=time * 1e11, opcode="all-gather", members=group
        )
        if kind == "run":
            made.append(run(time, name))
        elif kind == "block":
            made.append(collective)
        elif kind == "start":
            other = start(time, name, draw(st.sampled_from([DMA, HOST])))
            made.append(
                draw(st.sampled_from([other, collective._replace(kind="start", token=name)]))
            )
            begun.append(name)
        elif kind == "done" and begun:
            made.append(done(begun.pop(draw(st.integers(0, len(begun) - 1)))))
        elif kind == "loop" and depth:
            body = draw(schedules(depth=depth - 1))
            made.append(Operation(name, "loop", trips=draw(st.integers(1, 9)), bodies=(body,)))
    return (*made, *map(done, begun))


def unrolled(schedule: tuple[Operation, ...]) -> tuple[Operation, ...]:
    flat: list[Operation] = []
    for o in schedule:
        flat += unrolled(o.bodies[0]) * o.trips if o.kind == "loop" else (o,)
    return tuple(flat)


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_the_walk_lies_between_its_bounds_and_its_parts_add_up(schedule):
    found = walk(*schedule)
    assert found.lower <= found.clock * (1 + 1e-9) + 1e-12
    assert found.clock <= found.upper * (1 + 1e-9) + 1e-12
    core = found.busy[COMPUTE] + found.busy[KERNEL]
    assert found.clock == pytest.approx(core + math.fsum(found.waited.values()))
    assert found.clock >= core - 1e-9


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_a_loop_is_as_long_as_its_turns_one_by_one(schedule):
    found, flat = walk(*schedule), walk(*unrolled(schedule))
    assert found.clock == pytest.approx(flat.clock)
    assert found.busy == pytest.approx(flat.busy) and found.waited == pytest.approx(flat.waited)


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_with_nothing_overlapped_the_bound_is_the_sum(schedule):
    flat = unrolled(schedule)
    total = math.fsum(MESH.seconds(o) for o in flat if o.kind in ("run", "start", "block"))
    assert walk(*schedule).upper == pytest.approx(total)
    # Each transfer waited for where it starts is nothing overlapped.
    alone = [x for o in flat if o.kind != "done" for x in (o, done(o.token)) if x.token or x is o]
    assert walk(*alone).clock == pytest.approx(total)
