"""What every benchmark row carries, and how rows are written and shown."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent


def provenance() -> dict[str, Any]:
    """Commit, hardware and versions of this run."""
    sha = _git("rev-parse", "--short", "HEAD")
    return {
        "git_sha": sha + ("+changes" if _git("status", "--porcelain") else ""),
        "hardware": _hardware(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def add_option(parser: argparse.ArgumentParser) -> None:
    """`--option NAME=JSON` of the engine's configuration, any number of times: a list of pairs."""
    parser.add_argument(
        "--option", action="append", default=[], type=_option, help="NAME=JSON, given to LLM"
    )


def _option(option: str) -> tuple[str, Any]:
    name, _, value = option.partition("=")
    return name, json.loads(value)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 in seconds (nearest rank)."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {f"p{p}_s": ordered[round(p / 100 * last)] for p in (50, 90, 99)}


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median ratio of runs that were taken in turn: what both suffer from falls out."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0].partition(":")[2].strip() if names else model
    return f"{model}, {os.cpu_count()} cores"
