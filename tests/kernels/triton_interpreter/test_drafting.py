"""Drafting passes that are laid out ahead and moved back on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from msgspec import structs

from milepost import LLM
from milepost.kernels.attention.portable import prepare
from milepost.runner.device import DeviceExecutor
from milepost.runner.graphs import largest_step
from milepost.runner.plain import PlainExecutor
from tests.engines import Tiny, greedy, prompt, sampled, save_tiny, tokens
from tests.mtp import add_head

NUM_DRAFTS = 2
SHAPES = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tiny:
    made = save_tiny(tmp_path_factory.mktemp("fused"), "qwen3_5", torch.float32, **SHAPES)
    add_head(made.folder)
    return made


def open_llm(tiny: Tiny, *, is_fused: bool) -> LLM:
    wanted = {
        "method": "mtp",
        "num_speculative_tokens": NUM_DRAFTS,
        "adaptive": False,
        # So that some are accepted, all or not all of a step's.
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.9, 0.6],
    }
    llm = tiny.open(num_pages=64, num_slots=16, page_size=16, speculative_config=wanted)
    runner = llm.llm_engine.runner
    model, sizes = runner.executor.model, {"num_requests": 16, "max_model_len": 1024}
    # Fused kernels attend to the first row, too.
    model.mtp.attention.shapes = replace(model.mtp.attention.shapes, first_row=0)
    model.mtp.attention.__dict__.pop("operation", None)
    if is_fused:
        largest = largest_step(max_num_seqs=8, max_num_batched_tokens=256)
        largest = replace(largest, num_drafts=NUM_DRAFTS)
        runner.executor = DeviceExecutor(model, runner.pools, **sizes, largest=largest)
    else:
        runner.executor = PlainExecutor(model, runner.pools, **sizes)
    return llm


def drafts_of(llm: LLM) -> list[Mapping[int, Sequence[int]]]:
    """Of every step of two requests, one of which crosses into its next page, and one of which
    draws: with the noise of each place."""
    runner, seen = llm.llm_engine.runner, []
    sample, collect = runner.sample, runner.collect

    def collect_drafts(flight):
        output = collect(flight)
        seen.append(output.read_drafts())
        return output

    runner.sample = lambda flight, sampling: sample(
        flight, structs.replace(sampling, num_drafts=NUM_DRAFTS)
    )
    runner.collect = collect_drafts
    params = [greedy(6, logprobs=None), sampled(6, logprobs=None)]
    llm.generate([prompt(tokens(14)), prompt(tokens(5, 3))], params, use_tqdm=False)
    return seen


def test_fused_passes_draft_what_plain_ones_do(tiny, monkeypatch):
    monkeypatch.setattr(prepare, "_FEW_TOKENS", 4)
    expected = drafts_of(open_llm(tiny, is_fused=False))
    fused = open_llm(tiny, is_fused=True)
    assert drafts_of(fused) == expected
    assert sum(map(len, expected)) >= 6
    assert fused.llm_engine.scheduler.stats.num_accepted_tokens > 0
