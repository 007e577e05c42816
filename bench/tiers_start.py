"""What a directory with many items costs at the start: `milepost serve` on the embedded model
without tiers, with an empty directory and with a full one, in turn.

    python bench/tiers_start.py [--items 100000] [--rounds 5] [--disk-dir FOLDER]

Seconds until the server listens (and what processors have worked for it by then, which says more
beside other jobs), until its first answer, and until all items are known. The items are names of
conversations with 99 pages and a state each; only names are read at the start.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from random import Random

import rows
from serving import Server, cpu_s, serving

NUM_PAGES, PAGE_SIZE = 99, 64
FLAGS = ("--cache-host-gib", "0.1", "--cache-disk-gib", "1000")


def fill(folder: Path, num_items: int) -> None:
    """Write the files of so many pages and states into a model's folder."""
    rng = Random(0)
    for number in range(256):
        (folder / f"{number:02x}").mkdir(mode=0o700, exist_ok=True)
    for _ in range(num_items // (NUM_PAGES + 1)):
        parent = rng.randbytes(16).hex()
        for depth in range(1, NUM_PAGES + 1):
            key = rng.randbytes(16).hex()
            (folder / key[:2] / f"{key}-{parent}-{depth * PAGE_SIZE}.page").touch()
            parent = key
        (folder / parent[:2] / f"{parent}-{parent}-{NUM_PAGES * PAGE_SIZE}.state").touch()


def ask(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    headers = {"Content-Type": "application/json"}
    url = f"{server.url}/v1/chat/completions"
    given = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(given) as response:
        response.read()


def start(folder: Path | None, num_items: int) -> dict[str, float]:
    """Seconds of one start, to each of its ends."""
    begun_s = time.perf_counter()
    flags = () if folder is None else (*FLAGS, "--cache-dir", str(folder))
    with serving(flags) as server:
        taken = {"listens_s": time.perf_counter() - begun_s}
        taken["listens_cpu_s"] = sum(map(cpu_s, server.pids().values()))
        ask(server)
        taken["answers_s"] = time.perf_counter() - begun_s
        while folder is not None and server.metric("milepost:tier_items") < num_items:
            time.sleep(0.05)
        taken["knows_all_s"] = time.perf_counter() - begun_s
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk-dir")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.disk_dir))
    try:
        full, empty = folder / "full", folder / "empty"
        start(empty, 0)
        (space,) = empty.iterdir()
        (full / space.name).mkdir(mode=0o700, parents=True)
        fill(full / space.name, arguments.items)
        setups = {"none": (None, 0), "empty": (empty, 0), "full": (full, arguments.items)}
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in setups}
        for _ in range(arguments.rounds):
            for name, setup in setups.items():
                taken[name].append(start(*setup))
                print(json.dumps({"tiers": name, **taken[name][-1]}), flush=True)
    finally:
        shutil.rmtree(folder)
    row = dict(rows.provenance())
    for name, starts in taken.items():
        for what in starts[0]:
            row[f"{name}_{what}"] = statistics.median(each[what] for each in starts)
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
