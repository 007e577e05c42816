"""An MTP head drafts the same wherever a request resumes from: what it makes of the text before is
cached like any KV, and each slot carries the hidden state that it needs next.

Compared is what the head computes behind each token of an answer, number by number, with a cold
engine's, and that with the formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from msgspec import structs
from torch import Tensor

from milepost import LLM, SamplingParams
from tests.engines import (
    PAGE_SIZE,
    Tiny,
    answer,
    ask,
    cached,
    greedy,
    metric,
    sampled,
    save_tiny,
    tokens,
)
from tests.mtp import Formula, add_head

NUM_DRAFTS = 3
PARAMS = greedy(12)
"""Answers cross the end of a page."""


@dataclass
class Watched:
    """An engine that drafts behind every token, and what its head has computed."""

    llm: LLM
    drafts: dict[int, dict[int, Sequence[int]]] = field(default_factory=dict)
    """Request number -> position of a sampled token -> drafts behind it."""
    hidden: dict[int, dict[tuple[int, int], Tensor]] = field(default_factory=dict)
    """Request number -> position of a sampled token and number of the draft -> the head's state."""

    def __post_init__(self) -> None:
        runner = self.llm.llm_engine.runner
        self.llm.llm_engine.pipeline.speculation = None  # nothing is verified: all is drafted
        sample, drafting = runner.sample, runner.executor._drafting
        run, draft = drafting._pass, drafting.draft

        def sample_and_draft(flight, sampling):
            sample(flight, structs.replace(sampling, num_drafts=NUM_DRAFTS))

        def note_pass(begun, *given, index):
            states = run(begun, *given, index=index)
            for each, state in zip(begun, states, strict=True):
                self.hidden.setdefault(each.number, {})[each.position, index] = state
            return states

        def note_drafts(begun, *others):
            drafts = draft(begun, *others)
            for each in begun:
                self.drafts.setdefault(each.number, {})[each.position] = drafts[each.number]
            return drafts

        runner.sample = sample_and_draft
        drafting._pass, drafting.draft = note_pass, note_drafts

    def of(self, index: int) -> dict[tuple[int, int], Tensor]:
        """The head's states behind the `index`-th request, from the last ones if negative."""
        return self.hidden[sorted(self.hidden)[index]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tiny:
    sizes = {"linear_value_head_dim": 36}  # a state is no smaller than a page
    made = save_tiny(tmp_path_factory.mktemp("mtp"), "qwen3_5", torch.float64, **sizes)
    add_head(made.folder)
    return made


def open_watched(tiny: Tiny, **options) -> Watched:
    return Watched(tiny.open(speculative_config={"method": "mtp", "adaptive": False}, **options))


@pytest.fixture(scope="module")
def cold(tiny):
    """The head's states behind an answer, by an engine that keeps nothing."""
    watched, known = open_watched(tiny, enable_prefix_caching=False), {}

    def states(token_ids: Sequence[int], params=PARAMS) -> dict[tuple[int, int], Tensor]:
        key = (tuple(token_ids), repr(params))
        if key not in known:
            ask(watched.llm, token_ids, params=params)
            known[key] = watched.of(-1)
        return known[key]

    return states


def differ(found: dict, expected: dict) -> bool:
    """Behind the tokens that both had sampled as the last of a run."""
    common = found.keys() & expected.keys()
    assert len(common) > len(expected) // 2
    return any((found[key] - expected[key]).abs().max() > 1e-9 for key in common)


def siblings(shared: int, own: int, num: int) -> list[list[int]]:
    return [tokens(shared) + tokens(own, 1 + i) for i in range(num)]


def test_a_cold_engine_drafts_by_the_formula(tiny, cold):
    token_ids = tokens(100)
    states = cold(token_ids)
    text = torch.tensor(token_ids + tiny.expected(token_ids, PARAMS))
    hidden = hidden_of(tiny, text)
    formula = Formula(tiny.folder)
    for position in (100, 101, 108):
        expected = formula.logits(text[: position + 1], hidden[:position], NUM_DRAFTS)
        found = torch.stack([states[position, index] for index in range(NUM_DRAFTS)])
        found = found @ formula.lm_head.T
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert len(states) == NUM_DRAFTS * PARAMS.max_tokens


def hidden_of(tiny: Tiny, text: Tensor) -> Tensor:
    """The model's own hidden states, in one pass."""
    tiny.logits(text.tolist())
    seen = []
    logits = tiny._model.compute_logits
    tiny._model.compute_logits = lambda hidden: seen.append(hidden) or logits(hidden)
    tiny.logits(text.tolist())
    del tiny._model.compute_logits
    return seen[0]


@pytest.mark.parametrize("page_size", [16, 64])
def test_hits_at_pages_and_inside_them(tiny, cold, page_size):
    """The same prompt again and again: at its last grid position, then at its very end."""
    watched = open_watched(tiny, page_size=page_size)
    outputs = [ask(watched.llm, tokens(300), params=PARAMS)[0] for _ in range(3)]
    assert cached(outputs) == [0, 256, 299]
    assert not any(differ(watched.of(index), cold(tokens(300))) for index in range(3))


def test_without_what_slots_carry_drafts_would_differ(tiny, cold):
    """So the hits above are compared closely enough."""
    watched = open_watched(tiny)
    ask(watched.llm, tokens(300), params=PARAMS)
    watched.llm.llm_engine.runner.pools.carried.states.zero_()
    (output,) = ask(watched.llm, tokens(300), params=PARAMS)
    assert output.num_cached_tokens == 256
    assert differ(watched.of(-1), cold(tokens(300)))


def test_branch_point(tiny, cold):
    """The third prompt resumes where the first two part, and the second shares KV beyond its
    state."""
    watched = open_watched(tiny)
    prompts = siblings(200, 100, 3)
    outputs = [ask(watched.llm, each, params=PARAMS)[0] for each in prompts]
    assert cached(outputs) == [0, 0, 192]
    for index, token_ids in enumerate(prompts):
        assert not differ(watched.of(index), cold(token_ids))


def test_marks(tiny, cold):
    watched = open_watched(tiny)
    prompts = siblings(100, 50, 2)
    outputs = [ask(watched.llm, e, params=PARAMS, cache_marks=[100])[0] for e in prompts]
    assert cached(outputs) == [0, 100]
    assert not differ(watched.of(-1), cold(prompts[-1]))


@pytest.mark.parametrize("memory", ["shared", "split"])
def test_answer_ends(tiny, cold, memory):
    """Two turns of a chat that resume inside pages."""
    watched = open_watched(tiny, cache_memory=memory)
    (output,) = ask(watched.llm, tokens(150), params=PARAMS)
    for _ in range(2):
        history = [*output.prompt_token_ids, *answer(output)]
        (output,) = ask(watched.llm, [*history, *tokens(20, 9)], params=PARAMS)
        assert output.num_cached_tokens == len(history) - 1
        assert (len(history) - 1) % PAGE_SIZE
        assert not differ(watched.of(-1), cold(output.prompt_token_ids))


def test_preemption(tiny, cold):
    watched = open_watched(tiny, num_pages=6, max_num_batched_tokens=256)
    prompts = [tokens(100 + 10 * index, index) for index in range(3)]
    params = greedy(30)
    outputs = ask(watched.llm, *prompts, params=params)
    assert metric(watched.llm, "num_preemptions") > 0
    tiny.check(outputs, params)
    for index, token_ids in enumerate(prompts):
        assert not differ(watched.of(index), cold(token_ids, params))


def test_abort(tiny, cold):
    """What an answer that was given up leaves is as good as another's."""
    watched = open_watched(tiny)
    stream = watched.llm.stream({"prompt_token_ids": tokens(150)}, PARAMS)
    given = [next(stream) for _ in range(5)][-1]
    stream.close()
    history = [*tokens(150), *given.outputs[0].token_ids]
    (output,) = ask(watched.llm, [*history, *tokens(20, 9)], params=PARAMS)
    assert output.num_cached_tokens >= 150
    assert not differ(watched.of(-1), cold(output.prompt_token_ids))


def test_chunked_prompts_beside_others(tiny, cold):
    watched = open_watched(tiny, max_num_batched_tokens=64 + 3)
    prompts = siblings(150, 30, 3)
    ask(watched.llm, *prompts, params=PARAMS)
    for index, token_ids in enumerate(prompts):
        assert not differ(watched.of(index), cold(token_ids))


def test_sampled_answers_are_drafted_with_their_own_noise(tiny):
    """A draft that comes from the model's own distribution is the model's own token: here the head
    is asked for what the model says, and the draws agree."""
    watched, params = open_watched(tiny), sampled(12, temperature=1.5)
    model = watched.llm.llm_engine.runner.executor.model
    expected = tiny.expected(tokens(100), params)
    true = hidden_of(tiny, torch.tensor([*tokens(100), *expected]))
    drafting = watched.llm.llm_engine.runner.executor._drafting
    drafting._pass = lambda begun, *_, index: torch.stack(
        [true[min(each.position + index, len(true) - 1)] for each in begun]
    )
    (output,) = ask(watched.llm, tokens(100), params=params)
    assert answer(output) == expected
    (drafts,) = watched.drafts.values()
    assert model.mtp is not None
    for position, run in drafts.items():
        known = expected[position - 99 :][: len(run)]
        assert list(run[: len(known)]) == known
    assert len(drafts) == 12


SYSTEM = "You answer questions about the standard library of Python, in a sentence or two. " * 5


@pytest.fixture(scope="module")
def embedded():
    """The embedded model without its head, and with it."""
    options = {"dtype": "float64", "cpu_cache_gib": 0.1}
    wanted = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    return LLM(**options), LLM(**options, speculative_config=wanted)


def talk(llm: LLM, params: SamplingParams) -> tuple[list[int], int, int]:
    """An answer, and how many drafts were verified and accepted for it."""
    stats = llm.llm_engine.scheduler.stats
    before = stats.num_draft_tokens, stats.num_accepted_tokens
    question = {"role": "user", "content": "What does `str.partition` do?"}
    (output,) = llm.chat([{"role": "system", "content": SYSTEM}, question], params, use_tqdm=False)
    now = stats.num_draft_tokens, stats.num_accepted_tokens
    return answer(output), now[0] - before[0], now[1] - before[1]


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_the_embedded_models_answers_are_those_without_its_head(embedded, temperature):
    """With many drafts accepted, behind a hit as many as before it."""
    plain, llm = embedded
    params = SamplingParams(temperature=temperature, max_tokens=16, seed=3)
    expected, _, _ = talk(plain, params)
    llm.reset_prefix_cache()
    num_hits = metric(llm, "prefix_cache_hits")
    cold, hit = talk(llm, params), talk(llm, params)
    assert metric(llm, "prefix_cache_hits") > num_hits
    assert cold == hit
    assert cold[0] == expected
    assert cold[2] >= 5, "real drafts are accepted"
