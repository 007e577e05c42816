"""Attention to what an indexer selects, interpreted, against the definition; and an engine of
Qwen3.8-Flash-Next's on the fused kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from milepost.kernels.attention import AttentionOperation, PagedKV, attend, indexed
from milepost.kernels.attention.portable import scores
from milepost.kernels.layout.batch import Capacity
from milepost.kernels.platform.device import probe
from milepost.runner.staging import on_device
from tests.batches import Part, build_batch
from tests.engines import Tiny, save_tiny
from tests.kernels.triton_interpreter.fused import check_answers, run_fused
from tests.models.resuming import ALL_ACCEPTED, resume_behind_drafts
from tests.numbers import relative_error


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sequences of a step."""

    starts: tuple[int, ...] = (130, 0, 63, 300)
    lengths: tuple[int, ...] = (1, 70, 2, 20)
    ratio: int = 4
    budget: int = 24
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    index_heads: int = 3
    key_dim: int = 20
    page_size: int = 16
    gates: str = "entries"
    dtype: torch.dtype = torch.float32


CASES = {
    "usual": Case(),
    "decodes": Case(starts=(0, 3, 4, 15, 16, 200), lengths=(1,) * 6),
    "odd": Case(ratio=5, budget=10, num_heads=3, num_kv_heads=1, head_dim=24, gates="heads"),
    "a_block_a_token": Case(ratio=1, budget=7, key_dim=16, gates="none"),
    "wider_than_a_page": Case(ratio=32, budget=64, index_heads=1),
    "everything": Case(budget=1024),
    "less_than_a_block": Case(starts=(0, 1), lengths=(3, 2), ratio=8, budget=16),
}


class Step:
    """One step's tensors; rows that no token was written to hold NaN."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random).to(case.dtype)

        self.case, num_tokens = case, sum(case.lengths)
        ends = [start + length for start, length in zip(case.starts, case.lengths, strict=True)]
        shape = case.num_kv_heads, case.head_dim
        counts = [-(-end // case.page_size) for end in ends]
        order = torch.randperm(sum(counts), generator=random).split(counts)
        pool = torch.full((sum(counts) + 1, 3, case.page_size, *shape), torch.nan, dtype=case.dtype)
        parts = []
        for index, pages in enumerate(order):
            for position in range(ends[index]):
                page, place = pages[position // case.page_size], position % case.page_size
                pool[page, :, place] = randn(3, *shape)
            parts.append(
                Part(
                    pages=pages.tolist(),
                    start=case.starts[index],
                    length=case.lengths[index],
                    slot_in=0,
                    slot_out=0,
                )
            )
        self.pool, self.keys = pool, randn(num_tokens, case.key_dim)
        self.query = randn(num_tokens, case.num_heads, case.head_dim)
        num_gates = {"entries": case.head_dim, "heads": 1, "none": 0}[case.gates] * case.num_heads
        self.gate = randn(num_tokens, num_gates + 3)[:, 3:] if num_gates else None
        frequencies = torch.rand(6, generator=random)
        self.selection = indexed.Selection(
            query=randn(num_tokens, case.index_heads, case.key_dim),
            norm_scale=torch.rand(case.key_dim, generator=random) + 0.5,
            eps=1e-6,
            angles=lambda positions: self._angles(positions, frequencies),
            num_turned=12,
            ratio=case.ratio,
            budget=case.budget,
        )
        self.batch = build_batch(parts, case.page_size, 3 * case.page_size, 0)

    def _angles(self, positions, frequencies):
        angles = positions[:, None, None].float() * frequencies
        return angles.cos().to(self.case.dtype), angles.sin().to(self.case.dtype)

    def run(self, *, is_fused: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of the step's tokens, and the pool with their index keys."""
        case, batch, num = self.case, self.batch, len(self.query)
        operation = AttentionOperation(
            num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            is_indexed=True,
        )
        gate, query, selection, keys = self.gate, self.query, self.selection, self.keys
        kv_rows, padding = torch.from_numpy(batch.kv_rows), 0
        if is_fused:
            padding = 5
            capacity = Capacity(num_tokens=num + padding, num_sequences=len(case.lengths) + 2)
            batch = replace(batch, chip=probe(torch.device("cpu")), capacity=capacity)
            kv_rows = torch.cat((kv_rows, kv_rows.new_full((padding,), -1)))
            query, keys = (
                torch.cat((each, each.new_full((padding, *each.shape[1:]), torch.nan)))
                for each in (query, keys)
            )
            own = selection.query
            selection = replace(selection, query=torch.cat((own, own[:padding])))
            gate = None if gate is None else torch.cat((gate, gate[:padding]))
        layout = on_device(operation.lay_out(batch), torch.device("cpu"))
        kv = PagedKV(self.pool.clone(), torch.from_numpy(batch.tables))
        indexed.store(kv, keys, layout, kv_rows)
        scale = case.head_dim**-0.5
        return attend(query, gate, kv, layout, scale, selection=selection)[:num], kv.pool


@pytest.mark.parametrize("name", CASES)
def test_it_matches_the_definition(monkeypatch, name: str) -> None:
    monkeypatch.setattr(scores, "_SCORES", 1)  # those of 16 tokens
    step = Step(CASES[name])
    (expected, pool), (found, own) = (step.run(is_fused=each) for each in (False, True))
    assert torch.equal(own.nan_to_num(9), pool.nan_to_num(9))
    assert relative_error(found, expected) < 1e-5


def test_equal_scores_are_the_earlier_blocks() -> None:
    """Index queries of zeros score every block alike."""
    step = Step(CASES["decodes"])
    step.selection.query.zero_()
    (expected, _), (found, _) = (step.run(is_fused=each) for each in (False, True))
    assert relative_error(found, expected) < 1e-5


def test_half_precision_selects_nearly_the_same() -> None:
    step = Step(replace(CASES["everything"], dtype=torch.float16))
    (expected, _), (found, _) = (step.run(is_fused=each) for each in (False, True))
    assert relative_error(found, expected) < 2e-3


def save_narrow(folder: Path) -> Tiny:
    """Saves a model with two layers and heads of 16."""
    shapes = {
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_value_head_dim": 16,
        "head_dim": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "indexer_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "ple_layer_ids": [1],
    }
    return save_tiny(folder, "qwen4_exp", torch.float32, **shapes)


def test_an_engine_on_fused_kernels_answers_as_one_on_the_reference(tmp_path) -> None:
    """Experts, hyper-connections, n-grams and selection: cold, in chunks, decodes, and hits."""
    check_answers(save_narrow(tmp_path))


def test_drafts_that_end_an_answer_are_folded_on_fused_kernels(tmp_path) -> None:
    """The next turn resumes behind them, and answers as a cold run on the reference kernels."""
    tiny, sizes = save_narrow(tmp_path), {"num_pages": 64, "num_slots": 16, "page_size": 16}
    drafting = tiny.open(**sizes, speculative_config=ALL_ACCEPTED)
    run_fused(drafting)
    resume_behind_drafts(drafting, tiny.open(**sizes), max_error=1e-4)
