"""Speculative decoding beside plain decoding, by one engine in turn; answers are compared where
they are to be equal.

    python bench/speculation.py [--only loop unlike long] [--out FILE]
    python bench/speculation.py --only synthetic zero --model bench/models/hybrid-35b-a3b
    (or kimi-linear-48b-a3b, nemotron-3-nano, bamba-9b, or any folder with a configuration)

`loop`: an agent that quotes its input, on the embedded model, with `suffix`. `unlike`: texts that
repeat nothing, likewise. `long`: answers of 4,000 tokens are those without, whoever drafts.
`synthetic`: decoding with drafts accepted at 0.8, 0.65 and 0.5. `zero`: with drafts that are never
accepted, adaptive. These two draft nothing real, so they measure the steps that verify, not what
drafting takes. `chats`: seconds of engine.py's chats, with the passes of a head whose drafts are
accepted like that. Dummy weights, any model; `chats` one that may have a head.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import rows

import engine
from milepost import LLM, SamplingParams
from milepost.engine import heap
from milepost.speculative import DraftWish

Row = dict[str, Any]
RATES = [0.8, 0.65, 0.5]
NUM_OUT = (32, 288)
"""Tokens of a short and a long answer; what differs between the two is decoding alone."""


class Anything:
    """Drafts the same tokens for whoever asks, for nothing."""

    method = "anything"

    def propose(self, wishes: Sequence[DraftWish]) -> list[Sequence[int]]:
        return [range(11, 11 + wish.most) for wish in wishes]

    def is_ready(self, _request: object) -> bool:
        return True

    def forget(self, _request: object) -> None:
        """It knows nothing."""


class Erring:
    """Drafts known answers, with mistakes at a share of the places."""

    method = "erring"

    def __init__(self, answers: dict[tuple[int, ...], Sequence[int]], share: float) -> None:
        self._answers = answers
        self._share = share

    def propose(self, wishes: Sequence[DraftWish]) -> list[Sequence[int]]:
        return [self._propose(wish) for wish in wishes]

    def _propose(self, wish: DraftWish) -> list[int]:
        request = wish.request
        prompt = tuple(request.chain.tokens[: request.num_prompt_tokens])
        first = request.num_output_tokens
        drafts = self._answers[prompt][first : first + wish.most]
        places = enumerate(drafts, start=first)
        return [t + 1 if random.Random(i).random() < self._share else t for i, t in places]

    def is_ready(self, _request: object) -> bool:
        return True

    def forget(self, _request: object) -> None:
        """It knows all the same."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=WORKLOADS, default=["loop", "unlike"])
    parser.add_argument("--model", default=str(rows.ROOT / "bench/models/hybrid-35b-a3b"))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 16, 64])
    parser.add_argument("--turns", type=int, default=3, help="runs of either side, in turn")
    rows.add_option(parser)
    parser.add_argument("--dtypes", nargs="*", default=["float64", "float32"], help="of `long`")
    parser.add_argument("--methods", nargs="*", choices=LONG, default=list(LONG), help="of `long`")
    parser.add_argument("--sequences", nargs="*", type=int, default=[1, 3, 17], help="of `long`")
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "bench-speculation.jsonl")
    arguments = parser.parse_args()
    arguments.options = dict(arguments.option)
    common = rows.provenance()
    found = []
    for name in arguments.only:
        for row in WORKLOADS[name](arguments):
            print(json.dumps({"workload": name, **row}), flush=True)
            found.append({**common, "workload": name, **row})
    rows.write(arguments.out, found)
    return 0


def speculating(num_drafts: int, method: Any = "ngram", **fields: Any) -> dict[str, Any]:
    config = {"method": method, "num_speculative_tokens": num_drafts, **fields}
    return {"speculative_config": config}


Run = Callable[[int], list[list[int]]]
"""Answers, by one side of a comparison; it is told which turn it is."""


def compare(llm: LLM, run: Run, turns: int, *, equal: bool, less: Run | None = None) -> Row:
    """Tokens a second of one engine with drafts and without, in turn, and their ratio, also that of
    this process's own time; refuses answers that differ. What `less` does is subtracted, in tokens
    and in time."""
    engine = llm.llm_engine
    sides = {"plain": None, "drafts": engine.pipeline.speculation}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    own_seconds: dict[str, list[float]] = {side: [] for side in sides}
    answers: dict[str, list[list[int]]] = {}
    num_tokens = 0
    for turn in range(1 + turns):
        for side, speculation in sides.items():
            engine.pipeline.speculation = speculation
            base, base_s, base_own_s = _timed(llm, less, turn) if less else ([], 0.0, 0.0)
            answers[side], whole_s, own_s = _timed(llm, run, turn)
            num_tokens = sum(map(len, answers[side])) - sum(map(len, base))
            if turn:
                seconds[side].append(whole_s - base_s)
                own_seconds[side].append(own_s - base_own_s)
        if equal and answers["plain"] != answers["drafts"]:
            raise SystemExit("refused: answers with drafts are others")
    stats = engine.scheduler.stats
    row = {side: num_tokens / statistics.median(own) for side, own in seconds.items()}
    return {
        **row,
        "ratio": rows.paired_ratio(seconds["plain"], seconds["drafts"]),
        "own_ratio": rows.paired_ratio(own_seconds["plain"], own_seconds["drafts"]),
        "verified": stats.num_draft_tokens,
        "accepted": stats.num_accepted_tokens,
        "by_position": stats.num_accepted_by_position,
    }


def _timed(llm: LLM, run: Run, turn: int) -> tuple[list[list[int]], float, float]:
    """With nothing cached: the answers, seconds, and those of this process."""
    llm.reset_prefix_cache()
    start, own_start = time.perf_counter(), time.process_time()
    answers = run(turn)
    return answers, time.perf_counter() - start, time.process_time() - own_start


# --- the embedded model, on a CPU -----------------------------------------------------------------


def embedded(**options: Any) -> LLM:
    given: dict[str, Any] = {"device": "cpu", "cpu_cache_gib": 0.25, "dtype": "float32"}
    return LLM(**given | options)


def loop(arguments: argparse.Namespace) -> Iterator[Row]:
    """Each turn asks behind the same text once more: answers are mostly what was read. Greedy, so
    that the model goes round in what it quotes."""
    llm = embedded(**speculating(16, "suffix"))
    text = "def area(w, h): return w * h\ndef edge(w, h): return 2 * (w + h)\n"

    def run(_turn: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
        history, answers = text * 4, []
        for _ in range(4):
            (output,) = llm.generate([history], params, use_tqdm=False)
            answers.append(output.outputs[0].token_ids)
            history += output.outputs[0].text + "\n" + text
        return answers

    yield compare(llm, run, arguments.turns, equal=True)


def unlike(arguments: argparse.Namespace) -> Iterator[Row]:
    """Sampled hot, other prompts every turn, so that nothing comes again."""
    llm = embedded(**speculating(16, "suffix"))

    def run(turn: int) -> list[list[int]]:
        rng = random.Random(turn)
        prompts = [{"prompt_token_ids": rng.choices(range(10, 6000), k=200)} for _ in range(4)]
        params = SamplingParams(temperature=1.5, seed=turn, max_tokens=120, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    yield compare(llm, run, arguments.turns, equal=True)


LONG = {
    "suffix": {"method": "suffix"},
    "ngram": {"method": "ngram"},
    "erring": {"method": "ngram"},
    "mtp": {"method": "mtp"},
}
"""Configurations by who drafts."""


def long(arguments: argparse.Namespace) -> Iterator[Row]:
    """Answers of 4,000 tokens, greedy and sampled, at several numbers of sequences."""
    most = max(arguments.sequences)
    options = {"max_model_len": 4200, "cpu_cache_gib": 2.0, "max_num_seqs": most}
    rng = random.Random(2)
    prompts = [rng.choices(range(10, 6000), k=40) for _ in range(most)]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=4000, ignore_eos=True)
        for i in range(most)
    ]

    def ask(llm: LLM, num: int) -> list[list[int]]:
        outputs = llm.generate(given[:num], params[:num], use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    for dtype in arguments.dtypes:
        expected = ask(embedded(dtype=dtype, **options), most)
        known: dict[tuple[int, ...], Sequence[int]] = {
            tuple(p): a for p, a in zip(prompts, expected, strict=True)
        }
        for method in arguments.methods:
            fields = speculating(3, **LONG[method], adaptive=False)
            llm = embedded(dtype=dtype, **options, **fields)
            if method == "erring":
                assert llm.llm_engine.pipeline.speculation is not None
                llm.llm_engine.pipeline.speculation.drafter = Erring(known, 0.2)
            stats = llm.llm_engine.scheduler.stats
            for num in arguments.sequences:
                accepted = stats.num_accepted_tokens
                llm.reset_prefix_cache()
                answers = ask(llm, num)
                yield {
                    "dtype": dtype,
                    "method": method,
                    "sequences": num,
                    "equal": sum(a == b for a, b in zip(answers, expected, strict=False)),
                    "accepted": stats.num_accepted_tokens - accepted,
                }


# --- any model, mostly on a GPU -------------------------------------------------------------------


def dummy(arguments: argparse.Namespace, max_num_seqs: int, method: str, **fields: Any) -> LLM:
    options = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "max_num_seqs": max_num_seqs,
        **arguments.options,
    }
    llm = LLM(arguments.model, **options, **speculating(len(RATES), method, **fields))
    heap.settle()  # as servers' engines do; Python's collector takes 0.2 s else, of either side
    return llm


def decoding(arguments: argparse.Namespace, batches: Sequence[int], **fields: Any) -> Iterator[Row]:
    """Decoding with drafts of nobody's beside plain decoding."""
    llm = dummy(arguments, max(batches), "ngram", **fields)
    assert llm.llm_engine.pipeline.speculation is not None
    llm.llm_engine.pipeline.speculation.drafter = Anything()
    vocab_size = llm.llm_engine.limits.vocab_size
    for batch in batches:
        rng = random.Random(batch)
        prompts = [
            {"prompt_token_ids": rng.choices(range(10, vocab_size), k=128)} for _ in range(batch)
        ]

        def run(
            _turn: int, prompts: list[Any] = prompts, num_out: int = NUM_OUT[1]
        ) -> list[list[int]]:
            params = SamplingParams(
                temperature=0.0, max_tokens=num_out, ignore_eos=True, detokenize=False
            )
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

        short = functools.partial(run, num_out=NUM_OUT[0])
        row = compare(llm, run, arguments.turns, equal=False, less=short)
        yield {"model": Path(arguments.model).name, "sequences": batch, **row}


AT_RATES = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": RATES}


def synthetic(arguments: argparse.Namespace) -> Iterator[Row]:
    """Drafts that are accepted at `RATES`, whatever they are."""
    yield from decoding(arguments, arguments.batches, **AT_RATES, adaptive=False)


def chats(arguments: argparse.Namespace) -> Iterator[Row]:
    """The chats of `engine`, with the passes of a head whose drafts are accepted at `RATES`; the
    plain side has the head too, whose KV takes a hundredth of a step."""
    llm = dummy(arguments, 64, "mtp", **AT_RATES, adaptive=False)
    sides = {"plain": None, "drafts": llm.llm_engine.pipeline.speculation}
    found: dict[str, list[Row]] = {side: [] for side in sides}
    for turn in range(1 + arguments.turns):
        for side, speculation in sides.items():
            llm.llm_engine.pipeline.speculation = speculation
            llm.reset_prefix_cache()
            rng, vocab_size = random.Random(turn), llm.llm_engine.limits.vocab_size
            found[side] += engine.chats(engine.Bench(llm, SamplingParams, vocab_size, rng))
    seconds = {side: [row["seconds"] for row in own[1:]] for side, own in found.items()}
    yield {
        "model": Path(arguments.model).name,
        **{side: statistics.median(own) for side, own in seconds.items()},
        "ratio": rows.paired_ratio(seconds["plain"], seconds["drafts"]),
        "cached": {side: own[-1]["cached"] for side, own in found.items()},
    }


def zero(arguments: argparse.Namespace) -> Iterator[Row]:
    """Drafts that are never accepted, as many as pay."""
    fields = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.0] * 3}
    yield from decoding(arguments, arguments.batches, **fields)


WORKLOADS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "loop": loop,
    "unlike": unlike,
    "long": long,
    "synthetic": synthetic,
    "chats": chats,
    "zero": zero,
}

if __name__ == "__main__":
    sys.exit(main())
