"""Short convolutions beside pages and in slots, fused and by the reference: what tests on CPU and
GPU share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import numpy as np
import torch

from milepost.kernels import short_conv
from milepost.kernels.layout.batch import Capacity
from milepost.kernels.platform.device import Chip
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


@dataclass
class Answer:
    """How far a sequence is, and how many drafts of its last step it has taken since."""

    committed: int = 0
    recorded: int = -1


def play(
    num_taps: int,
    seed: int,
    dtype: torch.dtype,
    chip: Chip | None = None,
    device: str = "cpu",
    *,
    in_slots: bool = False,
) -> None:
    """Answers whose tokens fall into steps and drafts by chance: outputs, and states at the ends of
    pages, or in slots once the last drafts are folded in, are those of one token at a time, bit for
    bit."""
    operation = ShortConvOperation(num_taps=num_taps, in_slots=in_slots)
    num_tokens, pages = 10, [[1, 2, 3], [4, 0, 5]]
    rng, random = Random(seed), torch.Generator().manual_seed(seed)
    draws = (2 * num_tokens, 3 * CHANNELS), (CHANNELS, num_taps), (4, 3 * CHANNELS)
    projected, weight, wrong = (torch.randn(d, generator=random).to(device, dtype) for d in draws)
    tokens = projected.split(num_tokens)

    def open_pool() -> torch.Tensor:
        pool = torch.full((7, CHANNELS, num_taps - 1), torch.nan, dtype=dtype, device=device)
        pool[0] = 0
        return pool

    def step(pool, records, parts, rows, recorded, decodes) -> torch.Tensor:
        batch = build_batch(parts, PAGE_SIZE, PAGE_SIZE, decodes)
        count = sum(part.length for part in parts)
        capacity = Capacity(num_tokens=count + 2, num_sequences=len(parts) + 1)
        found = None if in_slots else recorded
        batch = replace(batch, chip=chip, recorded=found, capacity=capacity)
        if in_slots:
            own = np.array([1 + (part.pages == pages[1]) for part in parts])
            begun = np.where(batch.starts > 0, own, 0)
            folds = np.maximum(recorded, 0) if recorded is not None else batch.folds
            batch = replace(batch, slot_in=begun, slot_out=own, folds=folds)
        batch = replace(batch, device=torch.device(device))
        batch = replace(batch, record_rows=np.array([part.pages == pages[1] for part in parts]) * 1)
        layout = on_device(operation.lay_out(batch), batch.device)
        inputs = torch.cat([*rows, tokens[0][:0]])
        if chip is not None:
            inputs = torch.cat((inputs, inputs.new_full((2, inputs.shape[1]), torch.nan)))
        return short_conv.mix(inputs, weight, None, pool, layout, records)[:count]

    plain, expected = open_pool(), []
    for t in range(num_tokens):
        parts = [part(each, t, t + 1) for each in pages]
        expected.append(step(plain, None, parts, [each[t : t + 1] for each in tokens], None, 2))
    pool, answers = open_pool(), [Answer(), Answer()]
    records = torch.full((2, num_taps - 1 + 4, CHANNELS), torch.nan, dtype=dtype, device=device)
    while any(each.committed < num_tokens for each in answers):
        turn = [s for s, each in enumerate(answers) if each.committed < num_tokens]
        parts, rows, rights = [], [], []
        for s in turn:
            first = answers[s].committed
            drafts = rng.randint(0, min(4, num_tokens - first - 1))
            right = rng.randint(0, drafts)
            parts.append(part(pages[s], first, first + 1 + drafts))
            rows += [tokens[s][first : first + 1 + right], wrong[: drafts - right]]
            rights.append(right if drafts else -1)
        recorded = np.array([answers[s].recorded for s in turn])
        output = step(pool, records, parts, rows, recorded, len(turn))
        for s, right, own in zip(
            turn, rights, output.split([p.length for p in parts]), strict=True
        ):
            each, first = answers[s], answers[s].committed
            each.committed, each.recorded = first + 1 + max(right, 0), right
            for t in range(first, each.committed):
                assert torch.equal(own[t - first], expected[t][s])
            for page in pages[s][: each.committed // PAGE_SIZE] if not in_slots else ():
                assert torch.equal(pool[page + 1], plain[page + 1])
    if in_slots:
        parts = [part(each, num_tokens, num_tokens) for each in pages]
        step(pool, records, parts, tokens[:0], np.array([each.recorded for each in answers]), 2)
        assert torch.equal(pool[1:3], plain[1:3])
    assert not pool[0].any()


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


def check_decodes(num_taps: int, has_bias: bool, chip: Chip, device: str = "cpu") -> None:
    """One launch makes outputs and states with the bits of two, also beside a sequence that has no
    token."""
    random = torch.Generator().manual_seed(0)
    parts = [part([1, 2], 6, 7), part([7], 2, 2), part([3], 0, 1), part([1, 4], 4, 5)]
    projected = torch.randn(6, 3 * CHANNELS, generator=random).to(device)
    projected[3:] = torch.nan
    weight = torch.randn(CHANNELS, num_taps, generator=random).to(device)
    bias = torch.randn(CHANNELS, generator=random).to(device) if has_bias else None
    pool = torch.randn(11, CHANNELS, num_taps - 1, generator=random).to(device)
    pool[0] = 0
    batch = build_batch(parts, PAGE_SIZE, PAGE_SIZE, len(parts))
    batch = replace(batch, device=torch.device(device), chip=chip)
    found = []
    for decodes in (False, True):
        capacity = Capacity(num_tokens=6, num_sequences=6, decodes=decodes)
        items = ShortConvOperation(num_taps=num_taps).lay_out(replace(batch, capacity=capacity))
        assert items.decodes == decodes
        own = pool.clone()
        output = short_conv.mix(projected, weight, bias, own, on_device(items, batch.device))
        found.append((output, own))
    assert all(map(torch.equal, *found))
    assert not found[1][0][3:].any(), "padding"
    assert not torch.equal(found[1][1], pool), "states are written"
