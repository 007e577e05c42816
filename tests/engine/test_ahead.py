"""Steps launched before the tokens of the one before are read: the same answers, nothing left
behind.
"""

import pytest
import torch

from milepost.engine.prompts import Prompt
from tests.engines import (
    NUM_TOKENS,
    WIDE_STATES,
    answer,
    ask,
    cached,
    greedy,
    logprobs,
    metric,
    num_held,
    sampled,
    save_tiny,
    tokens,
)
from tests.invariants import check


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("ahead"), "qwen3_next", torch.float64, **WIDE_STATES)


@pytest.fixture(params=[True, False], ids=["ahead", "plain"])
def llm(request, tiny):
    return tiny.open(async_scheduling=request.param)


@pytest.mark.parametrize("params", [greedy(), sampled(), sampled(n=3)])
def test_answers(tiny, llm, params):
    prompts = [tokens(70 + 60 * i, i) for i in range(4)]
    tiny.check(ask(llm, *prompts, params=params), params)
    assert num_held(llm) == (0, 0)


def test_answers_of_different_lengths(tiny, llm):
    prompts = [tokens(90, i) for i in range(6)]
    params = [greedy(1 + 3 * i) for i in range(6)]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, params, use_tqdm=False)
    for output, own in zip(outputs, params, strict=True):
        tiny.check([output], own)
    assert num_held(llm) == (0, 0)


def test_answer_that_ends_at_a_stop_token(tiny, llm):
    """The state after it is kept where it really stands, and the next turn resumes from there."""
    prompt = tokens(150)
    full = tiny.expected(prompt, greedy())
    stop = full[9]
    length = full.index(stop) + 1
    (output,) = ask(llm, prompt, params=greedy(stop_token_ids=[stop]))
    assert answer(output) == full[:length]
    assert output.outputs[0].finish_reason == "stop"
    assert num_held(llm) == (0, 0)
    (turn,) = ask(llm, [*prompt, *full[:length], *tokens(20, 9)])
    is_ahead = llm.llm_engine.config.async_scheduling
    assert cached([turn]) == [len(prompt) + length - (0 if is_ahead else 1)]
    tiny.check([turn])


def test_stop_in_a_batch_leaves_the_others(tiny, llm):
    prompts = [tokens(100, i) for i in range(4)]
    stops = [tiny.expected(prompt, greedy())[5 + i] for i, prompt in enumerate(prompts)]
    params = [greedy(stop_token_ids=[stop]) for stop in stops]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    for prompt, stop, output in zip(
        prompts, stops, llm.generate(given, params, use_tqdm=False), strict=True
    ):
        full = tiny.expected(prompt, greedy())
        assert answer(output) == full[: full.index(stop) + 1]
        expected = logprobs(tiny.cold(prompt, greedy()))
        assert logprobs(output.outputs[0]) == pytest.approx(expected[: len(answer(output))])
    assert num_held(llm) == (0, 0)
    check(llm.llm_engine.scheduler.cache)


def test_penalties_know_the_token_before(tiny, llm):
    params = greedy(repetition_penalty=1.5, presence_penalty=0.5, min_tokens=3)
    tiny.check(ask(llm, tokens(80), tokens(90, 1), params=params), params)


def test_abort_while_a_step_ahead_is_under_way(tiny, llm):
    for prompt in (tokens(100), tokens(100, 1)):
        stream = llm.stream({"prompt_token_ids": prompt}, greedy())
        for _ in range(4):
            next(stream)
        stream.close()
        assert num_held(llm) == (0, 0)
        check(llm.llm_engine.scheduler.cache)
    tiny.check(ask(llm, tokens(100)))


def test_preempted(tiny):
    """Memory that has to be found is found by a planned step, not by one ahead."""
    llm = tiny.open(async_scheduling=True, num_pages=18, num_slots=8)
    prompts = [tokens(200, i) for i in range(6)]
    params = greedy(60)
    tiny.check(ask(llm, *prompts, params=params), params)
    assert metric(llm, "num_preemptions") > 0
    assert num_held(llm) == (0, 0)


def test_a_step_ahead_is_taken(tiny, monkeypatch):
    llm = tiny.open(async_scheduling=True)
    launched = []
    launch = llm.llm_engine.runner.launch

    def note(plan, *args, **options):
        launched.append(plan.sequences[0].is_ahead)
        return launch(plan, *args, **options)

    monkeypatch.setattr(llm.llm_engine.runner, "launch", note)
    ask(llm, tokens(100))
    assert launched == [False] + [True] * (NUM_TOKENS - 1)


def test_min_tokens_counts_the_token_that_is_not_known_yet(tiny, llm):
    prompt = tokens(90)
    full = tiny.expected(prompt, greedy())
    num = next(i for i in range(3, len(full)) if full[i] not in full[:i])
    (output,) = ask(llm, prompt, params=greedy(stop_token_ids=[full[num]], min_tokens=num))
    assert answer(output) == full[: num + 1]


def test_requests_come_and_go_between_steps(tiny):
    """Prefills in chunks, shared prefixes, late arrivals and an abort, with a step under way."""
    llm = tiny.open(async_scheduling=True, max_num_batched_tokens=128, max_num_seqs=4)
    engine, shared, jobs = llm.llm_engine, tokens(300, 5), []

    def add(prompt):
        jobs.append(engine.add(Prompt(token_ids=prompt), greedy()))

    def step(num):
        for _ in range(num):
            engine.step()
            check(engine.scheduler.cache)

    add(tokens(200))
    step(3)
    add([*shared, *tokens(20, 6)])
    step(2)
    add([*shared, *tokens(20, 7)])
    add(tokens(150, 8))
    step(2)
    engine.abort(jobs[3])
    step(1)
    add([*tokens(150, 8), 3])
    add([*shared, *tokens(20, 9)])
    while engine.has_work:
        step(1)
    tiny.check(job.output() for job in jobs if job is not jobs[3])
    assert cached([jobs[2].output(), jobs[5].output()]) == [256, 256]
    assert num_held(llm) == (0, 0)


def test_prefills_and_admissions_are_taken_ahead(tiny, monkeypatch):
    llm = tiny.open(async_scheduling=True, max_num_batched_tokens=128, max_num_seqs=4)
    runner, behind = llm.llm_engine.runner, []
    launch = runner.launch

    def note(plan, *args, **options):
        behind.append(options.get("before") is not None)
        return launch(plan, *args, **options)

    monkeypatch.setattr(runner, "launch", note)
    tiny.check(ask(llm, tokens(300), tokens(400, 1), tokens(90, 2)))
    assert behind == [False] + [True] * (len(behind) - 1)
