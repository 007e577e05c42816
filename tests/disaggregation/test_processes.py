"""Engines in processes of their own, as they are in earnest: random requests, and sudden deaths.
Not of every run, since processes take long to start: `make test-nightly`.
"""

from __future__ import annotations

import contextlib

import pytest

from tests.disaggregation.processes import Process, Traffic
from tests.engines import greedy, tokens

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]
SHORT = {"extra": {"timeout_s": 3.0, "lease_s": 2.0}}


def test_random_requests_and_engines_that_are_killed(tiny, transport):
    """One that decodes dies before it has read, another while it does: what was lent to them is
    free when its lease is over, and others go on reading there.
    One that has prefilled dies while it is read: the prompt is computed where it is decoded."""
    engines = [Process(tiny.folder, transport, SHORT) for _ in range(4)]
    first, second, third, fourth = engines
    try:
        counts = Traffic(tiny, engines, seed=1).run(16)
        assert counts["nothing moved"]
        assert counts["pages too"]
        for each in engines:
            assert each.do("check")[1] == 0
        asked = tokens(230, 50)
        second.kill()
        assert first.do("prefill", asked, "")
        assert first.do("check") == (1, 1)
        assert first.do("await_leases")
        assert first.do("check") == (0, 0)
        fourth.do("die_at_read")
        params = first.do("prefill", tokens(230, 51), "")
        fourth.begin("decode", tokens(230, 51), "", params, greedy(3))
        fourth.process.join(20)
        assert fourth.process.exitcode == -9
        assert first.do("await_leases")
        assert first.do("check") == (0, 0)
        found = third.do("decode", asked, "", first.do("prefill", asked, ""), greedy(3))
        assert found["tokens"] == tiny.expected(asked, greedy(3))
        assert found["bytes"] == found["expected_bytes"] > 0, "others go on reading from it"
        assert third.do("forget")
        params = first.do("prefill", asked, "")
        third.do("kill_at_read", first.process.pid)
        found = third.do("decode", asked, "", params, greedy(3))
        assert found["tokens"] == tiny.expected(asked, greedy(3))
        assert (found["failed"], found["bytes"], found["reused"]) == (1, 0, 0)
        first.process.join(20)
        assert first.process.exitcode == -9
        again = third.do("decode", asked, "", params, greedy(3))
        assert again["reused"] == 192, "it is there, and nobody is asked"
        assert third.do("check")[1] == 0
    finally:
        for each in engines:
            each.close()


@pytest.mark.parametrize(
    ("num_engines", "num_ranks", "num_requests"), [(2, 1, 1000), (4, 1, 1000), (2, 2, 200)]
)
def test_random_requests(tiny, tiny_of_two, transport, num_engines, num_ranks, num_requests):
    """Answers are one engine's, and what moves is what was lacking."""
    if num_ranks > 1:
        tiny = tiny_of_two
    with contextlib.ExitStack() as stack:
        options = {"tensor_parallel_size": num_ranks}
        engines = [Process(tiny.folder, transport, options) for _ in range(num_engines)]
        for each in engines:
            stack.callback(each.close)
        counts = Traffic(tiny, engines, seed=0).run(num_requests)
        assert counts["nothing moved"] > num_requests // 10
        assert counts["attention's pages there, the state not"] > num_requests // 50
        assert counts["pages too"] > num_requests // 10
        for each in engines:
            assert each.do("check")[1] == 0, "nothing is held"
