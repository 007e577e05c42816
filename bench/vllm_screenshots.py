"""The agent of `screenshots.py` on vLLM's own scheduler and on ours: what each turn reuses and
encodes. No model runs, and no GPU is needed.

    python -m venv out/vllm && out/vllm/bin/pip install torch transformers pydantic msgspec
    out/vllm/bin/pip install --no-deps vllm==0.33.0
    PYTHONPATH=src out/vllm/bin/python bench/vllm_screenshots.py [--unit 64]
    PYTHONPATH=src out/vllm/bin/python bench/vllm_screenshots.py --agents 12 --gib 56
    PYTHONPATH=src out/vllm/bin/python bench/vllm_screenshots.py --questions 8

pip names what else vLLM imports; each can be installed with --no-deps. Modules of vLLM that need a
driver are replaced by empty ones, and its platform by an H200 on paper. Its configuration,
block sizes, planning of memory, Scheduler, KVCacheManager and EncoderCacheManager are its own, with
the defaults of `vllm serve` for the 35B-A3B and float32 states, as its checkpoints ask for. Several
agents take turns; `--questions` asks about one screenshot instead. `--unit` is vLLM's
--prefix-match-unit. Answers are drawn, the same for both.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from screenshots import ANSWER_TOKENS, END, PAD, START, SYSTEM_TOKENS, TURN_TOKENS, whole_config
from vllm_scheduler import open_scheduler

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "bench/models/hybrid-35b-a3b"
PICTURE_TOKENS, ROWS, COLUMNS = 2040, 34, 60
"""A screenshot of 1920 x 1080 pixels."""
QUESTION_TOKENS = 60
BUDGET, ENCODER_TOKENS = 8192, 16_384
"""Tokens of a step, and tokens of pictures that stay encoded, as vLLM has them by default."""
_COUNTS = ("computed", "encoded")


@dataclass
class Agent:
    """A conversation that grows by a screenshot and a text each turn."""

    number: int
    tokens: list[int]
    offsets: list[int] = field(default_factory=list)

    def ask(self, random_: random.Random, num_tokens: int = TURN_TOKENS) -> None:
        self.tokens.append(START)
        self.offsets.append(len(self.tokens))
        self.tokens += [PAD] * PICTURE_TOKENS + [END] + text_of(random_, num_tokens)

    def name(self, turn: int) -> bytes:
        """Returns the identity of a turn's screenshot."""
        return (self.number * 1000 + turn).to_bytes(16, "big")


@dataclass(frozen=True)
class Turn:
    reused: int
    encoded: int
    steps: int
    """Steps until the first token."""


class Engine(Protocol):
    name: str

    def answer(self, agent: Agent, turn: int, answer: Sequence[int]) -> Turn: ...


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--agents", type=int, default=1)
    parser.add_argument("--questions", type=int, help="about one screenshot, in place of turns")
    parser.add_argument("--gib", type=float, default=16.0, help="memory for pages and states")
    parser.add_argument("--unit", type=int, help="vLLM's --prefix-match-unit")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "vllm_screenshots.jsonl")
    given = parser.parse_args()
    rows = []
    for engine in (Milepost(given.gib), Vllm(given.gib, given.unit)):
        found = (
            ask_about_one(engine, given.questions)
            if given.questions
            else play(engine, given.agents, given.turns)
        )
        rows += [{"engine": engine.name, "agents": given.agents, **row} for row in found]
        for row in found:
            print(json.dumps({"engine": engine.name, **row}), flush=True)
        late = [row for row in found if row["turn"] > 1]
        computed, encoded = (sum(row[name] for row in late) / len(late) for name in _COUNTS)
        print(
            f"{engine.name}: {computed:.0f} tokens and {encoded:.2f} images a turn after the first"
        )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return 0


def play(engine: Engine, num_agents: int, num_turns: int) -> list[dict[str, Any]]:
    """Returns a row for each turn of each agent."""
    random_, found = random.Random(0), []
    agents = [Agent(number, text_of(random_, SYSTEM_TOKENS)) for number in range(num_agents)]
    for turn in range(num_turns):
        for agent in agents:
            agent.ask(random_)
            answer = text_of(random_, ANSWER_TOKENS)
            found.append(row_of(engine, agent, turn + 1, answer))
            agent.tokens += answer
    return found


def ask_about_one(engine: Engine, num_questions: int) -> list[dict[str, Any]]:
    """Returns a row for each question about the same screenshot, each in a prompt of its own."""
    random_, found = random.Random(0), []
    shared = Agent(0, text_of(random_, SYSTEM_TOKENS))
    shared.ask(random_, 0)
    for number in range(num_questions):
        question = text_of(random_, QUESTION_TOKENS)
        asked = Agent(0, shared.tokens + question, shared.offsets)
        found.append(row_of(engine, asked, number + 1, text_of(random_, ANSWER_TOKENS)))
    return found


def row_of(engine: Engine, agent: Agent, turn: int, answer: Sequence[int]) -> dict[str, Any]:
    got, prompt = engine.answer(agent, turn, answer), len(agent.tokens)
    row = {"agent": agent.number, "turn": turn, "prompt": prompt, "reused": got.reused}
    return {**row, "computed": prompt - got.reused, "encoded": got.encoded, "steps": got.steps}


def text_of(random_: random.Random, num: int) -> list[int]:
    return [random_.randrange(10, 50_000) for _ in range(num)]


class Milepost:
    """Our scheduler and cache: pages of 64 tokens and states of 30 layers in one memory."""

    name = "milepost"

    def __init__(self, gib: float) -> None:
        from milepost.cache import Cache
        from milepost.cache.memory import UnifiedPool
        from milepost.scheduler.scheduler import Scheduler

        page_bytes, state_bytes = 64 * 10 * 2048, 30 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)
        pages_each = -(-state_bytes // page_bytes)
        num_units = int(gib * 2**30 / (pages_each * page_bytes))
        self._cache = Cache(storage=UnifiedPool(num_units, pages_each))
        self._scheduler = Scheduler(
            self._cache,
            max_num_seqs=4,
            max_num_batched_tokens=BUDGET,
            encoder_cache_size=ENCODER_TOKENS,
        )

    def answer(self, agent: Agent, turn: int, answer: Sequence[int]) -> Turn:
        from milepost.pictures import Picture, group_ends
        from milepost.scheduler.plans import StepResult
        from milepost.scheduler.request import Request

        pictures = tuple(
            Picture(
                identity=agent.name(index),
                offset=offset,
                num_tokens=PICTURE_TOKENS,
                grid=(1, 2 * ROWS, 2 * COLUMNS),
                num_positions=COLUMNS,
            )
            for index, offset in enumerate(agent.offsets)
        )
        request = Request(
            id=f"{agent.number}-{turn}",
            chain=self._cache.chain(agent.tokens, pictures=pictures),
            max_tokens=len(answer),
            marks=tuple(group_ends(pictures, least_apart=16, most=2)),
        )
        encoded, steps, waiting = self._scheduler.stats.num_encoded, 0, list(answer)
        self._scheduler.add(request)
        while self._scheduler.has_work:
            plan = self._scheduler.schedule()
            steps += len(waiting) == len(answer)
            tokens = {each.number: [waiting.pop(0)] for each in plan.sequences if each.samples}
            self._scheduler.update(
                plan, StepResult(tokens=tokens, written=plan.written, seconds=1.0)
            )
        report = request.report
        assert report is not None, "the request was served"
        return Turn(report.reused, self._scheduler.stats.num_encoded - encoded, steps)


class Vllm:
    """vLLM's scheduler and cache managers."""

    def __init__(self, gib: float, unit: int | None) -> None:
        self.name = "vllm" if unit is None else f"vllm, unit {unit}"
        whole = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], **whole_config(MODEL)}
        opened = open_scheduler(whole, gib, unit)
        assert opened.step_tokens == BUDGET, "as `vllm serve` has it"
        self._scheduler, self._hasher = opened.scheduler, opened.hasher

    def answer(self, agent: Agent, turn: int, answer: Sequence[int]) -> Turn:
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.sampling_params import SamplingParams
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request

        shown = [
            MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=agent.name(index).hex(),
                mm_position=PlaceholderRange(offset=offset, length=PICTURE_TOKENS),
            )
            for index, offset in enumerate(agent.offsets)
        ]
        id_ = f"{agent.number}-{turn}"
        params = SamplingParams(max_tokens=len(answer), ignore_eos=True, temperature=0)
        request = Request(
            id_, list(agent.tokens), params, None, mm_features=shown, block_hasher=self._hasher
        )
        reused = encoded = steps = 0
        waiting = list(answer)
        self._scheduler.add_request(request)
        while self._scheduler.has_unfinished_requests():
            step = self._scheduler.schedule()
            assert step.total_num_scheduled_tokens, "vLLM's scheduler goes on"
            encoded += sum(map(len, step.scheduled_encoder_inputs.values()))
            steps += len(waiting) == len(answer)
            for new in step.scheduled_new_reqs:
                reused = new.num_computed_tokens
            is_prefilled = request.num_computed_tokens >= request.num_prompt_tokens
            sampled = [[waiting.pop(0)]] if is_prefilled else [[]]
            self._scheduler.update_from_output(
                step,
                ModelRunnerOutput(
                    req_ids=[id_], req_id_to_index={id_: 0}, sampled_token_ids=sampled
                ),
            )
        return Turn(reused, encoded, steps)


if __name__ == "__main__":
    raise SystemExit(main())
