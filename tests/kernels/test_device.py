"""Which kernels run where, and what is said of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from milepost.kernels.platform import device

GPU = torch.device("cuda", 0)


@pytest.fixture
def chip(monkeypatch) -> Iterator[object]:
    """Called with a compute capability, there is such a GPU."""
    device.probe.cache_clear()
    device.triton_version.cache_clear()

    def become(major: int, minor: int, hip: str | None = None, triton: str = "3.6.0") -> None:
        properties = SimpleNamespace(
            multi_processor_count=58,
            shared_memory_per_block_optin=99 << 10,
            gcnArchName="gfx942:sramecc+",
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, minor))
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(device, "version", lambda _: triton)

    yield become
    device.probe.cache_clear()
    device.triton_version.cache_clear()


def test_the_probe_says_what_the_driver_says(chip):
    chip(8, 9)
    found = device.probe(GPU)
    assert (found.arch, found.num_sms, found.shared_bytes) == ("sm_89", 58, 101376)
    assert not found.can_overlap
    assert not found.has_tma


def test_an_amd_chip_has_no_compute_capability(chip):
    chip(9, 4, hip="7.0")
    found = device.probe(GPU)
    assert (found.arch, found.capability) == ("gfx942", (0, 0))
    assert found.is_amd
    assert not found.can_overlap


@pytest.mark.parametrize("triton", ["3.6.0", "3.7.1", "3.8.0", "3.9.0"])
def test_kernels_for_hopper_run_with_every_triton_of_a_torch_we_allow(chip, triton):
    chip(9, 0, triton=triton)
    assert device.why_no_gluon(device.probe(GPU)) == ""
    assert "; those for Hopper; overlapping" in device.describe(GPU, torch.bfloat16)


def test_two_engines_may_differ_in_their_kernels(chip):
    """What one says holds around its own code, and in no other thread."""
    chip(9, 0)
    reasons = []

    def ask():
        reasons.append(device.why_no_gluon(device.probe(GPU)))

    with device.hopper_kernels(False):
        ask()
        with device.hopper_kernels(True):
            ask()
        other = threading.Thread(target=ask)
        other.start()
        other.join()
    ask()
    assert reasons == ["hopper_kernels is off", "", "", ""]


def test_what_does_not_run_is_said_with_its_reason(chip):
    chip(9, 0, triton="3.10.0")
    assert "not those for Hopper (they are tested with Triton 3.6 to 3.9)" in said()
    chip(9, 0)
    device.triton_version.cache_clear()
    with device.hopper_kernels(False):
        assert "not those for Hopper (hopper_kernels is off)" in said()
    device.probe.cache_clear()
    chip(8, 0)
    assert "fused for sm_80 (58 SMs, 99 KiB shared memory)" in said()
    assert "not those for Hopper (they need sm_90)" in said()
    assert "no overlapping launches (sm_90)" in said()
    device.probe.cache_clear()
    chip(7, 5)
    assert said() == "reference; the fused ones need sm_80, this is sm_75"
    assert "float64" in device.describe(GPU, torch.float64)
    assert "this is cpu" in device.describe(torch.device("cpu"), torch.float32)


def test_missing_triton_is_said(chip, monkeypatch):
    def missing(name: str) -> str:
        raise device.PackageNotFoundError(name)

    chip(9, 0)
    monkeypatch.setattr(device, "version", missing)
    assert "need triton" in said()


def said() -> str:
    return device.describe(GPU, torch.bfloat16)


def test_stages_are_as_many_as_there_is_room_for(chip):
    chip(8, 9)
    found = device.probe(GPU)
    assert found.choose_stages(4, 40 << 10) == 3
    assert found.choose_stages(4, 20 << 10) == 4
    assert found.choose_stages(4, 99 << 10) == 2
