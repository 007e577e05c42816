"""Run by test_compile_matrix in a process of its own, for kernels to be compiled rather than
interpreted: prints what the matrix says of planted errors, and what an engine launches on Hopper.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.append(str(Path(__file__).parents[2] / "tools" / "compile_matrix"))

from chips import CHIPS, pretend
from compiling import Result, Results, compile_launch
from record import CI_CASES, noting, record


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


def complaint(kernel, arch: str) -> str:
    chip, found = CHIPS[arch], {}
    kernel.device_caches.clear()
    with pretend(chip), noting(found):
        target = torch.empty(128, 128, device="meta")
        if kernel is waits:
            kernel[(1,)](target)
        else:
            source = torch.empty(256, 1024, device="meta", dtype=torch.bfloat16)
            kernel[(1,)](source, target, SIZE=1024, num_stages=5)
        (launch,) = found.values()
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


def main() -> None:
    planted = {
        f"{kernel.__name__} {arch}": complaint(kernel, arch)
        for kernel, arch in ((waits, "sm_80"), (waits, "sm_90"), (holds, "sm_89"), (holds, "sm_80"))
    }
    with pretend(CHIPS["sm_90"]):
        launches = [launch.describe() for launch in record(CI_CASES[:1])]
    print(json.dumps({"planted": planted, "hopper": launches}, default=str))


if __name__ == "__main__":
    main()
