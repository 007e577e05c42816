"""What becomes of kernels that do not run on a chip."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from milepost import LLM
from milepost.engine.assembly import fitting
from milepost.errors import KernelError
from milepost.kernels.platform.device import Chip
from milepost.runner.plain import PlainExecutor

L4 = Chip(arch="sm_89", capability=(8, 9), is_amd=False, num_sms=58, shared_bytes=99 << 10)


@pytest.mark.parametrize(("asked", "is_refused"), [(99 << 10, False), ((99 << 10) + 1, True)])
def test_a_kernel_that_asks_for_too_much_is_named(asked: int, is_refused: bool) -> None:
    compiling = pytest.importorskip("milepost.runner.compiling", exc_type=ImportError)
    future: Future[object] = Future()
    future.set_result(SimpleNamespace(name="solve", metadata=SimpleNamespace(shared=asked)))
    complaint = compiling._complain(future, L4)
    assert bool(complaint) == is_refused
    if is_refused:
        assert "solve asks for 101377 bytes of shared memory, there are 101376" in complaint


def test_a_kernel_that_does_not_compile_is_told_of() -> None:
    compiling = pytest.importorskip("milepost.runner.compiling", exc_type=ImportError)
    future: Future[object] = Future()
    future.set_exception(RuntimeError("ptxas fatal\nnot on sm_80"))
    assert compiling._complain(future, L4) == "RuntimeError: not on sm_80"


def test_an_engine_whose_kernels_do_not_run_takes_the_reference(monkeypatch, caplog) -> None:
    def refuse(*_: object) -> int:
        raise KernelError("solve asks for too much")

    monkeypatch.setattr(fitting, "_announce_kernels", lambda *_: True)
    monkeypatch.setattr(fitting, "rehearsal", refuse)
    llm = LLM(device="cpu", cpu_cache_gib=0.05)
    assert isinstance(llm.llm_engine.runner.executor, PlainExecutor)
    assert "kernels: reference, many times slower; of the fused ones solve asks" in caplog.text


def test_kernels_that_are_imported_while_others_compile_know_tritons_launch() -> None:
    """A launch is remembered only if it is Triton's own: kernels are imported when they first run,
    so an engine's start imported them while launches were replaced, and none was remembered."""
    pytest.importorskip("triton")
    program = """
from triton.runtime.jit import JITFunction
own = JITFunction.run
from milepost.kernels.platform.device import Chip
from milepost.runner.compiling import compiling_only
chip = Chip(arch="sm_89", capability=(8, 9), is_amd=False, num_sms=58, shared_bytes=99 << 10)
with compiling_only(chip):
    from milepost.kernels.platform import launches
    assert JITFunction.run is not own
assert JITFunction.run is launches.ORDINARY is own
"""
    subprocess.run([sys.executable, "-c", program], check=True)
