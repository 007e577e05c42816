"""Who waits for a prefix that another one is computing, and for how long."""

from __future__ import annotations

import pytest

from milepost.engine.metrics import collect
from milepost.scheduler.request import FinishReason
from tests.scheduler.test_peers import Bench, tokens


def submit_pair(bench: Bench, prompt: list[int]):
    """One that computes the prompt in several steps, and one that waits for it."""
    first = bench.submit(prompt, max_tokens=2)
    bench.step()
    second = bench.submit([*prompt, 5], max_tokens=2)
    before = bench.scheduler.stats.num_waits
    bench.step()
    assert second.allocation is None
    assert bench.scheduler.stats.num_waits == before + 1
    return first, second


def test_who_waits_resumes_where_the_other_has_got():
    bench = Bench(budget=128)
    prompt = tokens(500)
    _, second = submit_pair(bench, prompt)
    bench.run()
    assert second.report.reused == 448
    assert bench.is_right(second)


def test_who_waits_for_a_prefix_counts_as_deferred():
    bench = Bench(budget=128)
    submit_pair(bench, tokens(500))
    assert waiting(bench) == {"capacity": 0, "deferred": 1}
    bench.run()
    assert waiting(bench) == {"capacity": 0, "deferred": 0}
    bench.submit(tokens(70, seed=3), max_tokens=2)
    assert waiting(bench) == {"capacity": 1, "deferred": 0}


def waiting(bench: Bench) -> dict[str, float]:
    name = "milepost:num_requests_waiting_by_reason"
    found = [metric for metric in collect(bench.scheduler) if metric.name == name]
    return {metric.labels["reason"]: metric.value for metric in found}


def test_who_waits_for_one_that_goes_away_goes_on_at_once():
    bench = Bench(budget=128)
    first, second = submit_pair(bench, tokens(500))
    bench.scheduler.finish(first, FinishReason.ABORT)
    bench.step()
    assert second.allocation is not None
    bench.run()
    assert bench.is_right(second)


@pytest.mark.parametrize("ending", ["done", "aborted", "rolled back"])
def test_a_claim_ends_with_its_request(ending):
    """What one computed and was forgotten is the next one's to compute, and to be waited for."""
    bench = Bench(budget=128)
    prompt = tokens(500)
    first = bench.submit(prompt, max_tokens=2)
    bench.step()
    if ending == "done":
        bench.run()
    elif ending == "rolled back":
        bench.scheduler.roll_back(bench.scheduler.schedule())
    bench.scheduler.finish(first, FinishReason.ABORT)
    assert bench.cache.reset()
    _, second = submit_pair(bench, prompt)
    bench.run()
    assert second.report.reused == 448
    pending = bench.scheduler._admission.pending
    assert not pending._owners
    assert not pending._claims
    assert not pending._unlisted


def test_who_computes_an_answer_again_claims_no_page_of_it_for_good():
    """It was preempted, and its answer is as long as some pages."""
    bench = Bench(budget=128)
    request = bench.submit(tokens(100), max_tokens=300)
    while request.num_output_tokens < 200:
        bench.step()
    bench.scheduler._requests.preempt(request)
    assert bench.cache.reset()
    bench.run()
    assert bench.is_right(request)
    pending = bench.scheduler._admission.pending
    assert not pending._owners
