"""What several GPUs of one host are to show beside one: decodes, prefills, sums, prefill and decode
apart.

    python bench/pair.py [--gpus 2] [--only one two apart sums] [--seconds 280] [--logs out/pair]

Runs the other benchmarks of this folder, each in its own process with GPUs and a time of its own,
so that one which fails or hangs takes nothing else with it; those on one GPU side by side. What
they print is kept in --logs. In the end each figure that came is printed with its goal. Of four
GPUs it shows the 80B beside two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rows

HERE = Path(__file__).parent
MODELS = HERE / "models"
LINK_MB_PER_MS = 715 / 2.0
"""At which NIXL by itself reads pages of another GPU of one host."""
SUMS = ("--rows", "1", "64", "512", "2048", "8192", "--parts", "1", "9")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """A benchmark by itself, on GPUs of its own, for so long at most."""

    name: str
    gpus: tuple[int, ...]
    limit_s: float
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """What is found, and from what on (or up to what) it is good."""

    what: str
    found: Callable[[dict[str, list[Row]]], float]
    goal: float
    is_least: bool = True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--gpus", type=int, choices=(2, 4), default=2)
    waves = {"one": _one, "two": _two, "apart": _apart, "sums": _sums, "four": _four}
    parser.add_argument("--only", nargs="+", choices=waves)
    parser.add_argument("--seconds", type=float, default=280.0, help="for all together")
    parser.add_argument("--logs", type=Path, default=rows.ROOT / "out" / "pair")
    arguments = parser.parse_args()
    names = arguments.only or [name for name in waves if name != "four" or arguments.gpus == 4]
    arguments.logs.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.seconds
    found: dict[str, list[Row]] = {}
    for name in names:
        for wave in waves[name](arguments.logs):
            found |= _run(wave, arguments.logs, end)
    return _show(found)


# --- what is run ----------------------------------------------------------------------------------


def _one(logs: Path) -> Iterator[list[Job]]:
    yield [
        _engine("35B on one", logs, (0,), 70, "hybrid-35b-a3b", "decode", "cold", "repeat"),
        _engine("9B on one", logs, (1,), 70, "hybrid-9b", "decode", "cold"),
    ]


def _two(logs: Path) -> Iterator[list[Job]]:
    both = (0, 1)
    yield [_engine("9B on two", logs, both, 60, "hybrid-9b", "decode", "cold")]
    yield [_engine("35B on two", logs, both, 75, "hybrid-35b-a3b", "decode", "cold", "repeat")]


def _apart(logs: Path) -> Iterator[list[Job]]:
    out = str(logs / "apart.jsonl")
    command = ("disaggregation.py", "--turns", "7", "--out", out)
    yield [Job("apart", (0, 1), 90, command)]


def _sums(logs: Path) -> Iterator[list[Job]]:  # noqa: ARG001
    yield [Job("sums", (0, 1), 45, ("all_reduce.py", *SUMS))]


def _four(logs: Path) -> Iterator[list[Job]]:
    """The 80B in the type that it computes in, which two GPUs hold; and sums over four."""
    plain = logs / "hybrid-80b"
    plain.mkdir(exist_ok=True)
    config = json.loads((MODELS / "hybrid-80b-a3b-fp8/config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    (plain / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, gpus in (("80B on two", (0, 1)), ("80B on four", (0, 1, 2, 3))):
        yield [_engine(name, logs, gpus, 90, str(plain), "decode", "cold")]
    yield [Job("sums of four", (0, 1, 2, 3), 45, ("all_reduce.py", "--ranks", "4", *SUMS))]


def _engine(
    name: str, logs: Path, gpus: tuple[int, ...], limit_s: float, model: str, *workloads: str
) -> Job:
    command = ["engine.py", "--model", str(MODELS / model), "--out", str(logs / f"{name}.jsonl")]
    command += ["--option", f"tensor_parallel_size={len(gpus)}", "--only", *workloads]
    return Job(name, gpus, limit_s, tuple(command))


def _run(wave: list[Job], logs: Path, end: float) -> dict[str, list[Row]]:
    """Side by side; what each printed, whole or not."""
    start = time.monotonic()
    running = []
    for job in wave:
        env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, job.gpus))}
        with (logs / f"{job.name}.txt").open("w", encoding="utf-8") as log:
            command = [sys.executable, str(HERE / job.command[0]), *job.command[1:]]
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=env, cwd=rows.ROOT, start_new_session=True
            )
        running.append((job, process))
    for job, process in running:
        how = "ended"
        try:
            left = min(start + job.limit_s, end) - time.monotonic()
            code = process.wait(max(0.0, left))
        except subprocess.TimeoutExpired:
            code, how = -1, "was ended"
        with contextlib.suppress(ProcessLookupError):  # and whatever it has left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        print(f"{job.name}: {how} with {code} after {time.monotonic() - start:.0f} s", flush=True)
    return {job.name: _rows(logs / f"{job.name}.txt") for job in wave}


def _rows(log: Path) -> list[Row]:
    found = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
                print(f"    {line}", flush=True)
    return found


# --- what it comes to -----------------------------------------------------------------------------


def _show(found: dict[str, list[Row]]) -> int:
    """The figures that could be had; the exit status says whether all could."""
    num_missing = 0
    for figure in FIGURES:
        if "four" in figure.what and not any("four" in name for name in found):
            continue
        try:
            value = figure.found(found)
        except (KeyError, IndexError, statistics.StatisticsError):
            num_missing += 1
            print(f"{figure.what:60} -")
            continue
        is_good = value >= figure.goal if figure.is_least else value <= figure.goal
        sign = ">=" if figure.is_least else "<="
        print(
            f"{figure.what:60} {value:8.2f}  {sign} {figure.goal:<6} {'' if is_good else 'SHORT'}"
        )
    return min(num_missing, 1)


def _only(found: dict[str, list[Row]], job: str, **given: Any) -> list[Row]:
    rows_of_job = found[job]
    kept = [row for row in rows_of_job if given.items() <= row.items()]
    return kept if kept else [{}]


def _rate(model: str, sequences: int, less: str = "one", more: str = "two") -> Callable[..., float]:
    def ratio(found: dict[str, list[Row]]) -> float:
        row = {"workload": "decode", "sequences": sequences}
        many, few = (_only(found, f"{model} on {each}", **row)[0] for each in (more, less))
        return float(many["tokens_per_s"] / few["tokens_per_s"])

    return ratio


def _cold(model: str, prompt: int) -> Callable[..., float]:
    def ratio(found: dict[str, list[Row]]) -> float:
        row = {"workload": "cold", "prompt": prompt}
        two, one = (_only(found, f"{model} on {each}", **row)[0] for each in ("two", "one"))
        return float(one["seconds"] / two["seconds"])

    return ratio


def _again(found: dict[str, list[Row]]) -> float:
    two, one = (
        statistics.median(row["seconds"] for row in _only(found, f"35B on {each}", turn="again"))
        for each in ("two", "one")
    )
    return float(one / two)


def _turns(of: Callable[[Row], float]) -> Callable[..., float]:
    """The first pull connects the engines, and is left out."""

    def median(found: dict[str, list[Row]]) -> float:
        return statistics.median(of(row) for row in _only(found, "apart", workload="first")[1:])

    return median


def _gaps(found: dict[str, list[Row]]) -> float:
    apart, idle = (
        statistics.median(row["p99_ms"] for row in _only(found, "apart", beside=each))
        for each in ("apart", "idle")
    )
    return float(apart / idle)


FIGURES = (
    Figure("35B, two: decode at 1, times one GPU's", _rate("35B", 1), 1.15),
    Figure("35B, two: decode at 16", _rate("35B", 16), 1.35),
    Figure("35B, two: decode at 64", _rate("35B", 64), 1.5),
    Figure("35B, two: cold 32,000", _cold("35B", 32_000), 1.7),
    Figure("35B, two: 31,700 tokens again", _again, 1.0),
    Figure("9B, two: decode at 1", _rate("9B", 1), 1.45),
    Figure(
        "apart: first token later than on one engine, ms",
        _turns(lambda row: row["apart_ms"] - row["alone_ms"]),
        25,
        is_least=False,
    ),
    Figure(
        "apart: the same without the way between engines, ms",
        _turns(lambda row: row["apart_ms"] - row["alone_ms"] - row["between_ms"]),
        25,
        is_least=False,
    ),
    Figure(
        "apart: rate of reading, of the link's",
        _turns(lambda row: row["mb"] / row["read_ms"] / LINK_MB_PER_MS),
        0.8,
    ),
    Figure(
        "apart: asked, read and confirmed, at that rate",
        _turns(lambda row: row["mb"] / row["pull_ms"] / LINK_MB_PER_MS),
        0.8,
    ),
    Figure("apart: p99 of gaps, times idle", _gaps, 1.2, is_least=False),
    Figure("80B, four: decode at 64, times two GPUs'", _rate("80B", 64, "two", "four"), 1.4),
)


if __name__ == "__main__":
    sys.exit(main())
