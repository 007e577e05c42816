"""Plans are all that a runner needs: the same ones leave the same pools in another process."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import forked

from milepost import LLM, SamplingParams
from milepost.config import EngineConfig
from milepost.errors import ConfigError
from milepost.runner.histories import Histories
from milepost.runner.recording import Heading, PlanLog, Record, Rollback, read_records
from milepost.runner.replay import digest
from milepost.sampling_params import StructuredOutputs
from milepost.scheduler.plans import SequencePlan, StepPlan, StepResult, StepSampling

REPLAY = Path(__file__).parents[2] / "tools" / "replay_plans.py"
CONFIG = {
    "device": "cpu",
    "page_size": 16,
    "cpu_cache_gib": 0.0033,
    "cache_memory": "shared",
    "async_scheduling": True,
    "max_num_batched_tokens": 192,
    "max_num_seqs": 6,
}
WISHES = [
    SamplingParams(max_tokens=60, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=60, seed=3, presence_penalty=0.8, ignore_eos=True),
    SamplingParams(max_tokens=60, seed=4, top_p=0.8, logit_bias={7: 2.0}, ignore_eos=True),
    SamplingParams(max_tokens=60, temperature=0, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(max_tokens=20, structured_outputs=StructuredOutputs(regex="[a-f ]{9}")),
    SamplingParams(max_tokens=60, seed=5, min_tokens=20, top_k=9),
]


def tokens(num: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, 6000), k=num)


def interrupted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is cut short when it has run, and the one behind it too."""

    def interrupt(_flight: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine.runner, "collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.llm_engine.step()


def serve(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared prefixes, hits inside a page, more than there is room for, and an interruption."""
    shared = tokens(150, 0)
    prompts = [[*shared, *tokens(100 + 40 * i, 1 + i)] for i in range(len(WISHES))]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    engine = llm.llm_engine
    outputs = llm.generate(asked, WISHES, use_tqdm=False)
    turns = [[*o.prompt_token_ids, *o.outputs[0].token_ids, *tokens(9, 40)] for o in outputs]
    asked = [{"prompt_token_ids": turn, "cache_marks": [155]} for turn in turns]
    stream = llm.stream(asked[0], WISHES[0])
    for _ in range(3):
        next(stream)
    interrupted(llm, monkeypatch)
    assert engine.has_work
    list(stream)
    llm.generate(asked[::-1], WISHES, use_tqdm=False)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Iterator[tuple[Path, LLM]]:
    path = tmp_path_factory.mktemp("plans") / "plans"
    llm = LLM(**CONFIG, record_plans=str(path))
    with pytest.MonkeyPatch.context() as patch:
        serve(llm, patch)
    return path, llm


def test_another_process_has_the_same_pools_and_samples_the_same(recorded):
    path, llm = recorded
    found = json.loads(forked.run_script(REPLAY, str(path)).splitlines()[-1])
    assert found["others"] == []
    assert found["steps"] > 60
    assert found["digest"] == digest(llm.llm_engine.runner.pools)


def test_the_record_has_all_that_a_plan_may_ask_for(recorded):
    """Else the test above would show less than it says."""
    path, llm = recorded
    records = list(read_records(path))
    plans = [record for record in records if isinstance(record, StepPlan)]
    sequences = [sequence for plan in plans for sequence in plan.sequences]
    assert llm.llm_engine.scheduler.stats.num_preemptions > 0
    assert any(plan.moves for plan in plans)
    assert any(sequence.exports for sequence in sequences)
    assert any(sequence.page_copy for sequence in sequences)
    assert any(sequence.is_ahead for sequence in sequences)
    assert any(sequence.history for sequence in sequences), "penalties behind a hit"
    assert any(sequence.number in plan.ended for plan in plans for sequence in plan.sequences), (
        "one that comes again in the plan that ends its table"
    )
    (where,) = [i for i, record in enumerate(records) if isinstance(record, Rollback)]
    two = [record for record in records[where - 4 : where] if isinstance(record, StepPlan)]
    assert any(sequence.is_ahead for sequence in two[-1].sequences), "a step ahead is taken back"


def test_a_record_that_was_cut_short_is_left_out(tmp_path):
    path = tmp_path / "plans"
    log = PlanLog(str(path), EngineConfig(hf_token="secret"))
    records: list[Record] = [
        StepPlan(sequences=(), ended=(3,)),
        StepSampling(rows=()),
        StepResult(tokens={1: [2, 3]}, written={4: 5}),
        Rollback(),
    ]
    for record in records:
        log.write(record)
    log.close()
    assert list(read_records(path)) == [Heading(config=EngineConfig()), *records]
    path.write_bytes(path.read_bytes()[:-1])
    assert list(read_records(path))[1:] == records[:-1]


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="record_plans="):
        PlanLog(str(tmp_path / "none" / "plans"), EngineConfig())


def _step(number: int, start: int, token_ids: list[int], **options) -> StepPlan:
    packed = b"".join(id_.to_bytes(4, "little") for id_ in token_ids)
    sequence = SequencePlan(
        number=number,
        start=start,
        num_tokens=max(len(token_ids), 1),
        tokens=packed,
        is_ahead=not token_ids,
        new_pages=(),
        write_from=0,
        slot_in=1,
        slot_out=1,
        samples=True,
        **{name: options[name] for name in options if name != "ended"},
    )
    return StepPlan(sequences=(sequence,), ended=options.get("ended", ()))


def test_histories_follow_plans_and_samples_alone():
    held = Histories()
    first = _step(7, 2, [30, 40], history=bytes([10, 0, 0, 0, 20, 0, 0, 0]))
    held.follow(first)
    ahead = _step(7, 4, [])
    held.follow(ahead)
    assert list(held.of(7)) == [10, 20, 30, 40], "what is ahead is not known yet"
    held.add(first, {7: [50]})
    held.add(ahead, {7: [60, 61]})
    assert list(held.of(7)) == [10, 20, 30, 40, 50, 60, 61]
    held.follow(_step(7, 5, [60]))
    assert list(held.of(7)) == [10, 20, 30, 40, 50, 60], "the rest of a run was dropped"
    held.follow(_step(7, 0, [10], history=b"", ended=(7,)))
    assert list(held.of(7)) == [10]
    held.follow(_step(8, 0, [1], ended=(7,)))
    assert held.of(7) is held.of(8) is None
