"""With `batch_invariant`, a token's logits are the same bits whatever else is in a step, and
wherever a prompt is cut on the grid."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from milepost.kernels import products
from milepost.kernels.products import experts_reference
from milepost.models import Decoder
from milepost.models.loading import LoadOptions, load_model
from tests.batches import Part, Pools, build_pools
from tests.checkpoints import save

GRID = 64
NUM_ANSWERED = 4


@dataclass
class Sequence:
    """A prompt, and an answer that is given."""

    tokens: list[int]
    num_prompt: int
    pages: list[int]
    slot: int
    done: int = 0
    logits: list[Tensor] = field(default_factory=list)
    """After the prompt, and after each token of the answer."""

    @property
    def decodes(self) -> bool:
        return self.done >= self.num_prompt

    @property
    def is_done(self) -> bool:
        return self.done == len(self.tokens)


def _sequences(lengths: list[int]) -> Iterator[Sequence]:
    draw = random.Random(0)
    for number, length in enumerate(lengths):
        own = [draw.randrange(101) for _ in range(length + NUM_ANSWERED)]
        pages = list(range(4 * number, 4 * number + 4))
        yield Sequence(tokens=own, num_prompt=length, pages=pages, slot=1 + number)


def _step(model: Decoder, pools: Pools, chosen: list[tuple[Sequence, int]]) -> None:
    """Runs the next tokens of sequences, as many as are given."""
    chosen.sort(key=lambda each: not each[0].decodes)
    parts = [
        Part(
            pages=each.pages,
            start=each.done,
            length=count,
            slot_in=each.slot if each.done else 0,
            slot_out=each.slot,
        )
        for each, count in chosen
    ]
    context = pools.context(parts, sum(each.decodes for each, _ in chosen))
    token_ids = [t for each, count in chosen for t in each.tokens[each.done : each.done + count]]
    hidden = model.forward(torch.tensor(token_ids), context)
    logits = model.compute_logits(hidden[context.step.last_tokens])
    for (each, count), row in zip(chosen, logits, strict=True):
        each.done += count
        if each.decodes:
            each.logits.append(row)


def _run_alone(model: Decoder, lengths: list[int]) -> list[Tensor]:
    found = []
    for each in _sequences(lengths):
        pools = build_pools(model, num_pages=4 * len(lengths), num_slots=1 + len(lengths))
        _step(model, pools, [(each, each.num_prompt)])
        while not each.is_done:
            _step(model, pools, [(each, 1)])
        found.append(torch.stack(each.logits))
    return found


def _run_together(model: Decoder, lengths: list[int], seed: int) -> list[Tensor]:
    """Draws which sequences run in a step, in which order, and where prompts are cut."""
    draw = random.Random(seed)
    everything = list(_sequences(lengths))
    pools = build_pools(model, num_pages=4 * len(lengths), num_slots=1 + len(lengths))
    while left := [each for each in everything if not each.is_done]:
        chosen = draw.sample(left, draw.randint(1, len(left)))
        _step(model, pools, [(each, _draw_count(each, draw)) for each in chosen])
    return [torch.stack(each.logits) for each in everything]


def _draw_count(each: Sequence, draw: random.Random) -> int:
    if each.decodes:
        return 1
    ends = [*range(each.done // GRID * GRID + GRID, each.num_prompt, GRID), each.num_prompt]
    return draw.choice(ends) - each.done


def _load(folder: Path, family: str, dtype: torch.dtype, **options: Any) -> Decoder:
    save(family, folder, dtype)
    model, _ = load_model(folder, LoadOptions(dtype=dtype, batch_invariant=True, **options))
    return model


LENGTHS = [200, 1, 63, 64, 65, 130, 17]


@pytest.mark.parametrize(
    ("family", "dtype", "quantization"),
    [
        ("qwen3_next", torch.float32, None),
        ("qwen3_5_moe", torch.bfloat16, None),
        ("qwen3_5", torch.bfloat16, "fp8"),
        ("nemotron_h", torch.float32, None),
        ("kimi_linear", torch.bfloat16, None),
        ("bailing_hybrid", torch.float32, None),
        ("bailing_hybrid_tiny", torch.bfloat16, None),
        ("alice_ai", torch.bfloat16, None),
        ("lfm2_moe", torch.float32, None),
        ("lfm3", torch.float32, None),
    ],
    ids=str,
)
def test_logits_depend_on_the_tokens_before_alone(
    family: str, dtype: torch.dtype, quantization: str | None, tmp_path: Path
) -> None:
    model = _load(tmp_path, family, dtype, quantization=quantization)
    model.pack()
    assert _differing(model, seed=0) == []


@pytest.mark.parametrize("module", [products, experts_reference], ids=lambda it: it.__name__)
def test_another_order_is_found(module: ModuleType, tmp_path: Path) -> None:
    """If a product's rows are all multiplied at once, bits depend on their number."""
    model = _load(tmp_path, "qwen3_next", torch.float32)

    def at_once(compute: Callable[..., Any], *rows: Tensor, size: int = 0) -> Any:
        return compute(*rows)

    with mock.patch.object(module, "in_blocks", at_once):
        assert _differing(model, seed=0) != []


def _differing(model: Decoder, seed: int) -> list[int]:
    """The sequences whose logits are others beside the rest."""
    pairs = zip(_run_alone(model, LENGTHS), _run_together(model, LENGTHS, seed), strict=True)
    return [number for number, (alone, found) in enumerate(pairs) if not torch.equal(alone, found)]
