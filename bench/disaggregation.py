"""Prefill on one GPU and decode on another of the same host, beside one GPU that does both.

    python bench/disaggregation.py [--model bench/models/hybrid-35b-a3b] [--only first gaps]

Dummy weights and random token ids from a seed; an engine in a process of its own on each GPU, which
this one asks as a router does. One JSON row a measurement; with `--timeline` also what ran when in
both processes, for each pull. `--devices cuda:0 cuda:0` has both on one GPU, with a smaller model:
the host's part of it all is the same, and only what crosses the link is not. Without GPUs a small
model shows that the script runs: `--model src/milepost/tiny --devices cpu cpu --length 700`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import select
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import rows
import timeline

REQUESTED = {"do_remote_decode": True, "do_remote_prefill": False}
WHOLE = 0.9
"""Of a device's memory, for engines and their caches."""


# --- in a process of its own ----------------------------------------------------------------------


class Worker:
    """An engine that takes requests from a pipe, and says when each token came."""

    def __init__(self, pipe: Connection, device: str, options: dict[str, Any]) -> None:
        import torch

        from milepost.config import EngineConfig
        from milepost.engine import heap
        from milepost.engine.loop.core import Engine

        if options.pop("is_timed"):
            timeline.watch()
        if device.startswith("cuda"):
            torch.cuda.set_device(torch.device(device))
        self.engine = Engine(EngineConfig(device=device, **options))
        heap.settle()  # as a server does
        self.pipe = pipe
        self.times: dict[int, list[float]] = {}
        self.jobs: dict[int, Any] = {}
        pipe.send(("ready", self.engine.limits.vocab_size))

    def run(self) -> None:
        engine = self.engine
        while True:
            if not engine.has_work or engine.awaits_others:
                awaited: list[Any] = [self.pipe, engine.wakers[0]]
                select.select(awaited, [], [])
            while self.pipe.poll():
                if not self._obey(*self.pipe.recv()):
                    engine.close()
                    return
            if engine.has_work:
                self._note(engine.step())
            else:
                engine.poll()

    def _obey(self, what: str, *given: Any) -> bool:
        match what:
            case "ask":
                self._ask(*given)
            case "reset":
                self.engine.reset_prefix_cache()
                self.pipe.send(("reset",))
            case "spans":
                self.pipe.send(("spans", timeline.take()))
            case "stats":
                names = {m.name.partition(":")[2]: m.value for m in self.engine.get_metrics()}
                found = {name: v for name, v in names.items() if name.startswith("kv_transfer")}
                self.pipe.send(("stats", found))
        return what != "end"

    def _ask(self, number: int, tokens: list[int], num_out: int, params: Any) -> None:
        from milepost import SamplingParams
        from milepost.engine.prompts import Prompt

        prompt = Prompt(token_ids=tokens, kv_transfer_params=params)
        sampling = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
        self.jobs[number] = self.engine.add(prompt, sampling)
        self.times[number] = [time.perf_counter()]

    def _note(self, progressed: list[Any]) -> None:
        now = time.perf_counter()
        for number, job in list(self.jobs.items()):
            if job not in progressed:
                continue
            self.times[number].append(now)
            if len(self.times[number]) == 2 or job.is_finished:
                request = job.completions[0].request
                loaded = sum(request.report.loaded.values()) if request.report else 0
                told = self.times[number], job.kv_transfer_params, loaded, job.is_finished
                self.pipe.send(("told", number, *told))
            if job.is_finished:
                del self.jobs[number]


def _work(pipe: Connection, device: str, options: dict[str, Any]) -> None:
    Worker(pipe, device, options).run()


# --- who asks -------------------------------------------------------------------------------------


class Side:
    """One of the engines."""

    def __init__(self, device: str, options: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, device, options))
        self.process.start()
        self.num_asked = 0
        self.told: dict[int, tuple[Any, ...]] = {}

    def ask(self, tokens: list[int], num_out: int, params: Any = None) -> int:
        self.num_asked += 1
        self.pipe.send(("ask", self.num_asked, tokens, num_out, params))
        return self.num_asked

    def hear(self) -> None:
        while self.pipe.poll():
            self._take(self.pipe.recv())

    def wait(self, number: int, *, to_end: bool = True) -> tuple[Any, ...]:
        """When it was taken in and each token came, transfer parameters, tokens loaded."""
        while number not in self.told or (to_end and not self.told[number][3]):
            self._take(self.pipe.recv())
        return self.told[number]

    def say(self, what: str) -> Any:
        self.pipe.send((what,))
        while True:
            found = self.pipe.recv()
            if found[0] == what:
                return found[-1]
            self._take(found)

    def _take(self, found: tuple[Any, ...]) -> None:
        _, number, *told = found
        self.told[number] = tuple(told)


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.length, self.rng = arguments.length, random.Random(arguments.seed)
        self.is_timed, self.num_turns = arguments.timeline, arguments.turns
        self.sides: list[Side] = []
        sizes = []
        for number, device in enumerate(arguments.devices):
            share = _share(arguments.devices, number)
            options = _options(arguments, share)
            self.sides.append(Side(device, options))
            if share != WHOLE and "num_pages" not in options:  # of what those before have left
                sizes.append(self.sides[-1].pipe.recv()[1])
        sizes += [side.pipe.recv()[1] for side in self.sides[len(sizes) :]]
        self.vocab_size = min(sizes)

    def tokens(self, num: int) -> list[int]:
        return self.rng.choices(range(10, self.vocab_size), k=num)

    def first(self) -> Any:
        """Until the first token of a long prompt: on one engine, and on two. Who comes first
        changes from turn to turn: a device that has rested is faster."""
        kinds: list[Callable[[int], dict[str, Any]]] = [
            partial(self._alone, num_out=2),
            partial(self._alone, num_out=1),
            self._apart,
        ]
        for turn in range(self.num_turns):
            row: dict[str, Any] = {"turn": turn}
            for each in kinds[turn % 3 :] + kinds[: turn % 3]:
                row |= each(turn)
            yield row

    def _alone(self, turn: int, num_out: int) -> dict[str, float]:
        """On one engine, an answer of so many tokens."""
        left, prompt = self.sides[0], self.tokens(self.length)
        self._spans()
        start = time.perf_counter()
        times = left.wait(left.ask(prompt, num_out), to_end=num_out == 1)[0]
        name = "alone" if num_out > 1 else "one_token"
        self._show(f"{name}, on one engine, turn {turn}", times[0], times[1])
        left.wait(left.num_asked)
        in_engine = {f"{name}_in_engine_ms": 1e3 * (times[1] - times[0])}
        return {f"{name}_ms": 1e3 * (times[1] - start)} | in_engine

    def _apart(self, turn: int) -> dict[str, float]:
        """Prefilled on one engine and decoded on the other."""
        left, right = self.sides
        self._spans()
        prompt, before = self.tokens(self.length), right.say("stats")
        start = time.perf_counter()
        ends, params, *_ = left.wait(left.ask(prompt, 1, REQUESTED))
        times, _, loaded, _ = right.wait(right.ask(prompt, 2, params), to_end=False)
        self._show(f"on two, turn {turn}", ends[0], times[1])
        right.wait(right.num_asked)
        after = right.say("stats")
        pull = {name: after[name] - before[name] for name in after}
        return {
            "apart_ms": 1e3 * (times[1] - start),
            "prefill_in_engine_ms": 1e3 * (ends[-1] - ends[0]),
            "between_ms": 1e3 * (times[0] - ends[-1]),
            "decode_in_engine_ms": 1e3 * (times[1] - times[0]),
            "loaded": loaded,
            "mb": pull["kv_transfer_bytes"] / 1e6,
            "pull_ms": 1e3 * pull["kv_transfer_seconds"],
            "read_ms": 1e3 * pull["kv_transfer_read_seconds"],
        }

    def _spans(self) -> dict[str, Any]:
        """What ran since they were last asked for, by who ran it."""
        if not self.is_timed:
            return {}
        return {
            name: side.say("spans")
            for name, side in zip(("prefill", "decode"), self.sides, strict=True)
        }

    def _show(self, what: str, start_s: float, end_s: float) -> None:
        if self.is_timed:
            print(what, flush=True)
            timeline.show(start_s, self._spans())
            print(f"{1e3 * (end_s - start_s):10.2f} first token", flush=True)

    def gaps(self) -> Any:
        """Between tokens of 32 answers: alone, with prompts computed elsewhere, and here."""
        left, right = self.sides
        for name in ("idle", "apart", "chunked", "idle", "apart", "chunked"):
            answers = [right.ask(self.tokens(200), 400) for _ in range(32)]
            for number in answers:
                right.wait(number, to_end=False)
            others: list[int] = []
            if name == "apart":
                for _ in range(6):
                    prompt = self.tokens(self.length // 4)
                    params = left.wait(left.ask(prompt, 1, REQUESTED))[1]
                    others.append(right.ask(prompt, 2, params))
            elif name == "chunked":
                others = [right.ask(self.tokens(self.length // 4), 2) for _ in range(6)]
            found = [right.wait(number)[0] for number in answers]
            loaded = sum(right.wait(number)[2] for number in others)
            gaps = sorted(b - a for times in found for a, b in pairwise(times[1:]))
            shares = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p999_ms": 0.999}
            yield {
                "beside": name,
                **{key: 1e3 * gaps[int(share * (len(gaps) - 1))] for key, share in shares.items()},
                "max_ms": 1e3 * gaps[-1],
                "mean_ms": 1e3 * statistics.fmean(gaps),
                "loaded": loaded,
            }

    def close(self) -> None:
        for side in self.sides:
            side.pipe.send(("end",))
            side.process.join(20)
            if side.process.is_alive():
                side.process.kill()


def _share(devices: list[str], number: int) -> float:
    """Of a device's memory that this engine may find taken in the end."""
    device = devices[number]
    if devices.count(device) == 1 or not device.startswith("cuda"):
        return WHOLE
    return WHOLE * (devices[: number + 1].count(device)) / devices.count(device)


def _options(arguments: argparse.Namespace, share: float) -> dict[str, Any]:
    extra = {"transport": arguments.transport, "peers": ["127.0.0.1"]}
    return {
        "is_timed": arguments.timeline,
        "gpu_memory_utilization": share,
        "model": arguments.model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_num_seqs": 64,
        "max_model_len": 40960 if arguments.length > 4096 else 4096,
        "kv_transfer_config": {"kv_port": 0, "kv_connector_extra_config": extra},
        **dict(arguments.option),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="bench/models/hybrid-35b-a3b")
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"])
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--only", nargs="+", default=["first", "gaps"], choices=["first", "gaps"])
    parser.add_argument("--length", type=int, default=31_700)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    rows.add_option(parser)
    parser.add_argument("--out", default="out/bench-disaggregation.jsonl")
    arguments = parser.parse_args()
    bench, found = Bench(arguments), []
    try:
        for name in arguments.only:
            for row in getattr(bench, name)():
                print(json.dumps({"workload": name} | row), flush=True)
                found.append(rows.provenance() | {"workload": name} | row)
    finally:
        bench.close()
    rows.write(Path(arguments.out), found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
