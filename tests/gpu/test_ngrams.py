"""Qwen3.8-Flash-Next's text part on a GPU: its table of n-grams lies in
pinned host memory, and a kernel reads it there."""

from __future__ import annotations

import pytest
import torch

from milepost.engine.assembly import sizing
from milepost.kernels.ngrams import take_from_host
from milepost.layers.ngrams import NgramPart
from tests.engines import open_llm, save_tiny
from tests.models.resuming import Resuming

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_pinned_host_memory_are_read_by_a_kernel(dtype):
    table = torch.randn(1001, 80).to(dtype).pin_memory()
    places = torch.randint(0, 1001, (300,))
    found = take_from_host(table, places.cuda())
    assert found.is_cuda
    assert torch.equal(found.cpu(), table[places])


def test_logits_are_those_of_one_pass_wherever_they_resume(tmp_path, monkeypatch):
    changes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    tiny = save_tiny(tmp_path, "qwen4_exp", torch.float32, **changes)
    monkeypatch.setattr(sizing, "free_bytes", lambda *_, **__: 256 << 20)
    llm = open_llm(
        tmp_path,
        device="cuda",
        max_model_len=1024,
        max_num_batched_tokens=96,
        max_num_seqs=8,
        page_size=16,
        num_pages=256,
        num_slots=32,
    )
    model = llm.llm_engine.runner.executor.model
    tables = [each.table for each in model.modules() if isinstance(each, NgramPart)]
    assert all(table.is_pinned() for table in tables)
    Resuming(llm, tiny.logits, 1e-4).run_through_slots()
