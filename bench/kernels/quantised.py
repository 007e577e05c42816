"""Products of quantised weights on a GPU, beside bfloat16's and the time to read the weight.

PYTHONPATH=src:. python bench/kernels/quantised.py [--out FILE] [--copy-gbps N] [--tflops N]

Dense ones of the 35B-A3B shape and of the 9B's feed-forward, and one layer's experts, of which each
token chooses at random; `any_chip_us` is without the kernels for Hopper.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.kernels.timing import Row, parse, report, time_us

from milepost.kernels import products
from milepost.kernels.platform.device import hopper_kernels
from milepost.kernels.products import Epilogue, Raw, mix, multiply, multiply_beside
from milepost.kernels.products.forms.quantised import BLOCK, FP8, Fp4, Fp8, Int4, Int8, Quantised

TOKENS = (1, 16, 64, 512, 8192)
EXPERTS_TOKENS = (1, 5, 8, 16, 32, 64, 512, 2048, 8192)
SHAPES = {
    "recurrent input": (2048, 12288),
    "mixer output": (4096, 2048),
    "9B gate and up": (4096, 24576),
    "9B down": (12288, 4096),
}
"""Inputs and outputs."""
GATES = 64
"""Raw outputs of a recurrent input behind those of FP8."""
HIDDEN, SIZE = 2048, 512
EXPERTS = ((256, 8), (512, 10))
"""Of the 35B-A3B and the 80B-A3B shape, and how many a token chooses; there is a shared one too."""
GROUP, FP4_GROUP = 128, 16
_ROTATED_BYTES = 120e6
_FILLED = 1 << 26
"""Numbers that are drawn at a time."""


def main() -> None:
    report(bench(), parse(__doc__))


def bench() -> Iterator[Row]:
    for name, (num_inputs, num_outputs) in SHAPES.items():
        yield from bench_dense(name, num_inputs, num_outputs)
    for num_inputs in (2048, 4096):
        yield from bench_gates(num_inputs, 12288)
    for form, make in FORMS.items():
        for num_experts, num_chosen in EXPERTS:
            up, down = (
                make(num_experts + 1, *shape) for shape in ((2 * SIZE, HIDDEN), (HIDDEN, SIZE))
            )
            yield from bench_experts(form, num_chosen, up, down)


def bench_dense(name: str, num_inputs: int, num_outputs: int) -> Iterator[Row]:
    count = max(3, int(_ROTATED_BYTES // (num_inputs * num_outputs)))
    shape = num_outputs, num_inputs
    raw = [
        Raw(values=torch.randn(shape, device="cuda", dtype=torch.bfloat16)) for _ in range(count)
    ]
    multiply_partly = partial(multiply, epilogue=Epilogue.PARTIALS)
    for form, make in FORMS.items():
        weights = [make(*shape) for _ in range(2 * count)]
        for num_tokens in TOKENS:
            hidden = torch.randn(num_tokens, num_inputs, device="cuda", dtype=torch.bfloat16)
            yield {
                "op": name,
                "form": form,
                "tokens": num_tokens,
                "median_us": time_us([partial(multiply_partly, hidden, w) for w in weights]),
                "bfloat16_us": time_us([partial(multiply_partly, hidden, w) for w in raw]),
                "bytes": bytes_of(weights[0]) + 2 * num_tokens * (num_inputs + num_outputs),
                "flops": 2 * num_tokens * num_inputs * num_outputs,
            }


def bench_gates(num_inputs: int, num_outputs: int) -> Iterator[Row]:
    """A recurrent input whose gates are raw; `apart_us` is that of a product each."""
    weights = [
        (
            make_fp8(num_outputs, num_inputs),
            Raw(values=torch.randn(GATES, num_inputs).cuda().bfloat16()),
        )
        for _ in range(6)
    ]
    for num_tokens in (16, 64):
        hidden = torch.randn(num_tokens, num_inputs, device="cuda", dtype=torch.bfloat16)
        output = hidden.new_empty(num_tokens, num_outputs + GATES)

        def multiply_apart(
            weight: Fp8, raw: Raw, output: Tensor = output, hidden: Tensor = hidden
        ) -> None:
            own, others = output.split([num_outputs, GATES], 1)
            multiply(hidden, weight, into=own)
            multiply(hidden, raw, into=others)

        yield {
            "op": "recurrent input and gates",
            "form": "fp8",
            "tokens": num_tokens,
            "median_us": time_us(
                [partial(multiply_beside, hidden, *pair, output) for pair in weights]
            ),
            "apart_us": time_us([partial(multiply_apart, *each) for each in weights]),
            "bytes": bytes_of(weights[0][0])
            + 2 * num_inputs * (GATES + num_tokens)
            + 2 * num_tokens * (num_outputs + GATES),
            "flops": 2 * num_tokens * num_inputs * (num_outputs + GATES),
        }


def bench_experts(form: str, num_chosen: int, up: Quantised, down: Quantised) -> Iterator[Row]:
    num_experts = len(up.scales)
    for num_tokens in EXPERTS_TOKENS:
        turns = range(6 if num_tokens <= max(TOKENS[:3]) else 2)
        hidden = [
            torch.randn(num_tokens, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in turns
        ]
        logits = [
            torch.randn(num_tokens, num_experts, device="cuda", dtype=torch.bfloat16) for _ in turns
        ]
        routed = [products.route(each, num_chosen, normalise=True, num_shared=1) for each in logits]
        touched = sum(experts.unique().numel() for _, experts in routed) / len(turns)
        calls = [
            partial(mix, own, *route, up, down) for own, route in zip(hidden, routed, strict=True)
        ]
        num_rows = num_tokens * (num_chosen + 1)
        weight_bytes = (bytes_of(up) + bytes_of(down)) * touched / num_experts
        with hopper_kernels(False):
            any_chip_us = time_us(calls)
        yield {
            "op": "experts",
            "form": form,
            "experts": num_experts,
            "tokens": num_tokens,
            "experts_touched": touched,
            "median_us": time_us(calls),
            "any_chip_us": any_chip_us,
            "bytes": weight_bytes + 2 * num_rows * HIDDEN,
            "flops": 6 * HIDDEN * SIZE * num_rows,
        }


def make_fp8(*shape: int) -> Fp8:
    values = torch.empty(shape, device="cuda", dtype=FP8)
    for part in values.view(-1).split(_FILLED):
        part.copy_((60 * torch.randn(part.shape, device="cuda")).clamp(-448, 448).to(FP8))
    *stack, num_outputs, num_inputs = shape
    scales = torch.rand(*stack, num_outputs // BLOCK, num_inputs // BLOCK, device="cuda")
    return Fp8(values=values, scales=scales * 3e-4, rows=BLOCK, depth=BLOCK)


def make_int8(*shape: int) -> Int8:
    values = torch.randint(-128, 128, shape, device="cuda", dtype=torch.int8)
    scales = torch.full((*shape[:-1], 1), 3e-4, device="cuda")
    return Int8(values=values, scales=scales)


def make_int4(*shape: int, group: int = GROUP) -> Int4:
    *lead, num_inputs = shape
    groups = *lead, num_inputs // group
    packed = torch.randint(0, 256, (*lead, num_inputs // 2), device="cuda", dtype=torch.uint8)
    scales = torch.full(groups, 0.004, device="cuda", dtype=torch.bfloat16)
    zeros = torch.full(groups, 8, device="cuda", dtype=torch.uint8)
    return Int4(packed=packed, scales=scales, zeros=zeros, group=group)


def make_fp4(*shape: int) -> Fp4:
    *lead, num_inputs = shape
    packed = torch.randint(0, 256, (*lead, num_inputs // 2), device="cuda", dtype=torch.uint8)
    scales = torch.ones(*lead, num_inputs // FP4_GROUP, device="cuda").to(FP8)
    factors = torch.full(lead, 0.006, device="cuda")
    return Fp4(
        packed=packed, scales=scales, factors=factors, group=FP4_GROUP, num_inputs=num_inputs
    )


FORMS: dict[str, Callable[..., Quantised]] = {
    "fp8": make_fp8,
    "int8": make_int8,
    "int4": make_int4,
    "fp4": make_fp4,
}


def bytes_of(weight: Quantised) -> int:
    tensors = (getattr(weight, each.name) for each in fields(weight))
    return sum(each.nbytes for each in tensors if isinstance(each, Tensor))


if __name__ == "__main__":
    main()
