"""The Triton sampler against the definition, in Triton's interpreter."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton.language as tl
from triton import jit

from milepost.kernels import sampling as layout
from milepost.kernels.sampling import StepRows, likeliest, search
from milepost.runner import sampler
from milepost.sampling_params import SamplingParams
from tests.kernels.draws import (
    WISHES,
    defined,
    drawn,
    make_logits,
    make_rows,
    sampler_for,
)
from tests.kernels.nuclei import random_logits


@pytest.mark.parametrize("vocab_size", [5, 300, 20_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_argmax(vocab_size: int, dtype: torch.dtype) -> None:
    """Of equal logits the first, in another block too; rows may lie apart."""
    logits = random_logits(6, vocab_size + 3).to(dtype)[:, :vocab_size]
    logits[1], logits[2] = 0.5, -torch.inf
    logits[3, [1, 4, vocab_size - 1]] = 9.0
    assert torch.equal(likeliest.argmax(logits), logits.argmax(-1))


def test_argmax_of_nothing_is_a_token() -> None:
    found = likeliest.argmax(torch.full((2, 300), torch.nan))
    assert ((found >= 0) & (found < 300)).all()


@pytest.fixture
def blocks(monkeypatch) -> None:
    """Several to a row."""
    monkeypatch.setattr(layout, "BLOCK", 64)
    monkeypatch.setattr(search, "_CHUNK", 256)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(5, torch.float32), (150, torch.bfloat16)], ids=str
)
def test_tokens_are_the_definitions(vocab_size: int, dtype: torch.dtype, blocks) -> None:
    rows = make_rows(vocab_size, vocab_size, list(WISHES)[(vocab_size + 1) % 2 :: 2])
    logits = make_logits(len(rows), vocab_size, vocab_size, dtype)
    assert drawn(sampler_for(logits), logits, rows) == defined(logits, rows)


def test_more_logits_than_are_listed(blocks, monkeypatch) -> None:
    """Then the whole row is read; and more rows than fit at once take turns."""
    monkeypatch.setattr(search, "_CAPACITY", tl.constexpr(4))
    monkeypatch.setattr(search, "_CHUNK", 64)
    monkeypatch.setattr(sampler, "_ROWS_AT_ONCE", 2)
    rows = make_rows(130, 3, ["top_k of many", "wide top_p", "all at once"])
    logits = make_logits(3, 130, 1, torch.float16)
    assert drawn(sampler_for(logits), logits, rows) == defined(logits, rows)


@pytest.mark.parametrize("value", [0.0, -torch.inf, torch.nan], ids=str)
def test_rows_without_a_best_logit(value: float, blocks) -> None:
    """All equal: the noise decides. None possible: some token. Neighbours see nothing of it."""
    rows = make_rows(100, 7, ["recommended", "top_p", "all"])
    logits = make_logits(3, 100, 2, torch.float32)
    logits[1] = value
    rows[1] = replace(rows[1], params=SamplingParams(top_p=0.4), mask=None, suppressed_ids=())
    found, expected = drawn(sampler_for(logits), logits, rows), defined(logits, rows)
    assert found[::2] == expected[::2]
    assert found[1] == expected[1] if value == 0 else 0 <= found[1] < 100


def test_equal_logits_stay_or_go_together(blocks) -> None:
    """The second best three times, two of which top_k has room for: each is drawn at times."""
    logits = torch.full((1, 100), -3.0)
    logits[0, [4, 70, 99]] = 1.0
    logits[0, 50] = 1.5
    row = make_rows(100, 0, ["top_k"])[0]
    rows = [
        replace(row, seed=seed, params=SamplingParams(top_k=3), mask=None, suppressed_ids=())
        for seed in (0, 1, 2, 5)
    ]
    many = logits.expand(4, -1).contiguous()
    found = drawn(sampler_for(many), many, rows)
    assert found == defined(many, rows)
    assert set(found) == {4, 50, 70, 99}


def test_noise_is_the_definitions() -> None:
    ints = torch.zeros(2, layout.NUM_INTS, dtype=torch.int32)
    ints[:, layout.INDEX] = torch.tensor([0, 77])
    ints[1, layout.SEED_LOW], ints[1, layout.SEED_HIGH] = -5, 2**31 - 1
    found = torch.empty(2, 1024)
    _noise_kernel[(2,)](ints, found, block=1024)
    seeds = [0, (2**31 - 1) << 32 | (2**32 - 5)]
    expected = layout.gumbel(seeds, [0, 77], 1024, torch.device("cpu"))
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-6)


@jit
def _noise_kernel(ints, found, block: tl.constexpr):
    row = tl.program_id(0)
    own = ints + row * likeliest.INTS
    noise = likeliest.gumbel(own, tl.load(own + likeliest.INDEX), 0, block)
    tl.store(found + row * block + tl.arange(0, block), noise)


def test_answers_are_counted_without_the_host(blocks) -> None:
    """Step after step as if from the tokens themselves; what was taken back is counted anew, and a
    request that comes back as well."""
    rows = [
        replace(row, num_ahead=0, tokens=[*row.tokens], mask=None, suppressed_ids=())
        for row in make_rows(60, 5, ["greedy", "recommended", "all at once"])
    ]
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.8, "temperature": 0.8}
    rows = [replace(row, params=SamplingParams(**penalties)) for row in rows]
    ours = sampler_for(torch.zeros(3, 60), num_rows=2)
    names = ["a", "b", "c"]
    # Two rows of counts for three requests; "a" goes back two tokens at the sixth step.
    turns = [(0, 1), (0, 1), (0, 2), (0, 2), (1, 2), (0, 1), (0, 2), (0, 1)]
    for step, turn in enumerate(turns):
        if step == 5:
            rows[0].tokens = rows[0].tokens[:-2]
        logits = make_logits(2, 60, step, torch.float32)
        here, ids = [rows[r] for r in turn], [names[r] for r in turn]
        found = drawn(ours, logits, here, ids)
        assert found == defined(logits, here)
        for row, token in zip(here, found, strict=True):
            row.tokens = [*row.tokens, token]


def test_tokens_ahead_are_counted(blocks) -> None:
    """The host learns of each token a step later."""
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    row = replace(make_rows(60, 5, ["greedy"])[0], params=params, mask=None, suppressed_ids=())
    ours, known = sampler_for(torch.zeros(1, 60)), replace(row)
    logits = make_logits(1, 60, 3, torch.float32)
    for step in range(4):
        ahead = replace(row, num_ahead=len(known.tokens) - len(row.tokens))
        (token,) = drawn(ours, logits, [ahead], ["a"])
        assert [token] == defined(logits, [known])
        if step:
            row.tokens = known.tokens
        known.tokens = [*known.tokens, token]


def test_what_is_remembered_of_requests_does_not_show() -> None:
    """Requests come, go and come back, more than there are places for, some with other parameters:
    what goes to the device is what a sampler that knows nobody sends."""
    rng, ours = random.Random(0), sampler_for(torch.zeros(3, 60))
    rows = make_rows(60, 6, list(WISHES))
    for _ in range(60):
        numbers = rng.sample(range(9), rng.randint(1, 3))
        here = [rng.choice(rows) if rng.random() < 0.1 else rows[n % len(rows)] for n in numbers]
        here = [replace(row, suppressed_ids=rng.choice([(), (3, 9), (4,)])) for row in here]
        places = [rng.randint(-1, 2) for _ in numbers]
        ours_now = ours._build(numbers, here, places)
        anew = sampler_for(torch.zeros(3, 60))._build(numbers, here, places)
        for name in StepRows.__annotations__:
            assert np.array_equal(getattr(ours_now, name), getattr(anew, name)), name
