"""Steps with pictures on the fused kernels: the answers of the reference ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from milepost.kernels import vision
from milepost.kernels.vision import attention, triton
from milepost.models import Decoder, LoadOptions, load_model
from milepost.runner.device import DeviceExecutor
from milepost.runner.graphs import Graphs, largest_step
from milepost.runner.pools import Pools
from milepost.runner.runner import Executor
from tests.numbers import relative_error
from tests.pictured import SETTINGS, image, prompt, save
from tests.runner.pictured import give, open_runner, run


def test_steps_with_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that cuts a picture, and text behind it, which a graph may hold."""
    save("qwen3_5", tmp_path)
    given = prompt(3, image(2, 3, 1), 2, image(1, 2, 2), 4)
    edges = [0, 7, len(given.token_ids) - 1, len(given.token_ids)]
    searched = []
    find = Graphs.find
    monkeypatch.setattr(Graphs, "find", lambda *how: searched.append(1) or find(*how))

    def fused(model: Decoder, pools: Pools) -> Executor:
        largest = largest_step(max_num_seqs=4, max_num_batched_tokens=64)
        sizes = {"num_requests": 4, "max_model_len": 256, "largest": largest}
        return DeviceExecutor(model, pools, **sizes, image_settings=SETTINGS)

    model = load_model(tmp_path, LoadOptions(has_tower=True))[0]
    plain = open_runner(model)
    give(plain, given)
    expected = run(plain, given, edges)
    monkeypatch.setattr(vision, "attend", attention.attend)
    for name in ("normalise", "add_positions", "add_norm"):
        monkeypatch.setattr(vision, name, getattr(triton, name))
    own = open_runner(model, fused)
    give(own, given)
    assert relative_error(run(own, given, edges), expected) < 1e-4
    assert len(searched) == 1, "only the step without pictures may be a graph"
