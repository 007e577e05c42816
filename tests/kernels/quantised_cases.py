"""Quantised weights, activations and routes for tests of kernels, and what these are held to."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from milepost.kernels.platform.device import probe
from milepost.kernels.products import experts_reference
from milepost.kernels.products.forms.quantised import (
    FP4_LANE,
    FP8,
    Fp4,
    Fp8,
    Int4,
    Int8,
    Quantised,
    lane_of,
    multiply,
    pack,
    quantise_fp8,
    unpack,
)
from milepost.kernels.products.forms.w4a4 import PAIR, W4A4, round_e2m1


def to(device: str, weight: Quantised) -> Quantised:
    tensors = {each.name: getattr(weight, each.name) for each in fields(weight)}
    moved = {name: each.to(device) for name, each in tensors.items() if isinstance(each, Tensor)}
    return replace(weight, **moved)


def make_fp8(
    *shape: int, rows: int = 128, depth: int = 128, seed: int = 0, input_scale: float | None = None
) -> Fp8:
    random = torch.Generator().manual_seed(seed)
    raw = torch.randn(shape, generator=random).view(-1, *shape[-2:])
    # Blocks of sizes of their own: a scale that is read for another block shows.
    raw *= torch.logspace(-1, 1, raw.shape[1])[:, None] * torch.linspace(0.5, 2, raw.shape[2])
    made = []
    for weights in raw:
        if depth == 128:
            made.append(quantise_fp8(weights, rows))
        else:
            scales = weights.abs().amax(1, keepdim=True) / 448
            made.append(((weights / scales).to(torch.float8_e4m3fn), scales))
    values, scales = (torch.stack(each) for each in zip(*made, strict=True))
    lead = shape[:-2]
    static = None if input_scale is None else input_scale * torch.linspace(1, 2, len(raw))
    return Fp8(
        values=values.view(*lead, *values.shape[1:]),
        scales=scales.view(*lead, *scales.shape[1:]),
        rows=rows,
        depth=depth,
        input_scale=None if static is None else static.view(lead),
    )


def make_int8(*shape: int, seed: int = 0, input_scale: float | None = None) -> Int8:
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(-128, 128, shape, generator=random).to(torch.int8)
    # Outputs of sizes of their own: a scale that is read for another one shows.
    scales = torch.logspace(-3, -1, shape[-2])[:, None] * (
        1 + torch.rand(*shape[:-1], 1, generator=random)
    )
    static = None
    if input_scale is not None:
        static = input_scale * (1 + torch.rand(shape[:-2], generator=random))
    return Int8(values=values, scales=scales, input_scale=static)


def make_int4(*shape: int, group: int, seed: int = 0) -> Int4:
    random = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, shape, generator=random).to(torch.uint8)
    groups = (*shape[:-1], shape[-1] // group)
    return Int4(
        packed=pack(q, lane_of(group)),
        scales=torch.rand(groups, generator=random).half() + 0.1,
        zeros=torch.randint(0, 16, groups, generator=random).to(torch.uint8),
        group=group,
    )


def make_fp4(*shape: int, group: int = 16, seed: int = 0) -> Fp4:
    random = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, shape, generator=random).to(torch.uint8)
    groups = (*shape[:-1], shape[-1] // group)
    # Of all sizes, those without an exponent and none at all among them.
    scales = 2 ** (17 * torch.rand(groups, generator=random) - 10)
    scales[..., 0] = 0
    factors = 2 ** (2 * torch.rand(shape[:-1], generator=random) - 6)
    return Fp4(
        packed=pack(q, FP4_LANE),
        scales=scales.to(torch.float8_e4m3fn),
        factors=factors,
        group=group,
        num_inputs=shape[-1],
    )


def make_w4a4(*shape: int, group: int = 16, seed: int = 0) -> W4A4:
    """The same weights, for rows that are rounded; inputs that share a byte are adjacent."""
    made = make_fp4(*shape, group=group, seed=seed)
    scales = made.scales.float()
    if group == 32:
        scales = torch.where(scales > 0, torch.exp2(scales.clamp(min=2**-9).log2().round()), 0)
    return W4A4(
        packed=pack(unpack(made.packed, FP4_LANE), PAIR),
        scales=scales.to(torch.float8_e4m3fn),
        factors=made.factors,
        group=group,
        num_inputs=made.num_inputs,
        input_factor=torch.tensor(0.01 if group == 16 else 1.0),
    )


def pack_rows(hidden: Tensor, weight: W4A4) -> tuple[Tensor, Tensor]:
    """Returns `round_e2m1` of the rows as kernels read them: codes [T, I / 2], and scales [G, T] in
    bits of float8, or of e8m0 in groups of 32."""
    codes, scales = round_e2m1(hidden, weight.group, weight.input_factor)
    if weight.group == 16:
        bits = (scales / weight.input_factor).to(FP8).view(torch.uint8)
    else:
        bits = torch.where(scales.isnan(), 255, scales.view(torch.int32) >> 23).to(torch.uint8)
    return pack(codes, PAIR), bits.T.contiguous()


def make_rows(*shape: int) -> Tensor:
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return (rows * torch.logspace(0, 1, shape[0])[:, None]).half()


def keeps_rows(weight: Quantised, hidden: Tensor) -> bool:
    """Whether the chip decodes FP8 weights alone: then rows are not rounded."""
    return isinstance(weight, Fp8) and not probe(hidden.device).rounds_to_fp8


def check(
    product: Tensor | None,
    hidden: Tensor,
    weight: Quantised,
    bias: Tensor,
    bound: float = 2e-3,
) -> None:
    assert product is not None
    product = product.sum(1) if product.dim() == 3 else product
    if keeps_rows(weight, hidden):
        expected = hidden.float() @ weight.dequantise(torch.float32).T + bias
    else:
        expected = multiply(hidden.float(), weight, bias)
    # Of each row, for rows have sizes of their own.
    error = (product - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < bound


def route(num_tokens: int, num_experts: int, size: float = 1) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    hidden = make_rows(num_tokens, 256) * size / 100
    chosen = [torch.randperm(num_experts, generator=random)[:2] for _ in range(num_tokens)]
    shares = torch.rand(num_tokens, 2, generator=random).half()
    return hidden, shares, torch.stack(chosen).int()


def check_experts(
    mixed: Tensor | None, *given: Tensor | Quantised, limit: float = 0.0, strays: float = 0.0
) -> None:
    """Compares with the reference, which does not round to 16 bits in between. A share of `strays`
    of all rows may differ by more: where rows are rounded to four bits, another last bit at a bound
    may double the scale of a group."""
    hidden, shares, experts, up, down = given
    assert mixed is not None
    mixed, wide, shares = mixed.float().sum(1), hidden.float(), shares.float()
    if keeps_rows(up, hidden) and hidden.dtype != torch.float32:  # no kernel takes float32
        raw = (each.dequantise(torch.float32) for each in (up, down))
        expected = experts_reference.apply(wide, shares, experts.long(), *raw, limit=limit)
    else:
        given = wide, shares, experts, up, down
        expected = experts_reference.mix_quantised(*given, limit=limit)[:, 0]
    error = (mixed - expected).norm(dim=1) / expected.norm(dim=1)
    # Sums at a bound of rounding may go the other way in between; the fewer bits, the more do.
    is_half = hidden.dtype == torch.float16
    assert error.median() < (3e-3 if is_half else 4e-2)
    assert (error >= (0.1 if is_half else 0.2)).float().mean() <= strays
