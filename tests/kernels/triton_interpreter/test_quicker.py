"""The interpreter that the tests make faster (`quicker`) gives and refuses what Triton's does."""

from __future__ import annotations

import importlib.util
import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from triton.language import semantic
from triton.runtime import interpreter

core = interpreter.tl.core
TYPES = ["int1", "int8", "int32", "uint32", "fp8e5", "fp16", "bf16", "fp32"]
SHAPES = [(), (4, 1), (1, 2), (4, 2)]
NUMBERS = [0, 1, -3, 2**31, 2**70, 0.0, -0.0, 0.5, 1.0, float("nan"), float("inf"), True]
OPERATIONS = {
    "add": (True,),
    "sub": (True,),
    "mul": (False,),
    "truediv": (),
    "mod": (),
    "fdiv": (True,),
    "less_than": (),
    "and_": (),
    "binary_op_type_checking_impl": (),
}
"""Names of rules, and their further arguments."""


def tensors() -> list[Any]:
    draws = np.random.default_rng(0)
    dtypes = [core.dtype(name) for name in TYPES]
    kinds = itertools.product([*dtypes, core.pointer_type(core.float32)], SHAPES)
    made = []
    for dtype, shape in [*kinds, (core.int32, (2, 4, 2))]:
        data = draws.integers(0, 2, shape or (1,)).astype(interpreter._get_np_dtype(dtype))
        handle = interpreter.TensorHandle(data, dtype)
        made.append(core.tensor(handle, core.block_type(dtype, list(shape)) if shape else dtype))
    return made


def outcome(rules: Any, name: str, left: Any, right: Any) -> tuple[Any, ...]:
    """What an operation makes of two operands, or how it refuses them."""
    try:
        found = getattr(rules, name)(left, right, *OPERATIONS[name])
    except Exception as error:  # noqa: BLE001 - compared
        return type(error).__name__, str(error)
    return tuple(map(contents, found if isinstance(found, tuple) else [found]))


def contents(found: Any) -> tuple[Any, ...]:
    assert [size.value for size in found.shape] == list(found.type.shape if found.shape else ())
    data = found.handle.data
    return str(found.type), str(found.dtype), str(found.handle.dtype), data.shape, data.tobytes()


@pytest.fixture
def language():
    """The language as the interpreter has it while a kernel runs."""
    scope = interpreter._patch_lang(None)
    yield
    scope.restore()


@pytest.fixture(scope="module")
def theirs():
    """Triton's rules once more, without what is kept."""
    path = Path(semantic.__file__)
    spec = importlib.util.spec_from_file_location("triton.language.semantic_again", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TritonSemantic(interpreter.interpreter_builder)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_give_what_tritons_own_do(language, theirs, name):
    ours = interpreter.TritonSemantic(interpreter.interpreter_builder)
    kinds = set()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        operands = [*tensors(), *NUMBERS]
        for left, right in itertools.product(operands, operands):
            if not isinstance(left, core.tensor) and not isinstance(right, core.tensor):
                continue
            wanted = outcome(theirs, name, left, right)
            for _ in range(2):  # the second time from what was kept
                assert outcome(ours, name, left, right) == wanted, (left, right)
            kinds.add(wanted[0][0])
    assert len(kinds) > 3, "results and refusals of several kinds"


def test_types_are_equal_if_their_names_are():
    types = [core.dtype(name) for name in TYPES]
    for (name, one), (other, two) in itertools.product(zip(TYPES, types, strict=True), repeat=2):
        assert (one == two) is (name == other)
        assert (one == core.constexpr(two)) is (name == other)
    assert [one.is_int() for one in types] == ["int" in name for name in TYPES]
    assert core.int32 != "int32"


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_become_the_same_tensors(language, theirs, number):
    ours = interpreter.TritonSemantic(interpreter.interpreter_builder)

    def made(rules):
        try:
            found = rules.to_tensor(number)
        except ValueError as error:
            return str(error)
        return str(found.type), found.handle.data.dtype, found.handle.data.tobytes()

    assert made(ours) == made(theirs) == made(ours)


def test_a_kept_number_cannot_be_written_to(language):
    found = interpreter.TritonSemantic(interpreter.interpreter_builder).to_tensor(3)
    with pytest.raises(ValueError, match="read-only"):
        found.handle.data[0] = 4


def test_an_array_with_larger_elements_than_its_type_is_refused():
    for _ in range(2):
        with pytest.raises(ValueError, match="exceeds"):
            interpreter.TensorHandle(np.zeros(1, np.int64), core.int32)
    assert interpreter.TensorHandle(np.zeros(1, np.int32), core.int32).data.shape == (1,)
