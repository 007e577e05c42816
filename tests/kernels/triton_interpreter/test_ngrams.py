"""N-gram embeddings with the fused kernel that keeps their states, interpreted: beside the
definition, and in an engine whose steps have the shapes of graphs."""

from __future__ import annotations

import pytest
import torch

from milepost.kernels.mtp import Carried, CarryRows, keep_states, triton
from tests.engines import save_tiny
from tests.kernels.triton_interpreter.fused import check_answers

SIZE, COLUMNS = 2500, slice(7, 2507)
LINEAR = {
    "head_dim": 16,
    "layer_types": ["linear_attention"] * 2,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 2,
    "ple_layer_ids": [1, 2],
}


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_states_are_kept_as_defined(num_drafts: int) -> None:
    """After tokens, of records that drafts left, of records of new drafts, and of padding."""
    random = torch.Generator().manual_seed(0)
    targets = torch.tensor([[4, 2, -1, -1], [0, 1, 2, 0], [-1, 3, 1, 2], [-1, -1, -1, -1]])
    drafts = torch.tensor([[-1, -1], [2, 0], [2, 1], [-1, -1]])
    rows = CarryRows(sources=None, targets=targets.int(), recorded=drafts.int())
    states, recorded = (torch.randn(4, SIZE, generator=random) for _ in range(2))
    before = torch.randn(5, 2600, generator=random), torch.randn(3, 3, 2600, generator=random)
    found = []
    for keep in (keep_states, triton.keep_states):
        own = Carried(states=before[0].clone(), records=before[1].clone() if num_drafts else None)
        keep(states, recorded if num_drafts else None, own, rows, COLUMNS)
        found.append(own)
    assert torch.equal(found[0].states, found[1].states)
    assert torch.equal(found[1].states[2, COLUMNS], states[0])
    assert torch.equal(found[1].states[4], before[0][4])
    if num_drafts:
        assert torch.equal(found[0].records, found[1].records)
        assert torch.equal(found[1].states[3, COLUMNS], before[1][1, 2, COLUMNS])
        assert torch.equal(found[1].records[2, 1, COLUMNS], recorded[2])


def test_an_engine_on_fused_kernels_answers_as_one_on_the_reference(tmp_path) -> None:
    """Cold, in chunks, decoding side by side, and a hit inside the state's reach."""
    tiny = save_tiny(tmp_path, "qwen4_exp", torch.float32, **LINEAR)
    check_answers(tiny)
