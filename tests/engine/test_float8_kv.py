"""KV in float8: a hit changes the answer no more than with KV in the model's type, for what a page
holds of a token depends on that token alone."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from milepost.errors import ConfigError, UnsupportedModelError, WeightsError
from milepost.kernels.platform.tensors import FP8
from tests.engine import test_equality as ways
from tests.engines import NUM_TOKENS, THREE_LAYERS, Tiny, ask, cached, save_tiny, tokens
from tests.numbers import relative_error

FLOAT8 = {"kv_cache_dtype": "fp8"}
WAYS = {
    "hit": partial(ways.test_hit, page_size=64),
    "branch_point": partial(ways.test_branch_point, page_size=64),
    "mark": partial(ways.test_mark, page_size=64),
    "answer_end": partial(ways.test_answer_end, page_size=128),
    "inside_a_page": partial(ways.test_two_resume_from_the_same_place_inside_a_page, page_size=64),
    "preempted": partial(ways.test_preempted_and_resumed, pages=(64, 18)),
    "no_slot_beside_the_state": ways.test_no_slot_beside_the_state,
    "no_page_beside_the_tail": ways.test_no_page_beside_the_tail,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tiny:
    made = save_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_next", torch.float64, **THREE_LAYERS)
    made.options = FLOAT8
    return made


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_state_that_comes_back(tiny, way):
    way(tiny)


def test_pages_are_half_as_large_as_in_16_bits(tiny):
    wide = Tiny(tiny.folder, tiny.dtype).open(cache_memory="split")
    sizes = [llm.llm_engine.runner.pools.all_kv[0].nbytes for llm in (tiny.open(), wide)]
    assert sizes[1] == tiny.dtype.itemsize * sizes[0]


@pytest.mark.parametrize("budget", [64, 130])
def test_a_page_holds_the_same_bytes_however_it_was_filled(tiny, budget):
    """In one step, over several, by decodes, and behind a copy of what was there first."""
    whole, parts = tiny.open(), tiny.open(max_num_batched_tokens=budget, max_num_seqs=4)
    (first,) = ask(parts, tokens(100))
    token_ids = [*tokens(100), *first.outputs[0].token_ids, *tokens(150, seed=2)]
    ask(whole, token_ids)
    (resumed,) = ask(parts, token_ids)
    assert cached([resumed]) == [100 + NUM_TOKENS - 1]
    kept = [_bytes(llm, token_ids) for llm in (whole, parts)]
    assert len(kept[0]) == 4
    assert torch.equal(*kept)


def _bytes(llm, token_ids) -> torch.Tensor:
    cache, pools = llm.llm_engine.scheduler.cache, llm.llm_engine.runner.pools
    pages = [node.page for node in cache.match(cache.chain(token_ids)).path.nodes]
    return pools.all_kv[pages].view(torch.uint8)


def test_logits_are_near_those_of_kv_that_is_not_rounded(tiny):
    exact = Tiny(tiny.folder, tiny.dtype)
    error = relative_error(tiny.logits(tokens(300)), exact.logits(tokens(300)))
    assert 1e-4 < error < 3e-2


# --- what checkpoints say -------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """A checkpoint, given scales and settings for KV."""

    def save(scales: dict[str, torch.Tensor], **scheme: object) -> Tiny:
        made = save_tiny(tmp_path, "qwen3_next", torch.float64, **THREE_LAYERS)
        path = tmp_path / "model.safetensors"
        prefix = "model.layers.2.self_attn."
        added = {f"{prefix}{name}": scale for name, scale in scales.items()}
        save_file(load_file(path) | added, path)
        if scheme:
            settings = tmp_path / "config.json"
            config = json.loads(settings.read_text())
            own = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
            settings.write_text(json.dumps(config | {"quantization_config": own}))
        return made

    return save


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    "names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")], ids=str
)
def test_scales_come_from_the_checkpoint(saved, names):
    """With one dimension or none; a model that is made for float8 needs no flag."""
    key, value = names
    tiny = saved({key: torch.tensor([0.5]), value: torch.tensor(0.25)}, **SCHEME)
    llm = tiny.open()
    pools, model = llm.llm_engine.runner.pools, llm.llm_engine.runner.executor.model
    assert pools.all_kv.dtype == FP8
    (scales,) = [each for name, each in model.named_parameters() if "kv_scales" in name]
    assert scales[:, 0].tolist() == [0.5, 0.25]
    tiny.options = FLOAT8
    tiny.check(ask(llm, tokens(100)))
    # Twice the number, for the same key.
    bare = saved({}).open(kv_cache_dtype="fp8_e4m3")
    ask(bare, tokens(100))
    keys = [_bytes(each, tokens(100)).view(FP8)[:, :, 0].double() for each in (llm, bare)]
    ratio = (keys[0] / keys[1]).nanmedian()
    assert ratio == 2


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_scale_that_is_none_is_refused(saved, scale):
    with pytest.raises(WeightsError, match=r"layers\.2\.self_attn\.k_scale' is .*; a scale is"):
        saved({"k_scale": torch.tensor([scale])}).open()


def test_what_is_not_supported_is_refused_by_name(saved):
    with pytest.raises(UnsupportedModelError, match="'num_bits': 4"):
        saved({}, **(SCHEME | {"num_bits": 4})).open()
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8_e5m2': use one of auto"):
        saved({}).open(kv_cache_dtype="fp8_e5m2")
    with pytest.raises(ConfigError, match="with a model in float64"):
        saved({}).open(kv_cache_dtype="bfloat16")


def test_keys_tell_types_of_kv_apart(tiny):
    """So no page is taken for one of another type, in whatever process."""
    roots = {
        llm.llm_engine.scheduler.cache.chain(tokens(100)).root
        for llm in (
            tiny.open(),
            tiny.open(),
            tiny.open(kv_cache_dtype="auto", cache_memory="split"),
        )
    }
    assert len(roots) == 2
