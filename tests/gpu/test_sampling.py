"""Sampling on a GPU: the definition's tokens, and nothing that waits for the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from milepost.kernels import sampling
from milepost.kernels import sampling as kernels
from milepost.kernels.sampling import draws, search
from milepost.runner import choice
from milepost.sampling_params import SamplingParams
from tests.kernels.draws import WISHES, defined, drawn, make_logits, make_rows, sampler_for
from tests.kernels.nuclei import random_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB = 151_936


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_argmax(num_rows: int, dtype: torch.dtype) -> None:
    """In bfloat16 many logits are equal: the first counts."""
    logits = random_logits(num_rows, VOCAB, "cuda").to(dtype)
    assert torch.equal(kernels.argmax(logits), logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [331, 50_257, VOCAB])
def test_tokens_are_the_definitions(vocab_size: int, dtype: torch.dtype) -> None:
    """But where rounding decides: a token whose noise is within 1e-5 of the best one's, or the last
    that top_p leaves."""
    wishes = list(WISHES) * 5  # more rows than fit at once
    rows = make_rows(vocab_size, vocab_size, wishes)
    logits = make_logits(len(rows), vocab_size, vocab_size, dtype).cuda()
    sampler = sampler_for(logits)
    found = drawn(sampler, logits, rows)
    expected = defined(logits, rows)
    differing = [
        (wish, ours, theirs)
        for wish, ours, theirs in zip(wishes, found, expected, strict=True)
        if ours != theirs
    ]
    assert len(differing) <= len(rows) // 30, differing
    again = sampler_for(logits)
    assert drawn(again, logits, rows) == found


def test_what_remains_is_the_definitions() -> None:
    """The lowest logit kept, beside the one by sorting; of flat logits and of steep ones."""
    wishes = [name for name, wish in WISHES.items() if "top_k" in wish or "top_p" in wish] * 6
    rows = [
        replace(row, mask=None, suppressed_ids=(), params=SamplingParams(**WISHES[wish]))
        for wish, row in zip(wishes, make_rows(VOCAB, 1, wishes), strict=True)
    ]
    logits = make_logits(len(rows), VOCAB, 4, torch.bfloat16).cuda()
    for start in range(0, len(rows), 32):
        some, here = rows[start : start + 32], logits[start : start + 32]
        sampler = sampler_for(here)
        drawn(sampler, here, some)
        work = sampler._work
        for place, row in enumerate(some):
            if row.takes_the_best:
                continue
            x = here[place : place + 1].float()
            scaled = (x - x.max()) / max(row.params.temperature, 1e-30)
            lowest = sampling.lowest_kept(
                scaled,
                floor=torch.tensor([[row.params.min_p]], device="cuda").log(),
                top_k=torch.tensor([[row.params.top_k or VOCAB]], device="cuda"),
                top_p=torch.tensor([[row.params.top_p]], device="cuda", dtype=torch.float64),
            )
            found = -work.scratch.found[place, 3].view(torch.float32)
            kept, expected = scaled >= found, scaled >= lowest
            differing = scaled[kept != expected].unique()
            assert len(differing) <= 1, (row.params, found, lowest)


def test_noise_is_the_definitions() -> None:
    """Through draws of equal logits, which the noise decides."""
    logits = torch.zeros(64, 5000, device="cuda")
    rows = [
        replace(row, params=SamplingParams(), mask=None, suppressed_ids=(), seed=2**64 - 1 - number)
        for number, row in enumerate(make_rows(5000, 2, ["all"] * 64))
    ]
    assert drawn(sampler_for(logits), logits, rows) == defined(logits, rows)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_host_does_not_wait() -> None:
    rows = make_rows(5000, 3)
    rows = [replace(row, params=replace(row.params, logprobs=3)) for row in rows]
    logits = make_logits(len(rows), 5000, 3, torch.bfloat16).cuda()
    sampler, best = sampler_for(logits), logits.argmax(-1)
    ids = [str(number) for number in range(len(rows))]

    def sample() -> None:
        token_ids = sampler.choose(ids, logits, best, rows)
        choice.choice_of(token_ids, logits, [row.params for row in rows])

    sample()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        sample()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rehearsal_compiles_what_steps_launch() -> None:
    logits = make_logits(14, VOCAB, 3, torch.bfloat16).cuda()
    sampler = sampler_for(logits)
    sampler.rehearse(torch.bfloat16)
    kernels_of = [
        kernel
        for stage in (search, draws)
        for name, kernel in vars(stage).items()
        if name.endswith("_kernel")
    ]
    before = [_num_compiled(kernel) for kernel in kernels_of]
    for num in (1, 3, 14):
        drawn(sampler, logits[:num], make_rows(VOCAB, num)[:num])
    assert [_num_compiled(kernel) for kernel in kernels_of] == before


def _num_compiled(kernel: object) -> int:
    return sum(len(cache[0]) for cache in kernel.device_caches.values())
