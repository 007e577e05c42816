"""What host memory and a disk are worth on one GPU: one long prompt, traffic that shares nothing,
many agents.

    python bench/tiers.py [--model bench/models/hybrid-35b-a3b] [--host-gib 24] [--only NAME]

Dummy weights and random token ids from a seed. One JSON row a measurement. The same engine runs
with tiers and, its tiers paused, without. `--disk-dir` has files written there, below a new folder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import rows

from milepost import LLM, SamplingParams
from milepost.engine.loop.tiering import Tiering
from milepost.scheduler.outside import Offer
from milepost.tiers.disk import NUM_READERS
from milepost.tiers.holdings import MeasuredRates

LONG = 31_700
T = TypeVar("T")


def _tiering(llm: LLM) -> Tiering:
    (found,) = [part for part in llm.llm_engine.off_device if isinstance(part, Tiering)]
    return found


def nothing(answer: T, *_: object) -> T:
    """Takes the place of what is not to be done."""
    return answer


class Bench:
    """An engine with tiers, and the source of its prompts."""

    def __init__(self, llm: LLM, seed: int, vocab_size: int) -> None:
        self.llm = llm
        self.tiers = _tiering(llm).tiers
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size

    def tokens(self, num: int) -> list[int]:
        return self._rng.choices(range(10, self._vocab_size), k=num)

    def ask(self, prompts: list[list[int]], num_out: int) -> tuple[float, list[Any]]:
        """Seconds until the answers are there; what goes down behind them is not waited for."""
        given = [{"prompt_token_ids": each} for each in prompts]
        params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
        with mock.patch.object(self.llm.llm_engine, "flush", partial(nothing, None)):
            start = time.perf_counter()
            outputs = self.llm.generate(given, params, use_tqdm=False)
            seconds = time.perf_counter() - start
        return seconds, outputs

    def forget_device(self) -> None:
        self.llm.llm_engine.flush()
        assert self.llm.llm_engine.scheduler.cache.reset()

    def forget_host(self) -> None:
        """Have all that is worth it on disk, and only there."""
        self.forget_device()
        tiering = _tiering(self.llm)
        while tiering.do_idle_work():
            time.sleep(0.001)
        self.tiers.clear(with_files=False)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing goes down and nothing comes up."""
        offer = Offer(source=self.tiers.loads.name)
        with (
            mock.patch.object(self.tiers, "offer", partial(nothing, offer)),
            mock.patch.object(self.tiers, "note", partial(nothing, None)),
        ):
            yield


def long(bench: Bench) -> Iterator[dict[str, Any]]:
    """One prompt of 31,700 tokens: computed, from the device, from host memory."""
    bench.ask([bench.tokens(LONG)], 1)
    prompt = bench.tokens(LONG)
    for turn in ("cold", "device", "device", "host", "host", "host"):
        if turn == "host":
            bench.forget_device()
        seconds, (output,) = bench.ask([prompt], 1)
        report = output.cache_report
        yield {"turn": turn, "ms": 1e3 * seconds, "reused": report.reused, "from": report.loaded}
    rates = bench.tiers.holdings.rates
    yield {"host_gb_per_s": rates.host.value / 1e9, "tokens_per_s": rates.prefill.value}


def unique(bench: Bench) -> Iterator[dict[str, Any]]:
    """64 requests that share nothing, 1000 in and 64 out, with tiers and without, in turn."""
    taken: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(4):
        prompts = [bench.tokens(1000) for _ in range(64)]
        taken["with"].append(bench.ask(prompts, 64)[0])
        bench.llm.llm_engine.flush()
        prompts = [bench.tokens(1000) for _ in range(64)]
        with bench.paused():
            taken["without"].append(bench.ask(prompts, 64)[0])
    medians = {name: statistics.median(each[1:]) for name, each in taken.items()}
    yield {**medians, "ratio": medians["without"] / medians["with"]}


def agents(bench: Bench, num: int = 64, length: int = 6000) -> Iterator[dict[str, Any]]:
    """Conversations that don't fit the device: further turns of all, with tiers and then without.

    `--option num_pages=1552 --option num_slots=40` has room for a quarter of them on a 35B-A3B.
    """
    histories = [bench.tokens(length) for _ in range(num)]
    _, outputs = bench.ask(histories, 8)
    taken: dict[str, list[float]] = {"with": [], "without": []}
    for name in ("with", "with", "without", "without"):
        bench.llm.llm_engine.flush()
        histories = [
            [*history, *output.outputs[0].token_ids, *bench.tokens(200)]
            for history, output in zip(histories, outputs, strict=True)
        ]
        with nullcontext() if name == "with" else bench.paused():
            seconds, outputs = bench.ask(histories, 24)
        taken[name].append(seconds)
        reports = [output.cache_report for output in outputs]
        yield {
            "tiers": name,
            "seconds": seconds,
            "hit_rate": sum(each.reused for each in reports) / sum(map(len, histories)),
            "loaded": sum(sum(each.loaded.values()) for each in reports),
            "lost": dict(sum((Counter(each.lost) for each in reports), Counter())),
            "stats": repr(bench.tiers.stats),
        }
    yield {"ratio": statistics.median(taken["without"]) / statistics.median(taken["with"])}


def disk(bench: Bench) -> Iterator[dict[str, Any]]:
    """One prompt of 31,700 tokens from disk, beside a plain read of the same files, as many at a
    time: first with nothing of them in the system's cache, then with all."""
    cache_dir = bench.llm.llm_engine.config.cache_dir
    assert cache_dir is not None, "the disk's tier has a folder"
    folder = Path(cache_dir)
    prompt = bench.tokens(LONG)
    bench.ask([prompt], 1)
    start = time.perf_counter()
    bench.forget_host()
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    yield {"files": len(files), "gb": size / 1e9, "written_s": time.perf_counter() - start}
    for turn in ("cold", "cold", "cached", "cached"):
        taken: dict[str, float] = {}
        for name in ("read", "load"):
            bench.forget_host()
            bench.tiers.holdings.rates = MeasuredRates(disk_bytes_per_s=1e12)
            if turn == "cold":
                _drop(files)
            if name == "read":
                taken[name] = _read(files)
            else:
                taken[name], (output,) = bench.ask([prompt], 1)
        ratio = taken["load"] / taken["read"]
        yield {"turn": turn, **taken, "ratio": ratio, "from": output.cache_report.loaded}


def _drop(files: list[Path]) -> None:
    """Have the system forget what files hold."""
    os.sync()
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(files: list[Path]) -> float:
    """Seconds that a plain read of files takes."""
    buffers = [bytearray(path.stat().st_size) for path in files]
    for buffer in buffers:
        buffer[::4096] = bytes(len(buffer[::4096]))  # so that the memory is there

    def fill(path: Path, buffer: bytearray) -> None:
        with path.open("rb", buffering=0) as file:
            rest = memoryview(buffer)
            while num := file.readinto(rest):
                rest = rest[num:]

    start = time.perf_counter()
    with ThreadPoolExecutor(NUM_READERS) as pool:
        list(pool.map(fill, files, buffers))
    return time.perf_counter() - start


WORKLOADS = {"long": long, "unique": unique, "agents": agents, "disk": disk}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(rows.ROOT / "bench/models/hybrid-35b-a3b"))
    parser.add_argument("--host-gib", type=float, default=24.0)
    parser.add_argument("--only", nargs="*", choices=WORKLOADS)
    parser.add_argument("--disk-dir")
    rows.add_option(parser)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    options = dict(arguments.option)
    folder = None
    if arguments.disk_dir is not None:
        folder = options["cache_dir"] = tempfile.mkdtemp(dir=arguments.disk_dir)
    try:
        return _run(arguments, options)
    finally:
        if folder is not None:
            shutil.rmtree(folder)


def _run(arguments: argparse.Namespace, options: dict[str, Any]) -> int:
    start = time.perf_counter()
    llm = LLM(
        arguments.model,
        **{
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": 40960,
            "max_num_seqs": 64,
            "cache_host_gib": arguments.host_gib,
            **options,
        },
    )
    config = json.loads((Path(arguments.model) / "config.json").read_text(encoding="utf-8"))
    bench = Bench(llm, arguments.seed, config["vocab_size"])
    limits = bench.tiers.holdings.limits
    row = {"startup_s": time.perf_counter() - start, "host_pages": limits.num_host_pages}
    print(json.dumps(row | {"host_states": limits.num_host_states}), flush=True)
    all_names = [name for name in WORKLOADS if name != "disk" or arguments.disk_dir is not None]
    for name in arguments.only or all_names:
        for row in WORKLOADS[name](bench):
            print(json.dumps({"workload": name, **row}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
