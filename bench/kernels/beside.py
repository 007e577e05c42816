"""Prefills of 8,192 tokens beside other people's kernels on the same GPU.

    PYTHONPATH=src:. python bench/kernels/beside.py [--only mamba2 kda] [--most 6]

Mamba2 at Nemotron-3-Nano's sizes beside mamba-ssm's `mamba_chunk_scan_combined` and FLA's
`chunk_simple_gla`, KDA at Kimi-Linear-48B-A3B's beside FLA's `chunk_kda`. Ours are whole mixers,
with convolution, norm and gate; theirs the recurrence alone, from inputs that lie ready. Their
kernels search among configurations, of which `--most` of each are tried, spread evenly over theirs.
Packages that are not installed (mamba-ssm, fla-core) are left out, and said so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.kernels import kda, mamba2
from bench.kernels.timing import time_us
from tests.kernels.kimi import REAL
from tests.kernels.ssd import NEMOTRON

TOKENS = 8192
Sides = Iterator[tuple[str, Callable[[], object]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--most", type=int, default=6, help="configurations tried of each kernel")
    arguments = parser.parse_args()
    _search_among(arguments.most)
    for name in arguments.only:
        ours, others = OPERATIONS[name]
        _print(name, "milepost, the whole mixer", ours()["median_us"])
        with torch.inference_mode():
            for title, call in others():
                call()  # tunes
                _print(name, title, time_us([call, call]))
    return 0


def _print(operation: str, side: str, median_us: float) -> None:
    row = {"op": operation, "side": side, "median_us": round(median_us, 1)}
    print(json.dumps(row | {"gpu": torch.cuda.get_device_name()}), flush=True)


def _search_among(most: int) -> None:
    """Before their kernels are imported: searching among all takes minutes for each."""
    autotune = triton.autotune

    def fewer(configs: list[triton.Config], *args: Any, **kwargs: Any) -> Any:
        step = max(1, len(configs) // most)
        return autotune(configs[::step][:most], *args, **kwargs)

    triton.autotune = fewer


def _has(package: str) -> bool:
    found = importlib.util.find_spec(package) is not None
    if not found:
        print(f"{package} is not installed: its kernels are left out", flush=True)
    return found


def _mamba2() -> Sides:
    heads, groups, size = NEMOTRON.heads, NEMOTRON.groups, NEMOTRON.state_size
    x, dt = _random(heads, NEMOTRON.head_dim), _random(heads)
    b, c = _random(groups, size), _random(groups, size)
    rate = -torch.rand(heads, device="cuda") - 0.1
    first = torch.randn(1, heads, NEMOTRON.head_dim, size, device="cuda")
    if _has("mamba_ssm"):
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        options = {"D": -rate, "dt_bias": -rate, "dt_softplus": True}
        options |= {"initial_states": first, "return_final_states": True}
        for chunk in (128, 256):
            scan = partial(mamba_chunk_scan_combined, x, dt, rate, b, c, chunk, **options)
            yield f"mamba-ssm, chunks of {chunk}", scan
    if _has("fla"):
        from fla.ops.simple_gla import chunk_simple_gla

        # Its keys and queries are a head's own, and steps are the caller's: neither is timed.
        step = F.softplus(dt.float())
        k, q = (each.repeat_interleave(heads // groups, 2) for each in (b, c))
        v = (x * step[..., None]).to(x.dtype)
        states = {"initial_state": first.mT.contiguous(), "output_final_state": True}
        yield "fla, simple_gla", partial(chunk_simple_gla, q, k, v, g=step * rate, **states)


def _kda() -> Sides:
    if not _has("fla"):
        return
    from fla.ops.kda import chunk_kda

    heads, size = REAL.heads, REAL.head_dim
    q, k, v, decay = (_random(heads, size) for _ in range(4))
    options = {
        "A_log": torch.rand(heads, device="cuda"),
        "dt_bias": torch.randn(heads * size, device="cuda"),
        "initial_state": torch.randn(1, heads, size, size, device="cuda"),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }
    yield "fla, chunk_kda", partial(chunk_kda, q, k, v, decay, _random(heads), **options)


def _random(*shape: int) -> Tensor:
    return torch.randn(1, TOKENS, *shape, device="cuda", dtype=torch.bfloat16)


OPERATIONS = {
    "mamba2": (partial(mamba2.row, NEMOTRON, "nemotron", 1, TOKENS), _mamba2),
    "kda": (partial(kda.row, "kimi", 1, TOKENS), _kda),
}

if __name__ == "__main__":
    sys.exit(main())
