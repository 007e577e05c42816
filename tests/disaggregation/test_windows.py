"""Layers with a sliding window on two engines: a state comes with the pages of its window."""

from __future__ import annotations

from random import Random

import pytest
import torch

from tests.disaggregation.fleet import connector_of, open_engine, running
from tests.engines import greedy, sampled, save_tiny, tokens
from tests.invariants import check

PAGE, WINDOW = 16, 40
SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
OPTIONS = {"page_size": PAGE, "max_num_batched_tokens": 96}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("windows")
    return save_tiny(folder, "lfm3", torch.float64, sliding_window=WINDOW, **SMALL)


@pytest.fixture
def fleet(tiny, transport):
    engines = [open_engine(tiny.folder, transport, **OPTIONS) for _ in range(2)]
    with running(*engines) as fleet:
        yield fleet


def num_windows(position):
    """Pages with KV of the last tokens before a position that the next one attends to."""
    return -(-position // PAGE) - max(position + 1 - WINDOW, 0) // PAGE


def test_answers_are_one_engines_and_only_what_is_lacking_moves(tiny, fleet):
    """Of prompts on both sides of a window, and around the edges of pages."""
    random, base = Random(2), tokens(140, 1)
    first, second = fleet.engines
    page, state, window = map(sum, connector_of(second).links.hello.layout.piece_bytes)
    assert window > 0
    for number, length in enumerate((20, 41, 48, 57, 81, 113, 140)):
        asked = base[:length] + [random.randrange(50) for _ in range(random.randrange(1, 90))]
        position, moved = len(asked) - 1, connector_of(second).num_bytes
        match = second.scheduler.cache.match(second.scheduler.cache.chain(asked))
        params = fleet.prefill(first, asked)
        sampling = sampled(5, temperature=1.0, seed=number) if number % 3 else greedy(5)
        job = fleet.decode(second, asked, params, sampling)
        assert job.completions[0].request.output_token_ids == tiny.expected(asked, sampling)
        if job.completions[0].request.report.loaded:
            num_pages = -(-position // PAGE) - len(match.path.nodes)
            expected = page * num_pages + state + window * num_windows(position)
            assert connector_of(second).num_bytes - moved == expected
    assert connector_of(second).num_fetched > 3
    assert not connector_of(second).num_failed
    fleet.check()


def test_what_is_lent_stays_while_all_else_goes(tiny, fleet):
    """The lender has other prompts for all of its memory before the state is read."""
    first, second = fleet.engines
    prompt = tokens(150, 3)
    params = fleet.prefill(first, prompt)
    cache = first.scheduler.cache
    (loan,) = cache.loans
    assert len(loan.windows) == num_windows(len(prompt) - 1)
    for seed in range(30):
        fleet.decode(first, tokens(150, 10 + seed), None)
    assert cache.stats.checkpoints_evicted
    check(cache)
    job = fleet.decode(second, prompt, params)
    assert job.completions[0].request.report.reused == len(prompt) - 1
    assert job.completions[0].request.output_token_ids == tiny.expected(prompt, greedy(4))
    fleet.check()


@pytest.mark.parametrize(
    "options",
    [{}, {"cache_host_gib": 0.02, "num_pages": 24, "num_slots": 4}],
    ids=["in memory", "host memory too"],
)
def test_conversations_that_go_back_and_forth(tiny, options):
    """What another engine has, this one, or its host memory."""
    engines = [open_engine(tiny.folder, "socket", **(OPTIONS | options)) for _ in range(2)]
    with running(*engines) as fleet:
        histories = [tokens(30, 4), tokens(90, 5)]
        for turn in range(4):
            first, second = engines[turn % 2], engines[1 - turn % 2]
            for number, history in enumerate(histories):
                job = fleet.decode(second, history, fleet.prefill(first, history), greedy(11))
                output = job.completions[0].request.output_token_ids
                assert output == tiny.expected(history, greedy(11))
                histories[number] = [*history, *output, *tokens(37, 20 + turn + 10 * number)]
        assert any(connector_of(engine).num_fetched for engine in engines)
        fleet.check()
