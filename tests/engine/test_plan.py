"""`milepost plan`: what fits is found without a GPU, by the code that sizes an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from milepost.cli.main import main
from milepost.cli.plan import read_size
from milepost.errors import ConfigError
from milepost.models.loading import LoadOptions, load_model, outline
from milepost.models.room import weigh
from milepost.runner.pool_sizes import OneMemory, TwoPools
from tests import forked
from tests.checkpoints import save

GIB = 2**30


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    pytest.importorskip("triton", reason="steps are laid out for kernels in triton")
    program = Path(__file__).with_name("plan_program.py")
    return json.loads(forked.run_script(program, compiles=True))


def test_a_meter_counts_memory_once_and_until_nobody_views_it(found):
    first, viewed, sum_, kept, nothing, peak = found["metered"]
    assert first == viewed == 4096  # 4,000 bytes, as the allocator rounds them
    assert sum_ == 2 * 4096
    assert kept == first, "a view keeps memory"
    assert nothing == 0
    assert peak == 3 * 4096, "a value that an expression needs meanwhile"


def test_four_bits_start_on_24_gib_with_chats_to_spare(found):
    for name in ("27b 24", "35b 24"):
        plan = found["plans"][name]
        assert not plan["refused"]
        assert plan["context"] >= 32_768
        assert plan["chats"] >= 4
        assert plan["tokens"] == 2048


def test_what_is_said_to_take_memory_is_all_of_it(found):
    for name in ("27b 24", "27b 141", "35b 24"):
        plan = found["plans"][name]
        # The rest is less than two units: one is rounded off, the zero slot's is in the cache.
        assert plan["gpu"] - 0.3 * GIB < plan["items"] <= plan["gpu"]


def test_steps_shrink_with_the_room_beside_the_weights(found):
    small, large = found["plans"]["27b 24"], found["plans"]["27b 141"]
    assert (small["tokens"], large["tokens"]) == (2048, 8192)
    assert (large["sequences"], small["sequences"]) == (64, 34)
    assert small["step"] + small["graphs"] < 0.6 * (large["step"] + large["graphs"])
    asked = found["plans"]["27b 24 large"]
    assert asked["tokens"] == 8192, "what is set is kept to"
    assert asked["cache"] < small["cache"]


def test_a_small_cache_on_a_large_gpu_leaves_steps_large(found):
    plan = found["plans"]["27b 141 2"]
    assert (plan["tokens"], plan["sequences"]) == (8192, 13)
    assert 1.8 * GIB < plan["cache"] <= 2 * GIB


def test_fp8_kv_holds_a_longer_context(found):
    plans = found["plans"]
    assert plans["27b 24 fp8"]["context"] > 1.9 * plans["27b 24"]["context"]
    assert plans["27b 24 fp8"]["step"] < 1.05 * plans["27b 24"]["step"], "a copy is limited"


def test_two_ranks_hold_half_the_weights_each(found):
    alone, both = found["plans"]["27b 24"], found["plans"]["27b 24 two"]
    assert abs(2 * both["weights"] / alone["weights"] - 1) < 0.01
    assert both["context"] == 262_144


def test_encoder_outputs_get_a_share_of_the_room_and_the_largest_image_fits(found):
    plans = {name[9:]: plan for name, plan in found["plans"].items() if "pictured" in name}
    tokens = {name: plan["encoded"] for name, plan in plans.items()}
    rooms = {
        name: int((0.9 * plan["gpu"] - plan["weights"]) / 8192) for name, plan in plans.items()
    }
    largest = 16_384
    assert tokens["141"] == rooms["141"] // 64 > 2 * largest
    assert tokens["24"] == 2 * largest, "two images take less than a 16th"
    assert tokens["22"] == rooms["22"] // 16 < 2 * largest
    assert tokens["20"] == largest, "one always fits"
    assert tokens["24 small"] == rooms["24 small"] // 64, "two images of 1024 take less"
    assert tokens["24 set"] == 1000
    assert tokens["24 without"] is None
    for name, plan in plans.items():
        assert plan["encoded bytes"] == 8192 * (tokens[name] or 0)


def test_what_does_not_fit_says_what_is_missing(found):
    assert "GiB are missing" in found["plans"]["27b 16"]["refused"]
    assert found["plans"]["27b 16"]["context"] == 0
    assert "max_model_len=200000: the cache holds" in found["plans"]["27b 24 long"]["refused"]


def test_settings_that_help_are_those_that_are_not_set_yet(found):
    assert found["changes"] == [
        "--kv-cache-dtype fp8",
        "--gpu-memory-utilization 0.95",
        "-tp 2",
    ]


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_weights_are_weighed_once_each(name, tmp_path):
    save(name, tmp_path)
    model, _ = outline(tmp_path, LoadOptions(dtype="float32"))
    weights = weigh(model)
    loaded, _ = load_model(tmp_path, LoadOptions(dtype="float32"))
    assert sum(weights.values()) == sum(each.nbytes for each in loaded.parameters())
    assert {"embedding", "attention", "recurrences"} <= {part for part, _ in weights}
    assert {form for _, form in weights} == {"float32"}


def test_sequences_share_what_units_hold():
    one = OneMemory(num_units=20, pages_each=49, unit_bytes=1)
    assert one.num_sequences(49) == 10
    assert one.num_sequences(98) == 6
    assert one.num_sequences(0) == 20
    two = TwoPools(num_pages=100, num_slots=8)
    assert (two.num_sequences(50), two.num_sequences(1), two.num_sequences(0)) == (2, 8, 8)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("24GiB", 24 * GIB), ("24", 24 * GIB), ("80GB", 80 * 10**9), (" 1.5 GiB", 3 * GIB // 2)],
)
def test_sizes_are_read(text, num_bytes):
    assert read_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "24 apples", "-1", "0", "1e3GiB", "9" * 400])
def test_other_sizes_are_refused_by_name(text):
    with pytest.raises(ConfigError, match=f"--gpu-memory {text}: use a size such as 24GiB"):
        read_size(text)


def test_a_chip_that_nobody_knows_is_refused(capsys):
    words = ["plan", "--gpu-memory", "24GiB", "--chip", "sm_75"]
    assert main(words) == 2
    assert "--chip sm_75: this is none of sm_80" in capsys.readouterr().err
