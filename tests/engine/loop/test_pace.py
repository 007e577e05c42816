"""When the step behind one in flight is planned."""

import socket

import pytest

from milepost.engine.loop.pace import MARGIN_S, MAX_MARGIN_S, Pace
from milepost.engine.processes import engine as process
from milepost.engine.processes.engine import Loop
from milepost.engine.processes.wire import Abort, frame
from milepost.scheduler.plans import SequencePlan, StepPlan


def plan(*lengths):
    return StepPlan(
        sequences=tuple(
            SequencePlan(
                number=number,
                start=0,
                num_tokens=length,
                tokens=b"",
                new_pages=(),
                write_from=0,
                slot_in=0,
                slot_out=number + 1,
                samples=True,
            )
            for number, length in enumerate(lengths)
        )
    )


def spare_s(pace, *lengths, elapsed_s=0.0, will_prefill=False):
    return pytest.approx(pace.spare_s(plan(*lengths), elapsed_s, will_prefill=will_prefill))


def test_a_size_that_was_not_seen_is_planned_behind_at_once():
    pace = Pace()
    pace.note_step(plan(1, 1, 1), 0.01)
    assert spare_s(pace, 1, 1, 1, 1) == 0.0
    assert spare_s(pace, 1, 300) == 0.0
    assert spare_s(pace, 1, 1) == 0.01 - MARGIN_S


def test_what_is_left_of_a_step_less_what_planning_takes():
    pace = Pace()
    pace.note_step(plan(300, 1), 0.02)
    pace.note_planning(plan(1, 1), 0.001, is_late=False)
    pace.note_planning(plan(300, 1), 0.004, is_late=False)
    assert spare_s(pace, 400, 1, elapsed_s=0.005) == 0.02 - 0.005 - 0.001 - MARGIN_S
    assert spare_s(pace, 400, 1, elapsed_s=0.005, will_prefill=True) == 0.011 - MARGIN_S
    assert spare_s(pace, 400, 1, elapsed_s=0.03) == 0.0


def test_short_steps_and_long_plans_are_remembered_for_some_steps():
    pace = Pace()
    for seconds in (0.02, 0.01, 0.02):
        pace.note_step(plan(1), seconds)
    assert spare_s(pace, 1) == 0.0105 - MARGIN_S
    for seconds in (0.008, 0.001):
        pace.note_planning(plan(1), seconds, is_late=False)
    assert spare_s(pace, 1) == 0.0105 - 0.0068 - MARGIN_S
    for _ in range(40):
        pace.note_step(plan(1), 0.02)
        pace.note_planning(plan(1), 0.001, is_late=False)
    assert spare_s(pace, 1) == 0.02 - 0.001 - MARGIN_S


def test_a_device_that_ran_out_of_work_is_given_it_earlier():
    pace = Pace()
    pace.note_step(plan(1), 0.1)
    pace.note_planning(plan(1), 0.0, is_late=True)
    assert spare_s(pace, 1) == 0.1 - 2 * MARGIN_S
    for _ in range(20):
        pace.note_planning(plan(1), 0.0, is_late=True)
    assert spare_s(pace, 1) == 0.1 - MAX_MARGIN_S
    for _ in range(400):
        pace.note_planning(plan(1), 0.0, is_late=False)
    assert spare_s(pace, 1) == 0.1 - MARGIN_S


class Busy:
    """An engine with a step in flight that takes a second."""

    scheduler = facts = None
    wakers = ()
    has_work, awaits_others = True, False

    def __init__(self):
        self.now_s, self.told = 0.0, []

    @property
    def spare_s(self):
        return max(1.0 - self.now_s, 0.0)

    def do_idle_work(self):
        return False


def test_what_arrives_while_a_step_runs_is_in_the_next_plan(monkeypatch):
    """However often something comes, until there is no time left."""
    ours, theirs = socket.socketpair()
    engine, real = Busy(), process.select.select

    def select(sources, writes, errors, timeout):
        ready = real(sources, writes, errors, 0)
        if timeout and not ready[0] and len(engine.told) < 3:
            engine.now_s += 0.3
            ours.send(frame(Abort(len(engine.told) + 1)))
            return real(sources, writes, errors, 0)
        engine.now_s += 0 if ready[0] else timeout
        return ready

    def step():
        engine.told.append("step")
        loop._is_open = False

    monkeypatch.setattr(process.select, "select", select)
    with ours, theirs:
        loop = Loop(engine, theirs)
        monkeypatch.setattr(loop, "_abort", engine.told.append)
        monkeypatch.setattr(loop, "_step", step)
        monkeypatch.setattr(loop, "_look", lambda: None)
        monkeypatch.setattr(loop._watch, "note_time", lambda _: None)
        loop.run()
        loop.close()
    assert engine.told == [1, 2, 3, "step"]
    assert engine.now_s == pytest.approx(1.0)
