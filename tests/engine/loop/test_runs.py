"""Runs of tokens: a step that samples several for a request leaves the answer that as many steps of
one token each leave, whatever ends it, and wherever in the run.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.cache import Cache
from milepost.config import EngineConfig
from milepost.engine.assembly.setup import EngineParts
from milepost.engine.loop.core import Engine
from milepost.engine.loop.group import RequestGroup
from milepost.engine.outputs import GrowingOutput, joined
from milepost.engine.prompts import Prompt
from milepost.engine.validation import Limits
from milepost.runner.choice import SampledToken
from milepost.runner.in_flight import InFlightStep
from milepost.runner.runner import RunnerOutput
from milepost.sampling_params import SamplingParams, StructuredOutputs
from milepost.scheduler.plans import SamplingPlan, StepPlan, StepResult, StepSampling
from milepost.scheduler.scheduler import Scheduler
from tests import chatmodel
from tests.invariants import check

TOKENIZER = chatmodel.make_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
TEXTS = [
    "the quick brown fox jumps over the lazy dog, again and again",
    "日本語の文章と naïve café 🙂🙃 end of story END STOP stop",
    "yes yes no, and then some more of the same",
]
FORMS: list[tuple[StructuredOutputs | None, list[str]]] = [
    (None, TEXTS),
    (StructuredOutputs(choice=["yes", "no, never"]), ["yes yes", "no, never again"]),
    (StructuredOutputs(regex="[a-f ]{9}"), ["fade a cab and more", "cafe cafe"]),
    (StructuredOutputs(json={"type": "array", "items": {"type": "integer"}}), ["[12, 3] and", ""]),
]


@dataclass(frozen=True)
class Wish:
    """One request, and what would be sampled for it if it never ended."""

    params: SamplingParams
    text: str
    num_prompt: int = 20


def script_of(wish: Wish) -> list[int]:
    """Ids at each place of the answer. Those that end it do not come while they may not."""
    ids = [*TOKENIZER.encode(wish.text), END, *TOKENIZER.encode(TEXTS[0] * 9)]
    params = wish.params
    ends = {END, *(params.stop_token_ids or ())}
    head = [5 if id_ in ends else id_ for id_ in ids[: params.min_tokens]]
    return [*head, *ids[params.min_tokens :]]


class ScriptedRunner:
    """Samples what scripts say: the first token of a run under its mask, the others as they are."""

    def __init__(self, scripts: Mapping[int, tuple[int, list[int]]], most: int, seed: int) -> None:
        self.scripts = scripts
        """By request number: the prompt's length, and the ids of the answer."""
        self.most = most
        self.rng = random.Random(seed)
        self.executor = SimpleNamespace(keeps_counts=True)
        self.rows: dict[int, SamplingPlan] = {}
        self.num_tokens: list[int] = []

    def launch(self, plan: StepPlan, before: InFlightStep | None = None) -> InFlightStep:  # noqa: ARG002
        return InFlightStep(plan=plan, numbers=[s.number for s in plan.sequences if s.samples])

    def sample(self, flight: InFlightStep, sampling: StepSampling) -> None:  # noqa: ARG002
        self.rows = {row.number: row for row in sampling.rows}

    def fence(self) -> None:
        raise AssertionError("nothing is fetched from elsewhere")

    def collect(self, flight: InFlightStep) -> RunnerOutput:
        sampled: dict[int, Sequence[SampledToken]] = {}
        for sequence in flight.plan.sequences:
            sampled[sequence.number] = ()
            if sequence.samples:
                run = self._run(sequence.number, sequence.end)
                sampled[sequence.number] = run
                self.num_tokens.append(len(run))
        tokens = {number: [one.token_id for one in run] for number, run in sampled.items()}
        result = StepResult(tokens=tokens, written=flight.plan.written)
        return RunnerOutput(result=result, sampled=sampled)

    def _run(self, number: int, end: int) -> list[SampledToken]:
        num_prompt, script = self.scripts[number]
        row, place = self.rows[number], end - num_prompt
        assert row.index == place
        token_ids = script[place : place + self.rng.randint(1, self.most)]
        if row.mask is not None:
            bits = np.unpackbits(np.frombuffer(row.mask, np.uint8), bitorder="little")
            if not bits[token_ids[0]]:
                token_ids = [int(bits.argmax())]
        return [self._sampled(id_, place + i, row.params) for i, id_ in enumerate(token_ids)]

    def _sampled(self, id_: int, place: int, params: SamplingParams) -> SampledToken:
        if params.logprobs is None:
            return SampledToken(id_)
        return SampledToken(id_, -place / 7, {id_: -place / 7, 3: -9.0}, 1)


def engine_of(scripts: Mapping[int, tuple[int, list[int]]], most: int, seed: int) -> Engine:
    cache = Cache(num_pages=14, num_slots=5, page_size=16)
    parts = EngineParts(
        scheduler=Scheduler(cache, max_num_seqs=3, max_num_batched_tokens=64),
        runner=ScriptedRunner(scripts, most, seed),
        tokenizer=TOKENIZER,
        end_token_ids=(END,),
        sampling_defaults={},
        limits=Limits.of(
            EngineConfig(),
            vocab_size=chatmodel.VOCAB_SIZE,
            max_model_len=200,
            closes_reasoning=False,
        ),
        facts=None,
    )
    return Engine(EngineConfig(max_num_seqs=3, max_num_batched_tokens=64), parts)


def answers(wishes: Sequence[Wish], most: int, seed: int = 0) -> tuple[list[Any], list[int]]:
    """All that callers get, whole and as a stream, and the lengths of the runs."""
    scripts = {number: (wish.num_prompt, script_of(wish)) for number, wish in enumerate(wishes)}
    engine = engine_of(scripts, most, seed)
    jobs = [engine.add(_prompt(number, wish), wish.params) for number, wish in enumerate(wishes)]
    streams: dict[RequestGroup, Any] = {}
    growing = {job: GrowingOutput(str(job.number), job.prompt, 1) for job in jobs}
    while engine.has_work:
        for job in engine.step():
            taken = job.take_output()
            growing[job].take(taken)
            new = replace_report(taken)
            streams[job] = joined(streams[job], new) if job in streams else new
        check(engine.scheduler.cache)
    cache = engine.scheduler.cache
    assert (cache.pages.num_used, cache.slots.num_used) == (0, 0)
    outputs = [
        replace(each.output(), cache_report=None, num_cached_tokens=0) for each in growing.values()
    ]
    for job, output in zip(jobs, outputs, strict=True):
        (delta,), (whole,) = streams[job].deltas, output.outputs
        assert whole.token_ids == job.completions[0].request.output_token_ids
        assert (delta.text, delta.token_ids) == (whole.text, whole.token_ids)
        assert (delta.finish_reason, delta.logprobs) == (whole.finish_reason, whole.logprobs)
    return [*outputs, *streams.values()], engine.runner.num_tokens


def replace_report(output: Any) -> Any:
    """Without what depends on when it was admitted."""
    return type(output)(number=0, deltas=output.deltas, finished=output.finished)


def _prompt(number: int, wish: Wish) -> Prompt:
    return Prompt(token_ids=[(7 * number + i) % 400 for i in range(wish.num_prompt)])


@st.composite
def wishes(draw: st.DrawFn) -> Wish:
    form, texts = draw(st.sampled_from(FORMS))
    text = draw(st.sampled_from(texts))
    ids = TOKENIZER.encode(text) or [5]
    options: dict[str, Any] = {"max_tokens": draw(st.integers(1, 40))}
    if form is None:
        options["min_tokens"] = draw(st.sampled_from([0, 0, 2, 9]))
        options["ignore_eos"] = draw(st.booleans())
    options["logprobs"] = draw(st.sampled_from([None, 0, 2]))
    if draw(st.booleans()):
        options["stop_token_ids"] = [draw(st.sampled_from(ids))]
    if draw(st.booleans()):
        first = draw(st.integers(0, max(len(text) - 1, 0)))
        options["stop"] = [text[first : first + draw(st.integers(1, 5))] or "x", "🙂🙃"]
        options["include_stop_str_in_output"] = draw(st.booleans())
    options["detokenize"] = "stop" in options or draw(st.booleans())
    options["max_tokens"] = max(options["max_tokens"], options.get("min_tokens", 0))
    params = SamplingParams(structured_outputs=form, **options)
    return Wish(params, text, draw(st.sampled_from([1, 20, 90])))


@settings(max_examples=60, derandomize=True)
@given(st.lists(wishes(), min_size=1, max_size=4), st.integers(0, 2**16))
def test_runs_leave_what_single_tokens_leave(wanted, seed):
    singles, lengths = answers(wanted, most=1)
    assert set(lengths) == {1}
    runs, _ = answers(wanted, most=4, seed=seed)
    assert runs == singles


@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize(
    ("options", "text", "reason", "stop_reason"),
    [
        ({"max_tokens": 2}, "the quick", "length", None),
        ({"stop": ["brown"]}, "the quick ", "stop", "brown"),
        (
            {"stop": ["brown"], "include_stop_str_in_output": True},
            "the quick brown",
            "stop",
            "brown",
        ),
        ({"min_tokens": 3}, TEXTS[0], "stop", None),
    ],
)
def test_ends_inside_a_run(most, options, text, reason, stop_reason):
    params = SamplingParams(**{"max_tokens": 60, "temperature": 0} | options)
    (output, _), lengths = answers([Wish(params, TEXTS[0])], most)
    (answer,) = output.outputs
    assert answer.text.startswith(text)
    assert (answer.finish_reason, answer.stop_reason) == (reason, stop_reason)
    assert max(lengths) == min(most, len(answer.token_ids)) or most == 4


def test_what_comes_after_a_form_is_dropped():
    wanted = StructuredOutputs(choice=["yes", "no, never"])
    params = SamplingParams(max_tokens=30, structured_outputs=wanted, logprobs=0)
    (output, _), lengths = answers([Wish(params, "yes yes yes")], most=4, seed=3)
    (answer,) = output.outputs
    assert (answer.text, answer.finish_reason) == ("yes", "stop")
    assert sum(lengths) > len(answer.token_ids) == len(answer.logprobs)
