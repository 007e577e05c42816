"""Short convolutions beside pages, fused and by the reference: what tests on CPU and GPU share."""

from __future__ import annotations

from dataclasses import replace

import torch

from milepost.kernels import short_conv
from milepost.kernels.batch import Capacity
from milepost.kernels.device import Chip
from milepost.kernels.short_conv import ShortConvOperation
from milepost.runner.staging import on_device
from tests.batches import Part, build_batch

PAGE_SIZE, CHANNELS = 4, 140


def part(pages: list[int], start: int, end: int, write_from: int = 0) -> Part:
    length = end - start
    return Part(
        pages=pages, start=start, length=length, slot_in=0, slot_out=0, write_from=write_from
    )


STEPS = {
    "decodes": ([part([1, 2], 6, 7), part([3], 0, 1), part([1, 4], 4, 5)], 3),
    # One token that a shared page has already, and one inside a page.
    "shared": ([part([1, 2], 7, 8, 8), part([5, 3], 6, 7)], 2),
    # From inside a page on past the next one, from a boundary, with a page that is shared.
    "mixed": (
        [
            part([6, 7], 5, 6),
            part([1, 2, 3], 2, 11),
            part([0, 4], 4, 7),
            part([8, 9], 0, 8, 4),
        ],
        1,
    ),
}


def check(name: str, num_taps: int, has_bias: bool, chip: Chip, device: str = "cpu") -> None:
    """Outputs and every row of the pool; a kernel may be longer than a page."""
    parts, num_decodes = STEPS[name]
    random = torch.Generator().manual_seed(0)
    num_tokens = sum(part.length for part in parts)
    padded = num_tokens + 3
    projected = torch.randn(padded, 3 * CHANNELS, generator=random).to(device)
    projected[num_tokens:] = torch.nan
    weight = torch.randn(CHANNELS, num_taps, generator=random).to(device)
    bias = torch.randn(CHANNELS, generator=random).to(device) if has_bias else None
    expected_pool = torch.randn(11, CHANNELS, num_taps - 1, generator=random).to(device)
    expected_pool[0] = 0
    pool = expected_pool.clone()

    operation = ShortConvOperation(num_taps=num_taps)
    batch = build_batch(parts, PAGE_SIZE, PAGE_SIZE, num_decodes)
    batch = replace(batch, device=torch.device(device))
    rows = operation.lay_out(batch)
    expected = short_conv.mix(projected[:num_tokens], weight, bias, expected_pool, rows)
    capacity = Capacity(num_tokens=padded, num_sequences=len(parts) + 2)
    items = operation.lay_out(replace(batch, chip=chip, capacity=capacity))
    output = short_conv.mix(projected, weight, bias, pool, on_device(items, batch.device))
    torch.testing.assert_close(output[:num_tokens], expected, rtol=1e-5, atol=1e-5)
    assert not output[num_tokens:].any()
    torch.testing.assert_close(pool, expected_pool, rtol=1e-6, atol=1e-6)
