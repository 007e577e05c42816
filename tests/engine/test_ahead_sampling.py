"""Whatever a request asks for together, beside whatever others, with steps launched ahead: the
answer is that of the plain loop, alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost import LLM, SamplingParams
from milepost.engine.loop.group import RequestGroup
from milepost.engine.prompts import Prompt, read_prompt
from milepost.sampling_params import StructuredOutputs
from tests import chatmodel
from tests.invariants import check

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Zürich", "Bern"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
MOST = [*range(10, chatmodel.VOCAB_SIZE)]
"""Ids of which an answer soon has one."""
WISHES = {
    "greedy": {"temperature": 0},
    "recommended": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "presence_penalty": 1.5},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "several": {"n": 2, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.5},
    "schema": {
        "structured_outputs": StructuredOutputs(json=SCHEMA),
        "max_tokens": 40,
    },
    "regex": {
        "structured_outputs": StructuredOutputs(regex="[a-f ]{9}"),
        "repetition_penalty": 1.2,
    },
    "choice": {"structured_outputs": StructuredOutputs(choice=["yes", "no"]), "top_k": 5},
    "end": {"min_tokens": 7, "stop_token_ids": MOST, "logit_bias": {40: 5.0}},
    "late end": {"min_tokens": 11, "stop_token_ids": MOST, "presence_penalty": 1.0, "top_k": 30},
    "stop": {"stop": ["e", "a"], "min_tokens": 2, "temperature": 1.5},
    "first": {"max_tokens": 1, "min_p": 0.1},
}
wishes = st.sampled_from(list(WISHES))


@dataclass(slots=True)
class Side:
    """Engines on one checkpoint, and what each wish is answered alone."""

    plain: LLM
    ahead: LLM
    """With so little memory that requests are preempted."""
    answers: dict[str, list[list[int]]] = field(default_factory=dict)

    def ask(self, wish: str) -> tuple[Prompt, SamplingParams]:
        number = list(WISHES).index(wish)
        text = "you are a helpful assistant. " * (number % 3) + wish
        options = {"max_tokens": 24, "seed": number} | WISHES[wish]
        return read_prompt(text, self.plain.get_tokenizer()), SamplingParams(**options)

    def alone(self, wish: str) -> list[list[int]]:
        if wish not in self.answers:
            job = self.plain.llm_engine.add(*self.ask(wish))
            while not job.is_finished:
                self.plain.llm_engine.step()
            self.answers[wish] = token_ids(job)
        return self.answers[wish]


def token_ids(job: RequestGroup) -> list[list[int]]:
    return [list(answer.token_ids) for answer in job.output().outputs]


@pytest.fixture(scope="module")
def side(tmp_path_factory) -> Side:
    folder = str(chatmodel.save(tmp_path_factory.mktemp("model"), scale=0.6))
    options = {"dtype": "float64", "page_size": 16, "cpu_cache_gib": 0.02}
    little = {"num_pages": 11, "num_slots": 7, "max_num_seqs": 5}
    return Side(
        plain=LLM(folder, **options, async_scheduling=False, enable_prefix_caching=False),
        ahead=LLM(folder, **options, **little, async_scheduling=True),
    )


@settings(max_examples=15, derandomize=True)
@given(
    st.lists(
        st.tuples(wishes, st.integers(0, 12), st.none() | st.integers(1, 15)),
        min_size=1,
        max_size=7,
    )
)
def test_answers_are_those_of_the_plain_loop(side, wanted):
    """Of (wish, step at which it comes, steps until it is given up)."""
    engine = side.ahead.llm_engine
    jobs: list[tuple[str, int, RequestGroup]] = []
    for step in range(10_000):
        for wish, comes, _ in wanted:
            if comes == step:
                jobs.append((wish, step, engine.add(*side.ask(wish))))
        leaves = {(wish, comes): comes + stay for wish, comes, stay in wanted if stay is not None}
        for wish, comes, job in jobs:
            if leaves.get((wish, comes)) == step and not job.is_finished:
                engine.abort(job)
        if engine.has_work:
            engine.step()
        elif step > 12:
            break
    cache = engine.scheduler.cache
    check(cache)
    assert (cache.pages.num_used, cache.slots.num_used) == (0, 0)
    for wish, _, job in jobs:
        reasons = [answer.request.finish_reason for answer in job.completions]
        for found, expected, reason in zip(token_ids(job), side.alone(wish), reasons, strict=True):
            assert found == (expected[: len(found)] if reason.value == "abort" else expected)


def test_requests_are_preempted_among_them(side):
    """Else the test above would not show that they come back right."""
    engine = side.ahead.llm_engine
    before = engine.scheduler.stats.num_preemptions
    names = ["recommended", "schema", "several", "regex", "penalties"]
    jobs = {name: engine.add(*side.ask(name)) for name in names}
    while engine.has_work:
        engine.step()
    assert engine.scheduler.stats.num_preemptions > before
    assert {name: token_ids(job) for name, job in jobs.items()} == {n: side.alone(n) for n in names}


@pytest.mark.parametrize("wish", ["schema", "recommended", "late end"])
def test_steps_are_launched_ahead(side, monkeypatch, wish):
    engine, launched = side.ahead.llm_engine, []
    launch = engine.runner.launch

    def note(plan, *args, **options):
        launched.append(plan.sequences[0].is_ahead)
        return launch(plan, *args, **options)

    monkeypatch.setattr(engine.runner, "launch", note)
    job = engine.add(*side.ask(wish))
    while engine.has_work:
        engine.step()
    assert len(token_ids(job)[0]) > 4
    assert launched[1:] == [True] * (len(launched) - 1)


def test_a_form_is_kept_to(side):
    engine = side.ahead.llm_engine
    job = engine.add(*side.ask("regex"))
    while engine.has_work:
        engine.step()
    assert re.fullmatch("[a-f ]{9}", job.output().outputs[0].text)


@pytest.mark.parametrize("wish", ["end", "late end"])
def test_min_tokens_counts_the_token_that_is_not_known_yet(side, wish):
    """Nearly every id ends the answer as soon as it may."""
    engine = side.ahead.llm_engine
    job = engine.add(*side.ask(wish))
    while engine.has_work:
        engine.step()
    assert len(token_ids(job)[0]) == WISHES[wish]["min_tokens"] + 1
