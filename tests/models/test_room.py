"""A model that does not fit its device is refused before any of it is loaded."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from milepost.errors import ConfigError
from milepost.layers.parameters import ModuleScope
from milepost.models import LoadOptions, load_model, loading, room
from tests.checkpoints import save
from tests.quantised import write


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("room")
    save("qwen3_5_moe", folder)
    return folder


def test_weights_that_do_not_fit_are_refused_before_they_are_read(checkpoint, monkeypatch):
    needed = load_model(checkpoint)[0].num_bytes
    monkeypatch.setattr(room, "available_bytes", lambda _device: needed - 1)
    monkeypatch.setattr(loading, "fill_from_files", pytest.fail)
    with pytest.raises(ConfigError, match=r"GiB in float32 and cpu has .* are missing.*bfloat16"):
        load_model(checkpoint)
    with pytest.raises(ConfigError, match="GiB are missing"):
        load_model(checkpoint, LoadOptions(load_format="dummy"))


def test_weights_that_just_fit_are_loaded(checkpoint, monkeypatch):
    needed = load_model(checkpoint)[0].num_bytes
    monkeypatch.setattr(room, "available_bytes", lambda _device: needed)
    load_model(checkpoint)
    # In half the type they take half, but for the small ones that stay precise.
    monkeypatch.setattr(room, "available_bytes", lambda _device: int(needed * 0.51))
    model = load_model(checkpoint, LoadOptions(dtype=torch.bfloat16))[0]
    assert model.num_bytes <= needed * 0.51


@pytest.mark.parametrize("changes", [{"quantization": "fp8"}, {"dtype": torch.bfloat16}, {}])
def test_what_is_known_before_is_what_is_taken(checkpoint, monkeypatch, changes):
    """Also of weights that are rounded on the way; to the byte."""
    needed = load_model(checkpoint, LoadOptions(**changes))[0].num_bytes
    monkeypatch.setattr(room, "available_bytes", lambda _device: needed)
    load_model(checkpoint, LoadOptions(**changes))
    monkeypatch.setattr(room, "available_bytes", lambda _device: needed - 1)
    with pytest.raises(ConfigError, match="GiB are missing"):
        load_model(checkpoint, LoadOptions(**changes))


def test_tied_weights_count_once(tmp_path, monkeypatch):
    save("qwen3_5", tmp_path, tie_word_embeddings=True)
    model = load_model(tmp_path)[0]
    monkeypatch.setattr(room, "available_bytes", lambda _device: model.num_bytes)
    load_model(tmp_path)
    held = {each.untyped_storage().data_ptr(): each.nbytes for each in model.parameters()}
    assert model.num_bytes == sum(held.values())


@pytest.mark.parametrize(
    ("dtype", "needed", "words"),
    [
        (torch.bfloat16, 150, r"quantization='fp8' halves .*tensor_parallel_size=2 spreads"),
        (torch.bfloat16, 400, "tensor_parallel_size=4 spreads them over as many such GPUs"),
        (torch.float32, 150, "dtype='bfloat16' halves"),
    ],
)
def test_what_would_help_on_a_gpu_is_named(monkeypatch, dtype, needed, words):
    kind = ModuleScope(dtype=dtype, device=torch.device("cuda"))
    outline = SimpleNamespace(num_bytes=needed * room.GIB, host_bytes=0)
    monkeypatch.setattr(room, "available_bytes", lambda _device: 139 * room.GIB)
    with pytest.raises(ConfigError, match=words) as refused:
        room.check_room(outline, kind, is_quantised=False)
    assert f"{needed - 139}.0 GiB are missing" in str(refused.value)


def test_a_quantised_checkpoint_is_not_advised_to_be_quantised(tmp_path, monkeypatch):
    stored, _ = write("qwen3_5", tmp_path, "fp8-blocks")
    monkeypatch.setattr(room, "available_bytes", lambda _device: 1)
    with pytest.raises(ConfigError, match="GiB as they are quantised and cpu has") as refused:
        load_model(stored, LoadOptions(dtype=torch.bfloat16))
    assert "halves" not in str(refused.value)


def test_free_memory_of_a_cpu_is_what_the_system_says(tmp_path, monkeypatch):
    said = tmp_path / "meminfo"
    said.write_text("MemTotal:  9 kB\nMemFree:  1 kB\nMemAvailable:   7 kB\n")
    monkeypatch.setattr(room, "_MEMINFO", said)
    assert room.available_bytes(torch.device("cpu")) == 7 * 1024
    monkeypatch.setattr(room, "_MEMINFO", tmp_path / "none")
    assert room.available_bytes(torch.device("cpu")) is None


def test_what_nobody_holds_any_more_is_freed_before_a_model_is_refused(checkpoint, monkeypatch):
    """An engine that is gone for its user may lie in cycles, with all of its memory."""
    needed = load_model(checkpoint)[0].num_bytes
    gone = threading.Event()
    gone.itself = gone
    known = weakref.ref(gone)
    monkeypatch.setattr(room, "available_bytes", lambda _device: needed - (known() is not None))
    gc.disable()
    try:
        del gone
        assert known() is not None
        load_model(checkpoint)
    finally:
        gc.enable()
