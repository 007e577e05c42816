"""How many drafts are worth their time, on machines and texts that are made up."""

from __future__ import annotations

import random

import pytest

from milepost.speculative.estimates import NUM_FIRST, Acceptance, StepTimes
from milepost.speculative.policy import Adaptive, Always, Standing, Verified


class Machine:
    """Runs decodes: a step takes `plain` seconds, and more with each token beyond one a sequence;
    drafts are accepted one after the other at a rate of each request's own.
    """

    def __init__(
        self, policy, rates, *, num_drafts, plain=1.0, each=0.05, wait=0.0, seed=0, every=1
    ):
        self.policy, self.rates, self.num_drafts = policy, list(rates), num_drafts
        self.plain, self.each = plain, each
        self.wait = wait
        """Seconds for which nothing runs before and behind a step with drafts."""
        self.every = every
        """There are drafts in each so many steps alone."""
        self.has_verified = False
        self.rng = random.Random(seed)
        self.length = 0
        self.num_steps = self.num_tokens = self.num_verified = 0
        self.seconds = 0.0
        self.verified_by = [0] * len(self.rates)

    def run(self, num_steps):
        """Tokens a second, beside what plain decoding has."""
        num_tokens, seconds = self.num_tokens, self.seconds
        for _ in range(num_steps):
            self.step()
        speed = (self.num_tokens - num_tokens) / (self.seconds - seconds)
        return speed / (len(self.rates) / self.plain)

    def step(self):
        self.length += 1
        standings = [Standing(number, self.length) for number in range(len(self.rates))]
        verified = []
        is_asked = self.length % self.every == 0
        allotted = self.policy.allot(standings) if is_asked else [0] * len(standings)
        for number, most in enumerate(allotted):
            assert 0 <= most <= self.num_drafts
            if most:
                num = 0
                while num < most and self.rng.random() < self.rates[number]:
                    num += 1
                verified.append(Verified(number, self.length, most, num))
                self.verified_by[number] += 1
        num_drafts = sum(each.num_drafts for each in verified)
        seconds = self.plain + self.each * num_drafts
        seconds += self.wait * (bool(verified) or self.has_verified)
        self.has_verified = bool(verified)
        self.policy.note(len(self.rates), verified, seconds)
        self.seconds += seconds
        self.num_verified += num_drafts
        self.num_tokens += len(self.rates) + sum(each.num_accepted for each in verified)


def adaptive(rates, **options):
    num_drafts = options.setdefault("num_drafts", 3)
    return Machine(Adaptive(num_drafts), rates, **options)


@pytest.mark.parametrize("num", [1, 16, 64, 256])
@pytest.mark.parametrize(("cost", "wait"), [(0.1, 0.0), (0.5, 0.3), (2.0, 0.0), (2.0, 0.3)])
def test_drafts_that_are_never_accepted_cost_next_to_nothing(num, cost, wait):
    """However much a step of drafts for all takes: over an answer of 256 tokens, its start among
    them, and ever after."""
    machine = adaptive([0.0] * num, each=cost / (3 * num), wait=wait)
    assert machine.run(256) > 0.985
    assert machine.run(500) > 0.995


@pytest.mark.parametrize("num", [1, 16, 64])
def test_drafts_that_are_accepted_are_made(num):
    """As much of the win as there is."""
    machine = adaptive([0.9] * num, each=0.3 / (3 * num))
    machine.run(200)
    best = (1 + 0.9 + 0.9**2 + 0.9**3) / 1.3
    assert machine.run(200) > 0.9 * best


def test_drafts_that_come_now_and_then_are_made_too():
    """A step behind one with drafts takes as long as any, and so costs no credit."""
    machine = adaptive([0.5] * 4, each=0.02, every=2)
    machine.run(300)
    assert machine.run(200) > 1.2


def test_where_the_machine_is_full_nothing_is_drafted():
    """A token costs as much as a step has for each: half of them accepted is not worth it."""
    machine = adaptive([0.5] * 64, each=1 / 64)
    machine.run(100)
    verified = machine.num_verified
    assert machine.run(200) > 0.98
    assert machine.num_verified - verified < 0.02 * 200 * 64 * 3


def test_only_those_requests_draft_whose_drafts_are_accepted():
    machine = adaptive([0.95] * 4 + [0.0] * 12, each=0.02)
    machine.run(100)
    before = list(machine.verified_by)
    machine.run(100)
    verified = [a - b for a, b in zip(machine.verified_by, before, strict=True)]
    assert min(verified[:4]) > 60
    assert max(verified[4:]) < 30


def test_a_probe_finds_out_that_acceptance_has_returned():
    machine = adaptive([0.0] * 4, each=0.02)
    machine.run(400)
    verified = machine.num_verified
    assert machine.run(64) > 0.99
    assert machine.num_verified - verified <= 3 * 3, "a few drafts of one request"
    machine.rates = [0.95] * 4
    machine.run(700)
    assert machine.run(100) > 1.5


def test_probes_go_round():
    """Else one request would be asked again and again, and no other's drafts ever be found good."""
    machine = adaptive([0.0] * 4, each=0.02)
    machine.run(3000)
    assert min(machine.verified_by) > 0
    assert max(machine.verified_by) - min(machine.verified_by) <= 1


def test_a_machine_that_grows_slower_is_measured_again():
    machine = adaptive([0.6] * 8, each=0.01)
    machine.run(100)
    assert machine.run(50) > 1.3
    machine.each = 0.5
    machine.run(300)
    assert machine.run(200) > 0.98


def test_nothing_is_drafted_before_a_plain_step_was_measured():
    machine = adaptive([1.0])
    for _ in range(3):
        machine.step()
        assert not machine.num_verified
    machine.step()
    assert machine.num_verified


def test_what_was_known_of_a_request_goes_with_it():
    machine = adaptive([0.0, 0.9], each=0.01)
    machine.run(100)
    policy = machine.policy
    policy.forget(0)
    fresh, known = policy._acceptance.chances(0, 100), policy._acceptance.chances(1, 100)
    assert 0.1 < fresh[0] < known[0]
    assert 0 not in policy._probed


def test_without_adapting_there_are_always_as_many():
    machine = Machine(Always(5), [0.0] * 3, num_drafts=5)
    machine.run(10)
    assert machine.num_verified == 10 * 3 * 5


def test_steps_that_do_other_things_are_no_measure():
    policy = Adaptive(3)
    for _ in range(10):
        policy.note(4, [], None)
    assert policy.allot([Standing(n, 10) for n in range(4)]) == [0] * 4


# --- times ----------------------------------------------------------------------------------------


def test_times_are_estimated_between_what_was_measured():
    times = StepTimes()
    assert times.plain(8) is None
    for drafts, seconds in ((0, 1.0), (8, 1.2), (32, 2.4)):
        for _ in range(5):
            times.note(8, drafts, seconds)
    assert times.plain(8) == pytest.approx(1.0)
    for drafts, seconds in ((8, 1.2), (20, 1.8), (32, 2.4), (4, 1.1)):
        assert times.estimate(8, drafts) == pytest.approx(seconds)
    assert times.estimate(8, 64) > 2.4, "goes on rising"
    assert times.plain(64) is None, "other numbers of sequences are other steps"


def test_a_first_step_that_compiles_is_forgotten():
    times = StepTimes()
    for seconds in (30.0, 1.0, 1.1, 1.0):
        times.note(2, 0, seconds)
    assert times.plain(2) < 1.1
    times.note(2, 0, 50.0)
    assert times.plain(2) < 1.3, "one that was held up"


def test_where_there_is_nothing_to_verify_little_is_worked_out(monkeypatch):
    """A decision stands for a while; not with other requests, nor when something was verified."""
    policy, calls, chances = Adaptive(3), [], Acceptance.chances
    monkeypatch.setattr(Acceptance, "chances", lambda *args: calls.append(1) or chances(*args))
    two = [Standing(0, 9), Standing(1, 9)]
    for _ in range(NUM_FIRST):
        policy.note(2, [], 1.0)
    for _ in range(170):
        assert policy.allot(two) == [1, 1]
        policy.note(2, [], 1.0)
    assert 0 < len(calls) <= 2 * 10
    policy.note(1, [], 1.0)
    for verified in ([], [Verified(0, 9, 3, 3)]):
        calls.clear()
        policy.note(2, verified, 1.0)
        policy.allot(two if verified else [Standing(0, 9), Standing(2, 9)])
        assert len(calls) == 2


def test_that_no_draft_pays_stands_for_a_while_too(monkeypatch):
    policy = Adaptive(3)
    machine = Machine(policy, [0.0] * 8, num_drafts=3)
    machine.run(200)
    asked = []
    chances = Acceptance.chances
    monkeypatch.setattr(
        Acceptance, "chances", lambda self, *of: asked.append(of) or chances(self, *of)
    )
    num_verified = machine.num_verified
    machine.run(64)
    assert len(asked) <= 8 * (64 / 16 + 1 + machine.num_verified - num_verified)
