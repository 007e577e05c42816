"""Run by test_compile_matrix in a process of its own, for kernels to be compiled rather than
interpreted: prints what the matrix says of planted errors, and what an engine launches on Hopper.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from unittest import mock

import torch
import triton
import triton.language as tl

UNCAPTURED = (520, 700, 800, 1000, 1100, 1500, 2000, 2100, 3000, 5000)
"""Tokens of prefills that no graph holds, of which none is among those that are compiled first."""
TOOL = Path(__file__).parents[2] / "tools" / "compile_matrix"
sys.path.append(str(TOOL))

from chips import CHIPS, pretend
from compiling import Result, Results, compile_launch
from record import CI_CASES, Launch, noting, record, record_late


@triton.jit
def waits(target):
    """Of Hopper's instructions one."""
    tl.extra.cuda.gdc_wait()
    tl.store(target, 1.0)


@triton.jit
def holds(source, target, SIZE: tl.constexpr):
    """Four tiles of 32 KiB under way at a time."""
    row, column = tl.arange(0, 128)[:, None], tl.arange(0, 64)[None, :]
    total = tl.zeros([128, 128], tl.float32)
    for start in range(0, SIZE, 64):
        tile = tl.load(source + row * SIZE + start + column)
        other = tl.load(source + (128 + row) * SIZE + start + column)
        total = tl.dot(tile, tl.trans(other), total)
    tl.store(target + row * 128 + tl.arange(0, 128)[None, :], total)


def launch_of(kernel, arch: str) -> Launch:
    found = {}
    kernel.device_caches.clear()
    with pretend(CHIPS[arch]), noting(found):
        target = torch.empty(128, 128, device="meta")
        if kernel is waits:
            kernel[(1,)](target)
        else:
            source = torch.empty(256, 1024, device="meta", dtype=torch.bfloat16)
            kernel[(1,)](source, target, SIZE=1024, num_stages=5)
    (launch,) = found.values()
    return launch


def complaint(kernel, arch: str) -> str:
    chip, launch = CHIPS[arch], launch_of(kernel, arch)
    with pretend(chip):
        result = compile_launch(launch, chip)
    return looked_up(launch.key(chip.target), result).complaint(chip)


def looked_up(key: str, result: Result) -> Result:
    """By another process, once it stands in a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "new.jsonl"
        Results([path], new=path).add(key, result)
        results = Results([path], new=path)
        results.write(path, [key])
        found = Results([path], new=path)
        assert found.find("another") is None
        assert found.find(key) == result
        return found.find(key)


def stopped_and_started_again() -> list[int]:
    """Kernels that fresh runs of two launches compile: one that is stopped at the second, one that
    ends, and another."""
    spec = importlib.util.spec_from_file_location("compile_matrix", TOOL / "__main__.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    launches = [launch_of(waits, "sm_90"), launch_of(holds, "sm_90")]
    outcomes = [Result(registers=1), KeyboardInterrupt, *[Result(registers=1)] * 3]
    compiled = mock.Mock(side_effect=outcomes)
    counts = []
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(tool, "record", return_value=launches),
        mock.patch.object(tool, "compile_launch", compiled),
        mock.patch("builtins.print"),
    ):
        for _ in range(3):
            before = compiled.call_count
            with suppress(KeyboardInterrupt):
                tool.main(["--chips=sm_90", "--all", "--fresh", f"--cache={folder}"])
            counts.append(compiled.call_count - before)
    return counts


def code_of(kernel, arch: str) -> str:
    with tempfile.TemporaryDirectory() as folder, pretend(CHIPS[arch]):
        path = Path(folder) / "code"
        compile_launch(launch_of(kernel, arch), CHIPS[arch], path)
        return path.read_text(encoding="utf-8")


def main() -> None:
    planted = {
        f"{kernel.__name__} {arch}": complaint(kernel, arch)
        for kernel, arch in ((waits, "sm_80"), (waits, "sm_90"), (holds, "sm_89"), (holds, "sm_80"))
    }
    with pretend(CHIPS["sm_90"]):
        launches = [launch.describe() for launch in record(CI_CASES[:1])]
        late = [launch for case in CI_CASES[:3:2] for launch in record_late(case, UNCAPTURED)]
    found = {
        "planted": planted,
        "hopper": launches,
        "late": late,
        "resumed": stopped_and_started_again(),
        "code": code_of(waits, "sm_90"),
    }
    print(json.dumps(found, default=str))


if __name__ == "__main__":
    main()
