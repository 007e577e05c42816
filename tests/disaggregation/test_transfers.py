"""Prompts that one engine computes and another goes on with: right, and with no byte too many."""

from __future__ import annotations

import select
from random import Random

import pytest

from milepost.cache import Lost
from milepost.engine.prompts import Prompt
from milepost.errors import InvalidRequestError
from tests.disaggregation.fleet import (
    PREFILL,
    connector_of,
    lacking,
    open_engine,
    running,
    sizes,
)
from tests.engines import VOCAB_SIZE, greedy, sampled, tokens


@pytest.fixture
def fleet(tiny, transport):
    """The first prefills, the second decodes, unless somebody wants it the other way."""
    engines = [open_engine(tiny.folder, transport) for _ in range(2)]
    with running(*engines) as fleet:
        yield fleet


def report_of(job):
    return job.completions[0].request.report


def output_of(job):
    return job.completions[0].request.output_token_ids


def test_answers_are_one_engines_and_only_what_is_lacking_moves(tiny, fleet):
    random, bases = Random(1), [tokens(150, seed) for seed in (1, 2)]
    counts = {"nothing": 0, "a state and a tail": 0, "pages too": 0}
    for number in range(20):
        own = [random.randrange(VOCAB_SIZE) for _ in range(random.randrange(90))]
        asked = random.choice(bases)[: random.randrange(1, 151)] + own
        first, second = fleet.engines if random.random() < 0.8 else fleet.engines[::-1]
        if random.random() < 0.2:
            fleet.decode(second, asked[: random.randrange(1, len(asked) + 1)], None)
        params = fleet.prefill(first, asked)
        if params is None:
            assert len(asked) == 1, "nothing stands before the last token"
            continue
        assert params["remote_num_tokens"] == len(asked) - 1
        expected, before = lacking(second, asked, len(asked) - 1), connector_of(second).num_bytes
        sampling = sampled(3, temperature=1.0, seed=number) if number % 3 else greedy(3)
        job = fleet.decode(second, asked, params, sampling)
        assert connector_of(second).num_bytes - before == expected
        assert output_of(job) == tiny.expected(asked, sampling)
        if expected:
            assert report_of(job).reused == len(asked) - 1
            assert set(report_of(job).loaded) == {"remote"}
        few = sum(sizes(second))
        kind = "pages too" if expected > few else "a state and a tail" if expected else "nothing"
        counts[kind] += 1
    assert all(counts.values()), counts
    counters = connector_of(fleet.engines[1]).counters
    assert 0 < counters["kv_transfer_read_seconds"] < counters["kv_transfer_seconds"]
    assert [connector_of(engine).num_failed for engine in fleet.engines] == [0, 0]
    fleet.check()


def test_pages_without_a_state_save_their_transfer(fleet):
    """The attention's pages are there, the state that they need is not: only that comes."""
    first, second = fleet.engines
    prompt = tokens(400)
    fleet.decode(second, prompt, None)
    parting = prompt[:300] + tokens(1, 5)
    match = second.scheduler.cache.match(second.scheduler.cache.chain(parting))
    assert (match.state_length, len(match.path.nodes)) == (0, 300 // 64)
    job = fleet.decode(second, parting, fleet.prefill(first, parting))
    page, state = sizes(second)
    assert connector_of(second).num_bytes == page + state, "the tail's page, and the state"
    assert report_of(job).reused == 300
    fleet.check()


def test_what_was_fetched_is_cached_like_what_was_computed(tiny, fleet):
    first, second = fleet.engines
    prompt = tokens(300)
    job = fleet.decode(second, prompt, fleet.prefill(first, prompt))
    moved = connector_of(second).num_bytes
    again = fleet.decode(second, [*prompt, *output_of(job), *tokens(100, 3)], None)
    assert report_of(again).reused == len(prompt) + len(output_of(job)) - 1
    elsewhere = fleet.decode(second, prompt[:-1] + tokens(50, 4), None)
    assert report_of(elsewhere).reused >= 256
    assert connector_of(second).num_bytes == moved
    back = fleet.decode(first, prompt + tokens(80, 5), None)
    assert report_of(back).reused == len(prompt) - 1, "who prefilled keeps it as well"
    fleet.check()


def test_a_full_local_hit_moves_nothing(fleet):
    first, second = fleet.engines
    prompt = tokens(300)
    fleet.decode(second, prompt, None)
    params = fleet.prefill(first, prompt)
    fleet.decode(second, prompt, params)
    assert connector_of(second).num_bytes == 0
    fleet.until(lambda: not len(connector_of(first).leases))
    assert connector_of(first).leases.num_expired == 0, "it was told that nobody wants it"
    fleet.check()


def test_a_device_that_is_still_busy_is_waited_for_though_nobody_steps(tiny, fleet, monkeypatch):
    """The engine sleeps until its bell rings, so who rings it looks at the device as well."""
    first, second = fleet.engines
    prompt, looks = tokens(300), iter([False, False, False])
    params = fleet.prefill(first, prompt)
    monkeypatch.setattr(second.runner, "fence", lambda: lambda: next(looks, True))
    job = fleet.add(second, prompt, params)
    while not second.awaits_others:
        second.step()
    assert select.select([second.wakers[0]], [], [], 10)[0], "it has come"
    assert next(looks, None) is None, "three looks were in vain"
    fleet.run(job)
    assert output_of(job) == tiny.expected(prompt, greedy(4))
    assert set(report_of(job).loaded) == {"remote"}
    fleet.check()


def test_several_answers_fetch_once(tiny, fleet):
    first, second = fleet.engines
    prompt = tokens(200)
    params, sampling = fleet.prefill(first, prompt), sampled(4, temperature=1.0, n=3)
    job = fleet.decode(second, prompt, params, sampling)
    outputs = [answer.request.output_token_ids for answer in job.completions]
    assert outputs == [tiny.expected(prompt, sampling, index) for index in range(3)]
    page, state = sizes(second)
    assert connector_of(second).num_bytes == 4 * page + state
    fleet.check()


def test_many_at_once_and_others_between(tiny, fleet):
    first, second = fleet.engines
    prompts = [tokens(100 + 17 * number, number) for number in range(8)]
    params = [fleet.prefill(first, prompt) for prompt in prompts]
    jobs = [fleet.add(second, *pair) for pair in zip(prompts, params, strict=True)]
    others = [fleet.add(second, tokens(150, 30 + number), None) for number in range(3)]
    fleet.run(*jobs, *others)
    for prompt, job in zip(prompts, jobs, strict=True):
        assert output_of(job) == tiny.expected(prompt, greedy(4))
        assert report_of(job).reused == len(prompt) - 1
    assert connector_of(second).num_fetched == 8
    fleet.check()


def test_salts_are_kept_apart(fleet):
    first, second = fleet.engines
    prompt = tokens(200)
    salted = Prompt(token_ids=prompt, cache_salt="mine", kv_transfer_params=PREFILL)
    job = first.add(salted, greedy(1))
    fleet.run(job)
    with_salt = Prompt(
        token_ids=prompt, cache_salt="mine", kv_transfer_params=job.kv_transfer_params
    )
    fetched = second.add(with_salt, greedy(2))
    fleet.run(fetched)
    assert report_of(fetched).reused == 199
    plain = fleet.decode(second, prompt, None)
    assert report_of(plain).reused == 0
    fleet.check()


def test_a_prompt_that_is_scored_is_fetched_by_nobody(tiny, fleet):
    """All of it is computed; the prefill engine is told, and keeps nothing for it."""
    first, second = fleet.engines
    prompt = tokens(200)
    params = fleet.prefill(first, prompt)
    job = fleet.decode(second, prompt, params, greedy(4, prompt_logprobs=0))
    assert output_of(job) == tiny.expected(prompt, greedy(4))
    assert len(job.completions[0].prompt_logprobs) == 200
    assert (connector_of(second).num_fetched, connector_of(second).num_failed) == (0, 0)
    assert not report_of(job).lost.keys() & {Lost.LATE_COPY}
    fleet.check()
    assert connector_of(first).leases.num_expired == 0


@pytest.mark.parametrize("name", ["remote_host", "remote_port", "remote_request_id"])
def test_params_that_say_nothing_are_refused(fleet, name):
    first, second = fleet.engines
    params = fleet.prefill(first, tokens(100))
    with pytest.raises(InvalidRequestError, match=name):
        fleet.add(second, tokens(100), {**params, name: None})
    fleet.decode(second, tokens(100), params)
    fleet.check()


def test_the_next_turn_fetches_the_answers_end_from_who_decoded(tiny, fleet):
    """The prefill side asks who went on with its prompt, and computes only what is new."""
    first, second = fleet.engines
    history, moved, end = tokens(200), 0, 0
    for turn in range(3):
        params = fleet.prefill(first, history)
        job = fleet.decode(second, history, params, greedy(70))
        assert output_of(job) == tiny.expected(history, greedy(70))
        if turn:
            assert report_of(fleet.last_prefill).loaded, "the end of the answer before"
            assert report_of(fleet.last_prefill).reused == end
            assert connector_of(first).num_bytes > moved
        moved = connector_of(first).num_bytes
        end = len(history) + 69
        history = [*history, *output_of(job), *tokens(90, 10 + turn)]
    fleet.check()


def test_who_does_not_say_what_it_has_is_not_waited_for(tiny, fleet):
    first, second = fleet.engines
    prompt = tokens(200)
    job = fleet.decode(second, prompt, fleet.prefill(first, prompt))
    fleet.until(lambda: connector_of(first)._readers)
    second.reset_prefix_cache()
    history = [*prompt, *output_of(job), *tokens(90, 3)]
    params = fleet.prefill(first, history)
    assert report_of(fleet.last_prefill).reused == len(prompt) - 1, "its own"
    assert not connector_of(first)._readers, "it is not asked again"
    assert params["remote_num_tokens"] == len(history) - 1
    fleet.decode(second, history, params)
    fleet.check()


def test_a_prefill_is_given_up_while_it_asks_elsewhere(fleet):
    first, second = fleet.engines
    prompt = tokens(200)
    fleet.decode(second, prompt, fleet.prefill(first, prompt))
    fleet.until(lambda: connector_of(first)._readers)
    prompt = prompt + tokens(100, 3)
    asked = Prompt(token_ids=prompt, kv_transfer_params=PREFILL)
    job = first.add(asked, greedy(1))
    assert first.has_work
    assert not first.scheduler.has_work
    first.abort(job)
    assert job.is_finished
    assert not first.has_work
    fleet.check()
