"""Linear projections of few rows on a GPU, beside torch's GEMM and the time to read the weight.

PYTHONPATH=src:. python bench/kernels/linear.py [--out FILE] [--copy-gbps N] [--tflops N]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.kernels.timing import Row, parse, report, time_us

from milepost.kernels.products import Raw, multiply

TOKENS = (1, 8, 16, 64)
SHAPES = {
    "35B recurrent input": (2048, 12352),
    "35B attention input": (2048, 9216),
    "35B mixer output": (4096, 2048),
    "35B recurrent input of two ranks": (2048, 6176),
    "35B attention input of two ranks": (2048, 4608),
    "35B mixer output of two ranks": (2048, 2048),
    "35B router": (2048, 264),
    "35B head": (2048, 151936),
    "9B recurrent input": (4096, 12352),
    "9B attention input": (4096, 10240),
    "9B mixer output": (4096, 4096),
    "9B recurrent input of two ranks": (4096, 6176),
    "9B attention input of two ranks": (4096, 5120),
    "9B mixer output of two ranks": (2048, 4096),
    "9B gate and up": (4096, 24576),
    "9B down": (12288, 4096),
    "9B head": (4096, 151936),
}
"""Inputs and outputs."""
_ROTATED_BYTES = 400e6


def main() -> None:
    report(bench(), parse(__doc__))


def bench() -> Iterator[Row]:
    for name, (num_inputs, num_outputs) in SHAPES.items():
        num_bytes = 2 * num_inputs * num_outputs
        weights = [
            torch.randn(num_outputs, num_inputs, device="cuda", dtype=torch.bfloat16)
            for _ in range(max(1, min(64, int(_ROTATED_BYTES // num_bytes))))
        ]
        for num_tokens in TOKENS:
            hidden = torch.randn(num_tokens, num_inputs, device="cuda", dtype=torch.bfloat16)
            yield {
                "op": name,
                "shape": [num_inputs, num_outputs],
                "tokens": num_tokens,
                "median_us": time_us([partial(multiply, hidden, Raw(values=w)) for w in weights]),
                "torch_us": time_us([partial(F.linear, hidden, w) for w in weights]),
                "bytes": num_bytes + 2 * num_tokens * (num_inputs + num_outputs),
                "flops": 2 * num_tokens * num_inputs * num_outputs,
            }


if __name__ == "__main__":
    main()
