"""What goes down to host memory and comes up again is the same bit for bit, as is the answer."""

from __future__ import annotations

import pytest
import torch

from milepost.tiers.holdings import MeasuredRates
from tests.engines import Tiny, ask, greedy, logprobs, save_tiny, tiering_of, tokens
from tests.gpu.test_engine import SHAPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiers")
    return save_tiny(folder, "qwen3_next", torch.float32, **SHAPES)


@pytest.mark.parametrize("memory", ["shared", "split"])
def test_round_trip(tiny, memory):
    """Bytes of every page and state of an answer's path, on the device, below, and back again."""
    # Bytes: beside other processes a share of the device may have no room.
    sizes = (
        {"num_pages": 200, "num_slots": 24}
        if memory == "split"
        else {"kv_cache_memory_bytes": 1 << 28}
    )
    llm = tiny.open(
        dtype="bfloat16",
        device="cuda",
        cache_host_gib=0.5,
        max_num_seqs=4,
        cache_memory=memory,
        **sizes,
    )
    engine = llm.llm_engine
    tiering = tiering_of(engine)
    tiering.tiers.holdings.rates = MeasuredRates(tokens_per_s=1.0, load_s=0.0)
    (first,) = ask(llm, tokens(700), params=greedy(20))
    turn = [*tokens(700), *first.outputs[0].token_ids, *tokens(40, 1)]
    (on_device,) = ask(llm, turn, params=greedy(8))
    before = _contents(llm)
    assert engine.scheduler.cache.reset()
    for part in engine.runner.pools.slot_parts:
        part[1:].fill_(float("nan"))
    for part in engine.runner.pools.page_parts if memory == "split" else ():
        part.fill_(float("nan"))
    (from_host,) = ask(llm, turn, params=greedy(8))
    assert from_host.cache_report.loaded == {"host": from_host.num_cached_tokens}
    after = _contents(llm)
    shared = before.keys() & after.keys()
    assert len(shared) >= 12
    for key in shared:
        assert all(map(torch.equal, before[key], after[key]))
    if from_host.num_cached_tokens == on_device.num_cached_tokens:
        assert from_host.outputs[0].token_ids == on_device.outputs[0].token_ids
        assert logprobs(from_host.outputs[0]) == logprobs(on_device.outputs[0])
    else:
        tokens_of = [output.outputs[0].token_ids[0] for output in (from_host, on_device)]
        assert tokens_of[0] == tokens_of[1]


def _contents(llm) -> dict[bytes, list[torch.Tensor]]:
    """Of every full page that is cached on the device, and of every state, by key."""
    torch.cuda.synchronize()
    pools, tree = llm.llm_engine.runner.pools, llm.llm_engine.scheduler.cache.tree
    found = {
        node.digest: [part[node.page].cpu() for part in pools.page_parts]
        for node in tree.nodes.values()
    }
    for checkpoint in tree.at_slot.values():
        found[b"state" + checkpoint.key] = [p[checkpoint.slot].cpu() for p in pools.slot_parts]
    return found
