"""Paged attention against a dense softmax in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from milepost.kernels.attention import reference
from milepost.kernels.attention.pages import PagedKV, as_rows, lay_out, rows_per_page
from tests.batches import Part, build_batch, build_pages
from tests.numbers import relative_error

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, NUM_PAGES = 6, 3, 16, 16, 100
SCALE = HEAD_DIM**-0.5
TOLERANCES = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 8e-3}


class Sequences:
    """Queries, keys and values of whole sequences, in pages taken in a scattered order."""

    def __init__(self, lengths: list[int], dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(0)
        self.query, self.key, self.value = (
            [torch.randn(n, heads, HEAD_DIM, generator=random).to(dtype) for n in lengths]
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        order = iter((torch.randperm(NUM_PAGES - 1, generator=random) + 1).tolist())
        self.pages = [[next(order) for _ in range(0, n, PAGE_SIZE)] for n in lengths]
        self.pool = build_pages(NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype)

    def attend(
        self,
        starts: list[int],
        num_decodes: int = 0,
        write_from: int = 0,
        window: int | None = None,
    ) -> Tensor:
        """One step in which every sequence is computed from `starts` on."""
        parts = [
            Part(
                pages=pages,
                start=start,
                length=len(query) - start,
                slot_in=0,
                slot_out=1,
                write_from=write_from,
            )
            for pages, start, query in zip(self.pages, starts, self.query, strict=True)
        ]
        batch = build_batch(parts, PAGE_SIZE, rows_per_page(self.pool), num_decodes)
        query, key, value = (
            torch.cat([tensor[start:] for tensor, start in zip(tensors, starts, strict=True)])
            for tensors in (self.query, self.key, self.value)
        )
        rows = lay_out(batch, window=window)
        kv = PagedKV(self.pool)
        reference.store(kv, key, value, rows.tokens, rows.kv_rows)
        if num_decodes:
            return reference.decode(query, kv, *rows.decodes, SCALE)
        return reference.prefill(query, kv, rows.prefills, SCALE)

    def expected(self, starts: list[int], window: int = 10**6) -> Tensor:
        """The same in float64 without pages."""
        outputs = []
        for query, key, value, start in zip(self.query, self.key, self.value, starts, strict=True):
            repeated = (
                tensor.double().repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (key, value)
            )
            key, value = repeated
            scores = torch.einsum("qhe,khe->hqk", query.double(), key) * SCALE
            ones = torch.ones(scores.shape[1:], dtype=torch.bool)
            unseen = ones.triu(1) | ones.tril(-window)
            shares = scores.masked_fill(unseen, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khe->qhe", shares, value)[start:])
        return torch.cat(outputs)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_prefill_matches_softmax(dtype: torch.dtype) -> None:
    sequences = Sequences([1, 15, 16, 77], dtype)
    output = sequences.attend([0, 0, 0, 0])
    assert output.dtype == dtype
    assert relative_error(output, sequences.expected([0, 0, 0, 0])) < TOLERANCES[dtype]


@pytest.mark.parametrize("window", [1, 16, 40, 700])
def test_what_lies_behind_a_window_is_never_read(window: int) -> None:
    """Prefills in tiles, and decodes of different lengths; NaN stands there."""
    sequences = Sequences([20, 1100, 64], torch.float64)
    for starts, num_decodes in [([19, 500, 32], 0), ([19, 1099, 63], 3)]:
        sequences.attend([0, 0, 0])
        for pages, start in zip(sequences.pages, starts, strict=True):
            for place in range(max(start + 1 - window, 0)):
                sequences.pool[pages[place // PAGE_SIZE], :, place % PAGE_SIZE] = torch.nan
        output = sequences.attend(starts, num_decodes, window=window)
        assert relative_error(output, sequences.expected(starts, window)) < 1e-14


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_prefill_after_prefix_matches_softmax(dtype: torch.dtype) -> None:
    sequences = Sequences([20, 1100, 64], dtype)
    starts = [19, 500, 32]
    whole = [0, 0, 0]
    sequences.attend(whole)
    output = sequences.attend(starts)
    assert relative_error(output, sequences.expected(starts)) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_decode_matches_softmax(dtype: torch.dtype) -> None:
    sequences = Sequences([1, 16, 17, 90], dtype)
    starts = [0, 15, 16, 89]
    sequences.attend([0, 0, 0, 0])
    output = sequences.attend(starts, num_decodes=4)
    assert relative_error(output, sequences.expected(starts)) < TOLERANCES[dtype]


def test_rows_that_hold_no_token_are_never_read() -> None:
    sequences = Sequences([5, 40], torch.float32)
    assert sequences.attend([0, 0]).isfinite().all()
    assert sequences.attend([4, 39], num_decodes=2).isfinite().all()
    assert sequences.pool.isnan().any()


def test_kv_before_write_from_is_read_but_not_written() -> None:
    sequences = Sequences([60], torch.float32)
    sequences.attend([0])
    before = sequences.pool.clone()
    right_keys = sequences.key[0].clone()
    sequences.key[0][:48] = torch.nan
    output = sequences.attend([32], write_from=48)
    assert torch.equal(sequences.pool.nan_to_num(9.0), before.nan_to_num(9.0))
    sequences.key[0].copy_(right_keys)
    assert relative_error(output, sequences.expected([32])) < 2e-6


def test_store_writes_only_its_rows() -> None:
    sequences = Sequences([30], torch.float32)
    sequences.attend([0], write_from=10)
    pages = sequences.pool[sequences.pages[0]].transpose(0, 1).flatten(1, 2)
    assert pages[:, :10].isnan().all()
    assert pages[:, 10:30].isfinite().all()
    assert pages[:, 30:].isnan().all()
    others = [page for page in range(NUM_PAGES) if page not in sequences.pages[0]]
    assert sequences.pool[others].isnan().all()
    assert as_rows(sequences.pool).isnan().sum() > sequences.pool.isnan().sum()
