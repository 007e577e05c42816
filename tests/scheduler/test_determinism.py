"""The same calls give the same plans in any process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import milepost

ROOT = Path(__file__).parents[2]
SOURCE = Path(milepost.__file__).parents[1]


def dump(hash_seed: str) -> list[str]:
    environment = os.environ | {
        "PYTHONHASHSEED": hash_seed,
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROOT)]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.scheduler.workload"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_plans_do_not_depend_on_the_hash_seed():
    first, second = dump("1"), dump("4242")
    assert len(first) > 300
    for mode in ("auto", "all", "align"):
        (stats,) = [line for line in first if line.startswith(f"{mode} (Stats(")]
        assert "num_preemptions=0" not in stats
        assert "pages_evicted=0" not in stats
    assert first == second
