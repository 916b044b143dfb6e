"""Each second of a run under faults has one cause, and each fault its bill: checked on runs made by hand."""

import random

import pytest

from minitext.observability.downtime import CAUSES, Attempt, Strike, account
from minitext.observability.goodput import Event


def ledger(start, *laps):
    """Contiguous events from (kind, seconds, step)."""
    events = []
    for kind, seconds, step in laps:
        events.append(Event(kind, start, seconds, step))
        start += seconds
    return events


def steps(first, last, seconds=1.0):
    return [("step", seconds, step) for step in range(first, last + 1)]


def test_a_kill_is_charged_for_what_it_undid_and_for_the_restart():
    # Started at 100, killed at 120 in step 8 after a save of step 5, noticed at 123, started again at 130.
    first = ledger(
        102, ("job_start", 3, None), ("init", 2, 0), ("compile", 4, 1), *steps(1, 5), ("save", 0.5, 5), *steps(6, 6)
    )  # fmt: skip
    again = ledger(
        131, ("job_start", 4, None), ("restore", 1, 5), ("compile", 2, 6), *steps(6, 10), ("job_end", 1, None)
    )  # fmt: skip
    kill = Strike("kill", 120.0, 1, step=7, allowed=5, noticed=123.0)
    lines = [(step, 1.0) for step in range(1, 8)]  # the ledger lost the events of step 7
    attempts = [
        Attempt(100, 125, 0, lines, [kill], failed=True),
        Attempt(130, 146, 5, [(step, 1.0) for step in range(6, 11)]),
    ]
    found = account(attempts, [*first, *again])
    assert found.wall == 46 and sum(found.seconds.values()) == pytest.approx(46)
    want = {
        "step": 10, "lost": 3.5, "detect": 3, "restart": 7, "start-up": 2 + 5 + 6, "compile": 6,
        "checkpoint": 0.5, "end": 3,
    }  # fmt: skip
    assert found.seconds == pytest.approx(dict.fromkeys(CAUSES, 0.0) | want)
    (bill,) = found.bills
    assert (bill.resumed, bill.repeated, bill.detect) == (5, 2, 3)
    assert bill.lost == pytest.approx(3.5 + 3 + 7 + 6 + 2)
    assert (found.steps, found.lost_steps, found.accounted) == (10, 2, 1.0)


def test_what_no_record_covers_is_unexplained_and_what_two_cover_is_counted():
    events = ledger(0, *steps(1, 4)) + ledger(7, *steps(5, 6)) + [Event("save", 8.25, 0.5, 6)]
    lines = [(step, 1.0) for step in range(1, 7)]
    found = account([Attempt(0, 10, 0, lines)], events)
    assert found.seconds["unexplained"] == pytest.approx(3)
    assert found.claimed_twice == pytest.approx(0.5)
    assert found.accounted == pytest.approx(1 - 3.5 / 10)
    # Killed long after the last line: two steps under way are plausible, and no more.
    kill = Strike("kill", 20.0, 0, noticed=20.0)
    attempts = [Attempt(0, 21, 0, lines[:4], [kill], True), Attempt(22, 30, 0, lines)]
    found = account(attempts, [*ledger(0, *steps(1, 4)), *ledger(22, *steps(1, 6))])
    assert found.seconds["unexplained"] == pytest.approx(16 - 2)


def test_a_save_that_a_kill_interrupted_is_a_checkpoint_s_time():
    kill = Strike("kill", 12.0, 0, noticed=12.0, saving_since=5.5)
    events = ledger(1, *steps(1, 4)) + ledger(15, *steps(1, 5))
    attempts = [
        Attempt(0, 13, 0, [(n, 1.0) for n in range(1, 5)], [kill], True),
        Attempt(14, 21, 0, [(5, 1.0)]),
    ]
    found = account(attempts, events)
    assert found.seconds["checkpoint"] == pytest.approx(6.5)
    assert found.seconds["lost"] == pytest.approx(4 + 0.5) and found.accounted == 1


def test_a_fault_that_passes_costs_what_it_added():
    laps = [*steps(1, 4), ("step", 6.0, 5), *steps(6, 9)]
    slow = Strike("freeze", 5.5, 0, over=9.5)
    found = account([Attempt(0, 15, 0, [], [slow])], ledger(1, *laps))
    assert found.seconds["slow"] == pytest.approx(5) and found.seconds["step"] == pytest.approx(9)
    assert found.bills[0].lost == pytest.approx(5) and found.bills[0].resumed is None


def test_a_fault_that_sends_the_job_back_further_pays_for_all_of_it():
    """A torn checkpoint undoes steps of the attempt before, too."""
    kill, tear = (Strike(kind, at, 0, noticed=at) for kind, at in (("kill", 11.0), ("tear", 24.0)))
    events = [*ledger(1, *steps(1, 10)), *ledger(21, *steps(9, 11)), *ledger(31, *steps(5, 12))]
    lines = [[(n, 1.0) for n in range(low, high + 1)] for low, high in ((1, 10), (9, 11), (5, 12))]
    attempts = [
        Attempt(0, 12, 0, lines[0], [kill], True),
        Attempt(20, 25, 8, lines[1], [tear], True),
        Attempt(30, 39, 4, lines[2]),
    ]
    found = account(attempts, events)
    first, second = found.bills
    assert (first.repeated, second.repeated) == (2, 7)
    assert first.seconds["lost"] == pytest.approx(2)  # steps 9 and 10 of the first attempt
    assert second.seconds["lost"] == pytest.approx(
        4 + 3
    )  # steps 5 to 8 of the first, 9 to 11 of the second
    assert found.steps == 12 and found.seconds["step"] == pytest.approx(4 + 8)


def test_an_attempt_killed_while_it_starts_is_the_fault_s_before():
    kill, again = Strike("kill", 11.0, 0, noticed=11.0), Strike("kill", 25.0, 1, noticed=26.0)
    events = [*ledger(1, *steps(1, 10)), Event("job_start", 22.0, 1.0), *ledger(31, *steps(9, 12))]
    attempts = [
        Attempt(0, 12, 0, [(n, 1.0) for n in range(1, 11)], [kill], True),
        Attempt(20, 27, None, [], [again], True),
        Attempt(30, 35, 8, [(n, 1.0) for n in range(9, 13)]),
    ]
    found = account(attempts, events)
    first, second = found.bills
    assert (
        first.seconds["start-up"] == pytest.approx(5) and first.repeated == 2 and first.resumed == 8
    )
    assert second.seconds == pytest.approx({"detect": 1, "restart": 4, "start-up": 1})
    assert second.repeated == 0 and found.accounted == 1


def test_seconds_sum_to_the_wall_time_whatever_happened():
    for seed in range(50):
        rng = random.Random(seed)
        attempts, events, now, step = [], [], 0.0, 0
        for index in range(rng.randrange(1, 6)):
            start, begun = now, now + rng.uniform(0, 3)
            count = rng.randrange(0, 8)
            laps = [("job_start", rng.uniform(0, 2), None)]
            laps += [
                (rng.choice(["step", "step", "save", "log"]), rng.uniform(0, 2), step + n + 1)
                for n in range(count)
            ]
            events += [e for e in ledger(begun, *laps) if rng.random() < 0.9]
            at = begun + sum(seconds for _, seconds, _ in laps) + rng.uniform(-1, 3)
            noticed = at + rng.uniform(-0.5, 4)
            strike = Strike("kill", at, 0, noticed=noticed, saving_since=rng.choice([None, at - 1]))
            now = max(at, noticed) + rng.uniform(0, 2)
            last = index == 4 or rng.random() < 0.2
            lines = [(step + n + 1, rng.uniform(0, 2)) for n in range(count)]
            attempts.append(Attempt(start, now, step, lines, [] if last else [strike], not last))
            now += rng.uniform(0, 1)
            step = max(0, step + rng.randrange(-2, 5))
            if last:
                break
        else:
            attempts[-1].failed, attempts[-1].strikes = False, []
        found = account(attempts, events)
        assert sum(found.seconds.values()) == pytest.approx(found.wall)
        assert min(found.seconds.values()) >= 0 and found.claimed_twice >= 0
        assert found.wall >= attempts[-1].end - attempts[0].start - 1e-9
        paid = sum(bill.lost for bill in found.bills)
        assert paid <= found.wall - found.seconds["step"] + 1e-6
        found.to_json()
