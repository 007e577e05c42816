"""Engines and requests that are drawn: whatever can be asked for together comes together."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from milepost import LLM, RequestOutput, SamplingParams
from milepost.engine.loop.group import RequestGroup
from milepost.engine.prompts import read_prompt
from milepost.errors import InvalidRequestError
from milepost.sampling_params import StructuredOutputs
from milepost.tiers.holdings import MeasuredRates
from tests.engines import num_held, tiering_of
from tests.invariants import check

MAX_TOKENS = 120
"""Length of the longest answer."""
WITH_HEAD = ("qwen3_5", "qwen3_next")
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "again",
    "END",
    "stop",
]
FORMS: Sequence[dict[str, Any]] = (
    {"json": json.dumps({"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 4})},
    {"regex": r"[a-f]{3,9}-[0-9]+( yes| no)?"},
    {"choice": ["yes indeed", "no", "yes"]},
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What engines and prompts are drawn from; by default, small ones for tiny models."""

    page_sizes: Sequence[int] = (16, 64, 64, 128)
    step_tokens: Sequence[int] = (96, 130, 200, 512)
    max_model_lens: Sequence[int] = (320, 512)
    host_gib: Sequence[float] = (0.002, 0.02)
    words: int = 1
    """Factor for the number of words in prompts."""


SMALL = Sizes()


def words(rng: random.Random, num: int) -> str:
    return " ".join(rng.choices(WORDS, k=num))


def engine_options(
    rng: random.Random, family: str, folder: Path, sizes: Sizes = SMALL
) -> dict[str, Any]:
    """Draws the options of an engine with little memory; `folder` is its cache on disk."""
    page_size = rng.choice(sizes.page_sizes)
    max_model_len = rng.choice(sizes.max_model_lens)
    options: dict[str, Any] = {
        "max_num_seqs": rng.choice([1, 2, 3, 5, 12]),
        "max_num_batched_tokens": max(rng.choice(sizes.step_tokens), page_size),
        "max_model_len": max_model_len,
        "page_size": page_size,
        "mamba_cache_mode": rng.choice([*["auto"] * 5, "align", "all"]),
        "async_scheduling": rng.random() < 0.6,
    }
    if rng.random() < 0.5:
        least = max_model_len // page_size + 2
        options["num_pages"] = int(least * rng.choice([1, 1, 1.3, 2, 4]))
        options["num_slots"] = rng.choice([2, 3, 5, 9])
    else:
        options["cpu_cache_gib"] = rng.choice([0.004, 0.01, 0.02])
    if rng.random() < 0.7:
        heads = ["mtp", ["suffix", "mtp"]] if family in WITH_HEAD else [["ngram", "suffix"]]
        method = rng.choice(["suffix", "ngram", *heads])
        options["speculative_config"] = {
            "method": method,
            "num_speculative_tokens": rng.choice([1, 2, 3, 5]),
            "adaptive": rng.random() < 0.3,
        }
    if rng.random() < 0.4:
        options["cache_host_gib"] = rng.choice(sizes.host_gib)
    if rng.random() < 0.3:
        options["cache_dir"] = str(folder)
    if rng.random() < 0.3:
        options["kv_cache_dtype"] = "fp8"
    return options


def sampling(rng: random.Random, vocab_size: int) -> SamplingParams:
    max_tokens = rng.choice([1, 2, 5, 17, 40, 70, MAX_TOKENS])
    temperature = rng.choice([0, 0, 0.7, 1.0, 1.5])
    drawn: dict[str, tuple[float, Any]] = {
        "top_p": (0.4, rng.choice([0.8, 0.95])),
        "top_k": (0.4, rng.choice([1, 20, 50])),
        "min_p": (0.2, 0.05),
        "presence_penalty": (0.3, 1.5),
        "frequency_penalty": (0.2, -0.5),
        "repetition_penalty": (0.3, rng.choice([1.1, 1.3, 0.9])),
        "n": (0.3, rng.choice([2, 3]) if temperature else 1),
        "logprobs": (0.4, rng.choice([0, 1, 5])),
        "prompt_logprobs": (0.1, rng.choice([0, 2])),
        "stop": (0.3, rng.sample(["the", " is", "END", "fox", "again"], 2)),
        "include_stop_str_in_output": (0.2, True),
        "stop_token_ids": (0.2, rng.choices(range(vocab_size), k=5)),
        "bad_words": (0.2, rng.sample(["the", " is", "a", "fox j", "again"], 2)),
        "allowed_token_ids": (0.1, rng.sample(range(vocab_size), vocab_size // 2)),
        "logit_bias": (0.2, {rng.randrange(vocab_size): rng.choice([-50.0, 5.0, 3.0])}),
    }
    given = {name: value for name, (share, value) in drawn.items() if rng.random() < share}
    if rng.random() < 0.25:
        given["structured_outputs"] = StructuredOutputs(**rng.choice(FORMS))
    else:
        given["ignore_eos"] = rng.random() < 0.3
        given["min_tokens"] = min(max_tokens, rng.choice([0, 0, 0, 4, 20]))
    seed = rng.randrange(1000)
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, **given)


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: dict[str, Any]
    params: SamplingParams
    job: RequestGroup


class Traffic:
    """Requests that come while others run, go on from each other's prompts and answers, and are
    given up now and then."""

    def __init__(
        self,
        rng: random.Random,
        llm: LLM,
        num_requests: int,
        known: Sequence[str] = (),
        sizes: Sizes = SMALL,
    ) -> None:
        self._rng, self._llm, self._left, self._sizes = rng, llm, num_requests, sizes
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        self._tokenizer: PreTrainedTokenizerBase = tokenizer
        self._room = llm.llm_engine.limits.max_model_len - MAX_TOKENS - 1
        self.known = list(known) or [words(rng, num * sizes.words) for num in (20, 40, 60)]
        """What prompts go on from."""
        self.asked: list[Asked] = []

    def run(self) -> list[Asked]:
        """All that were not given up, with their answers."""
        live: list[Asked] = []
        engine, rng = self._llm.llm_engine, self._rng
        while self._left or live:
            live += self._newcomers()
            if live and rng.random() < 0.004:
                gone = live.pop(rng.randrange(len(live)))
                engine.abort(gone.job)
                self.asked.remove(gone)
            engine.step()
            for each in [each for each in live if each.job.is_finished]:
                live.remove(each)
                if rng.random() < 0.5:
                    self.known.append(self._tokenizer.decode(self._conversation(each)))
        engine.flush()
        check(engine.scheduler.cache)
        assert num_held(self._llm) == (0, 0)
        return self.asked

    def _conversation(self, asked: Asked) -> list[int]:
        return [*asked.prompt["prompt_token_ids"], *asked.job.output().outputs[0].token_ids]

    def _newcomers(self) -> Iterator[Asked]:
        rng = self._rng
        while self._left and rng.random() < 0.45:
            self._left -= 1
            base = rng.choice(self.known)
            cut = rng.choice([len(base), rng.randint(0, len(base))])
            text = f"{base[:cut]} {words(rng, rng.randint(1, 30 * self._sizes.words))}"
            self.known += [text] if rng.random() < 0.3 else []
            ids = self._tokenizer.encode(text)[: self._room]
            prompt: dict[str, Any] = {"prompt_token_ids": ids}
            if rng.random() < 0.15:
                prompt["cache_salt"] = rng.choice("ab")
            if rng.random() < 0.2:
                prompt["cache_marks"] = sorted({rng.randint(1, len(ids)) for _ in range(3)})
            params = sampling(rng, len(self._tokenizer))
            read = read_prompt(prompt, self._tokenizer)
            priority = rng.choice([0, 0, 0, -1, 2])
            try:
                job = self._llm.llm_engine.add(read, params, priority=priority)
            except InvalidRequestError as error:
                if "exclude every token that it can begin with" not in str(error):
                    raise
                continue  # half of the vocabulary may lack all of them
            asked = Asked(prompt, params, job)
            self.asked.append(asked)
            yield asked


def differences(asked: Asked, plain: LLM, tolerance: float = 1e-6) -> list[str]:
    """In what the answer is another than the one that a plain engine gives to this alone;
    log-probabilities may be apart by `tolerance`."""
    ids = {"prompt_token_ids": asked.prompt["prompt_token_ids"]}
    (expected,) = plain.generate([ids], asked.params, use_tqdm=False)
    found = asked.job.output()
    pairs = zip(_said(found), _said(expected), strict=True)
    different = [f"{left} is not {right}" for left, right in pairs if left != right]
    for left, right in zip(_likelihoods(found), _likelihoods(expected), strict=True):
        if left.keys() != right.keys() or any(abs(left[t] - right[t]) > tolerance for t in left):
            different.append(f"log-probabilities {left} are not {right}")
    return different


def _said(output: RequestOutput) -> list[tuple[object, ...]]:
    return [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs]


def _likelihoods(output: RequestOutput) -> list[dict[int, float]]:
    entries = [entry for each in output.outputs for entry in each.logprobs or ()]
    entries += [entry for entry in output.prompt_logprobs or () if entry]
    return [{token: each.logprob for token, each in entry.items()} for entry in entries]


def opened(folder: Path, options: dict[str, Any]) -> LLM:
    llm = LLM(folder, **options)
    tiering = tiering_of(llm.llm_engine)
    if tiering is not None:
        # Nothing is worth computing.
        tiering.tiers.holdings.rates = MeasuredRates(tokens_per_s=1.0, load_s=0.0)
    return llm


def end(llm: LLM) -> None:
    """Nothing is held by anybody once all is over."""
    engine = llm.llm_engine
    engine.close()
    tiering = tiering_of(engine)
    if tiering is not None:
        assert not tiering.transfers.is_busy
        assert not engine.scheduler.num_loading
        assert not tiering.tiers.loads._loads
        if not tiering.tiers.holdings.disk_rests:
            tiers = tiering.tiers.host, tiering.tiers.disk
            assert not any(item.pins for tier in tiers for item in tier)


def rest(llm: LLM) -> None:
    """Nothing is asked for, for as long as there is something to do."""
    engine = llm.llm_engine
    while engine.do_idle_work() and engine.has_work:
        while engine.has_work:
            engine.step()


def serve(
    seed: int,
    folder: Path,
    family: str,
    kept: Path,
    monkeypatch: Any,
    *,
    num_requests: int,
    sizes: Sizes = SMALL,
    **modes: Any,
) -> tuple[list[Asked], dict[str, Any]]:
    """Serves some requests, then others that find only what is below the device's memory; returns
    them with the options of their engine."""
    rng = random.Random(seed)
    options = engine_options(rng, family, kept, sizes) | modes
    llm = opened(folder, options)
    first = Traffic(rng, llm, num_requests // 2, sizes=sizes)
    asked, known = first.run(), first.known
    if rng.random() < 0.5:
        rest(llm)
    if "cache_dir" in options and rng.random() < 0.7:
        end(llm)
        del llm, first  # memory may hold one model only
        gc.collect()
        llm = opened(folder, options)
        if rng.random() < 0.3:  # what has not come at the first look is computed
            monkeypatch.setattr("milepost.tiers.disk.STALL_S", -1.0)
    else:
        assert llm.llm_engine.scheduler.cache.reset()
    asked += Traffic(rng, llm, num_requests - num_requests // 2, known, sizes).run()
    end(llm)
    monkeypatch.undo()
    return asked, options


def run(
    seed: int,
    folder: Path,
    family: str,
    kept: Path,
    monkeypatch: Any,
    *,
    num_requests: int,
    **modes: Any,
) -> list[Asked]:
    """Serves drawn requests and compares each with a plain engine's answer to it alone. `modes` are
    options of the plain engine too; in the bitwise mode bits are compared."""
    asked, options = serve(
        seed, folder, family, kept, monkeypatch, num_requests=num_requests, **modes
    )
    same: dict[str, Any] = {"kv_cache_dtype": options.get("kv_cache_dtype", "auto"), **modes}
    tolerance = 1e-6
    if modes.get("batch_invariant"):
        tolerance = 0.0
        same["page_size"] = options["page_size"]  # Hopper's attention takes pages from 64 on
    plain = open_plain(folder, max_model_len=options["max_model_len"], **same)
    for each in asked:
        wrong = differences(each, plain, tolerance)
        assert not wrong, f"{options}, {each.prompt}, {each.params}: {wrong}"
    assert len(asked) > num_requests // 2
    return asked


def open_plain(folder: Path, **options: Any) -> LLM:
    """Opens an engine that runs one request at a time and caches nothing."""
    return LLM(
        folder,
        enable_prefix_caching=False,
        max_num_seqs=1,
        num_pages=64,
        num_slots=4,
        **options,
    )
