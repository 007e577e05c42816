"""Launches that are remembered: never one kernel for two that Triton would compile apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from milepost.kernels.platform import launches
from milepost.kernels.platform.launches import describe, quick


class OnDevice(torch.Tensor):
    """A tensor of the host that says it is on a GPU."""

    is_cuda = True


class Pair(NamedTuple):
    """Two arguments as one."""

    one: Any
    other: Any


@JITFunction  # which tests elsewhere have interpreted
def _kernel(first, second, third, SIZE: tl.constexpr, GATED: tl.constexpr = False):  # noqa: N803
    tl.store(first, tl.load(second) + third * SIZE)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A device of its own, whose launches are noted: `asked` of Triton, `done` by what it
    compiled."""
    asked: list[dict[str, Any]] = []
    done: list[tuple[Any, ...]] = []
    state = SimpleNamespace(asked=asked, done=done, device=0)

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        asked.append({"args": args, "grid": grid, "warmup": warmup, **options})
        number = len(asked)
        return SimpleNamespace(
            run=lambda *given: done.append((number, *given)), function=7, packed_metadata=(4, 1, 0)
        )

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(launches, "ORDINARY", run)
    monkeypatch.setattr(launches, "_TENSORS", (OnDevice, torch.Tensor))
    monkeypatch.setattr(launches, "_TAKES_TUPLES", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.device)
    monkeypatch.setattr(launches, "_current_stream", lambda device: 100 + device)
    return state


@pytest.fixture
def kernel() -> Iterator[Any]:
    marked = quick(_kernel)
    yield marked
    del marked.run


def _tensor(dtype: torch.dtype = torch.bfloat16, offset: int = 0) -> torch.Tensor:
    return torch.zeros(64, dtype=dtype)[offset:].as_subclass(OnDevice)


def test_launch_like_an_earlier_one_skips_triton(gpu: SimpleNamespace, kernel: Any) -> None:
    out, inputs, other = _tensor(), _tensor(), _tensor()
    kernel[(2, 3)](out, inputs, 5, SIZE=4, num_warps=8)
    kernel[(7,)](other, inputs, 6, SIZE=4, num_warps=8)
    assert len(gpu.asked) == 1
    arguments = other.data_ptr(), inputs.data_ptr(), 6, 4, False
    assert gpu.done == [(1, 7, 1, 1, 100, 7, (4, 1, 0), None, None, None, *arguments)]


def test_fields_of_an_argument_become_addresses(gpu: SimpleNamespace, kernel: Any) -> None:
    pairs = [Pair(_tensor(), 5), Pair(_tensor(), 7), Pair(_tensor(torch.float16), 7)]
    for pair in pairs:
        kernel[(1,)](_tensor(), pair, 5, SIZE=4)
    assert len(gpu.asked) == 2
    assert gpu.done[0][11] == (pairs[1].one.data_ptr(), 7)


def test_fields_are_left_to_a_triton_whose_launcher_was_not_read(
    gpu: SimpleNamespace, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "_TAKES_TUPLES", False)
    for _ in range(2):
        kernel[(1,)](_tensor(), Pair(_tensor(), 5), 5, SIZE=4)
    assert len(gpu.asked) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"first": lambda: _tensor(torch.float16)},
        {"first": lambda: _tensor(offset=1)},
        {"first": lambda: None},
        {"third": lambda: 1},
        {"third": lambda: 16},
        {"third": lambda: 1 << 31},
        {"third": lambda: 1 << 35},
        {"third": lambda: 1 << 63},
        {"third": lambda: True},
        {"third": lambda: 5.0},
        {"SIZE": lambda: 8},
        {"SIZE": lambda: True},
        {"SIZE": lambda: (1,)},
        {"GATED": lambda: True},
        {"num_warps": lambda: 8},
        {"launch_pdl": lambda: True},
    ],
    ids=lambda change: str(next(iter(change))),
)
def test_what_triton_tells_apart_is_asked_again(
    change: dict[str, Callable[[], Any]], gpu: SimpleNamespace, kernel: Any
) -> None:
    usual = {"first": _tensor(), "second": _tensor(), "third": 5, "SIZE": 1}
    changed = usual | {name: make() for name, make in change.items()}
    for call in (usual, changed, usual, changed):
        args = [call[name] for name in ("first", "second", "third")]
        options = {name: value for name, value in call.items() if name not in usual}
        kernel[(1,)](*args, SIZE=call["SIZE"], **options)
    assert len(gpu.asked) == 2
    assert [number for number, *_ in gpu.done] == [1, 2]


def test_types_inside_a_constant_tell_launches_apart(gpu: SimpleNamespace, kernel: Any) -> None:
    for size in (Pair(1, 2), Pair(True, 2), Pair(1, 2), (1, 2)):
        kernel[(1,)](_tensor(), _tensor(), 5, SIZE=size)
    assert len(gpu.asked) == 3


def test_constant_before_an_argument_leaves_a_kernel_as_it_was() -> None:
    """What follows the arguments would be launched in the wrong order."""

    @JITFunction
    def mixed(first, SIZE: tl.constexpr, second):  # noqa: N803
        tl.store(first, second * SIZE)

    assert "run" not in vars(quick(mixed))


def test_other_device_is_asked_again(gpu: SimpleNamespace, kernel: Any) -> None:
    for gpu.device in (0, 1, 0, 1):
        kernel[(1,)](_tensor(), _tensor(), 5, SIZE=4)
    assert [number for number, *_ in gpu.done] == [1, 2]
    assert [given[4] for given in gpu.done] == [100, 101]


def test_tensor_of_the_host_is_left_to_triton(gpu: SimpleNamespace, kernel: Any) -> None:
    inputs = torch.zeros(4)
    kernel[(1,)](_tensor(), _tensor(inputs.dtype), 5, SIZE=4)
    kernel[(1,)](_tensor(), inputs, 5, SIZE=4)
    assert gpu.asked[1]["args"][1] is inputs
    assert not gpu.done


def test_argument_by_name_is_left_to_triton(gpu: SimpleNamespace, kernel: Any) -> None:
    for _ in range(2):
        kernel[(1,)](_tensor(), second=_tensor(), third=5, SIZE=4)
    assert len(gpu.asked) == 2


def test_warm_up_compiles_and_is_not_remembered(gpu: SimpleNamespace, kernel: Any) -> None:
    tensors = _tensor(), _tensor()
    kernel.run(*tensors, 5, SIZE=4, grid=(1,), warmup=True)
    kernel[(1,)](*tensors, 5, SIZE=4)
    kernel.run(*tensors, 5, SIZE=4, grid=(1,), warmup=True)
    assert [asked["warmup"] for asked in gpu.asked] == [True, False, True]
    assert not gpu.done


def test_launches_that_are_watched_are_tritons_own(
    gpu: SimpleNamespace, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = lambda: kernel[(1,)](_tensor(), _tensor(), 5, SIZE=4)  # noqa: E731
    launch()
    seen: list[Any] = []
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [seen.append])
    launch()
    monkeypatch.undo()
    assert len(gpu.asked) == 2


def test_replaced_launch_sees_every_launch(
    gpu: SimpleNamespace, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = lambda: kernel[(1,)](_tensor(), _tensor(), 5, SIZE=4)  # noqa: E731
    launch()
    noted: list[Any] = []
    monkeypatch.setattr(JITFunction, "run", lambda *args, **_: noted.append(args))
    launch()
    assert len(noted) == 1
    assert not gpu.done


def test_what_did_not_run_is_not_remembered(
    gpu: SimpleNamespace, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tensors without memory nothing is compiled."""
    calls: list[int] = []
    run = lambda *_args, **_options: calls.append(1)  # noqa: E731
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(launches, "ORDINARY", run)
    for _ in range(2):
        kernel[(1,)](_tensor(), _tensor(), 5, SIZE=4)
    assert len(calls) == 2


_INTS = st.one_of(
    st.integers(-4, 40),
    st.sampled_from([1 << n for n in (30, 31, 32, 62, 63)]).flatmap(
        lambda middle: st.integers(middle - 17, middle + 17)
    ),
    st.integers(-(1 << 31) - 17, -(1 << 31) + 17),
    st.integers(-(1 << 63), -(1 << 63) + 17),
)
_DTYPES = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.float8_e4m3fn]
)
_TENSORS = st.builds(lambda dtype, offset: _tensor(dtype, offset), _DTYPES, st.integers(0, 33))


@st.composite
def _boxes(draw: st.DrawFn) -> TensorDescriptor:
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32, torch.int32]))
    base = torch.zeros(draw(st.sampled_from([(16, 32), (2, 8, 32)])), dtype=dtype)
    box = [1] * (base.dim() - 2) + draw(st.sampled_from([[4, 16], [8, 16], [8, 32]]))
    padding = draw(st.sampled_from(["zero", "nan"])) if dtype.is_floating_point else "zero"
    return TensorDescriptor.from_tensor(base.as_subclass(OnDevice), box, padding)


_SIMPLE = st.one_of(_INTS, _TENSORS, st.floats(), st.booleans(), st.none())
_ARGUMENTS = st.one_of(_SIMPLE, _boxes(), st.builds(Pair, _SIMPLE, _SIMPLE))


def _box(shape: tuple[int, ...], *box: int, dtype: torch.dtype = torch.int32) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(torch.zeros(shape, dtype=dtype).as_subclass(OnDevice), box)


_FEW = 16, 32


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_tensor(), _tensor(offset=4)),
        (_tensor(), _tensor(torch.float16)),
        (_box(_FEW, 4, 16), _box(_FEW, 8, 16)),
        (_box(_FEW, 4, 16), _box(_FEW, 4, 16, dtype=torch.int64)),
        (_box(_FEW, 4, 16), _box((2, 16, 32), 1, 4, 16)),
        (1, 2),
        (2, 16),
        (1, True),
        (1, 1.0),
        ((1 << 31) - 1, (1 << 31) + 1),
        ((1 << 63) - 1, (1 << 63) + 1),
        (-(1 << 31), -(1 << 31) - 16),
        (0, None),
        (Pair(1, 5), Pair(5, 1)),
    ],
    ids=[
        "alignment",
        "dtype",
        "box",
        "box dtype",
        "rank",
        "one",
        "divisible",
        "bool",
        "float",
        "int32",
        "uint64",
        "negative",
        "none",
        "fields",
    ],
)
def test_kinds_that_triton_compiles_apart_differ(one: Any, other: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "_TENSORS", (OnDevice,))
        patch.setattr(launches, "_TAKES_TUPLES", True)
        assert _kind((one, 5)) != _kind((other, 5))
    assert _by_triton((one, 5)) != _by_triton((other, 5)), "or the case says nothing"


def test_descriptor_of_the_host_is_left_to_triton() -> None:
    descriptor = TensorDescriptor.from_tensor(torch.zeros(_FEW), [4, 16])
    assert describe((descriptor,)) is None


@given(first=st.tuples(_ARGUMENTS, _ARGUMENTS), second=st.tuples(_ARGUMENTS, _ARGUMENTS))
def test_kind_is_no_coarser_than_tritons(first: tuple[Any, Any], second: tuple[Any, Any]) -> None:
    """Beside Triton's own specialisation, as its launches compute it on NVIDIA's chips."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "_TENSORS", (OnDevice,))
        patch.setattr(launches, "_TAKES_TUPLES", True)
        kinds = [_kind(call) for call in (first, second)]
    if kinds[0] == kinds[1]:
        assert _by_triton(first) == _by_triton(second)
    elif all(type(value) is int for value in (*first, *second)):
        assert _by_triton(first) != _by_triton(second), "nothing is asked twice"


def _kind(call: tuple[Any, Any]) -> Any:
    described = describe(call)
    assert described is not None
    return described[0]


@JITFunction
def _two(first, second):
    tl.store(first, second)


def _by_triton(call: tuple[Any, Any]) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(_two.signature, _two.params, backend)
    return bind(*call)[1]
