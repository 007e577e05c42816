"""Makes Triton's interpreter faster without changing what it computes.

Most of its time goes into objects that are made again for each value (the type of a block, the
shape of a tensor, a table of NumPy's types, a constant as a block), and into rules of types that
are gone through again at each operation. They are kept here by what they are made of.
`test_quicker.py` compares results and refusals with those of Triton.
"""

from __future__ import annotations

import math
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any


def quicken(interpreter: ModuleType) -> None:
    """Patch the module `triton.runtime.interpreter`, and the language that it interprets."""
    _patch_the_language_once_a_launch(interpreter)
    _call_operations_directly(interpreter)
    _keep_types(interpreter.tl.core)
    _keep_numpy_types(interpreter)
    _compare_types_by_name(interpreter.tl.core)
    _check_sizes_by_name(interpreter)
    _broadcast_unequal_shapes_only(interpreter)
    _keep_constants(interpreter.tl.core, interpreter.TritonSemantic)
    _drop_unread_overflow_checks(interpreter.TritonSemantic)


def _patch_the_language_once_a_launch(interpreter: ModuleType) -> None:
    """Not at each call of a function: Triton looks through the whole language each time."""
    patch = interpreter._patch_lang
    language = SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core})
    running: list[Any] = []

    def patch_once(_: Any) -> Any:
        if running:
            return interpreter._LangPatchScope()
        scope = patch(language)
        restore = scope.restore

        def restored() -> None:
            running.clear()
            restore()

        scope.restore = restored
        running.append(scope)
        return scope

    interpreter._patch_lang = patch_once


def _keep_types(core: ModuleType) -> None:
    """A block's type and a tensor's shape are equal for all values of one shape."""
    make_block, blocks, shapes = core.block_type.__init__, {}, {}
    by_identity: dict[tuple[str, int], Any] = {}  # shapes that are kept, so that none takes its id

    def make_block_once(self: Any, element_ty: Any, shape: Any) -> None:
        known = by_identity.get((element_ty.name, id(shape)))
        if known is None:
            key = (element_ty.name, *shape)
            if (known := blocks.get(key)) is None:
                make_block(self, element_ty, shape)
                shared = shapes.setdefault(tuple(self.shape), self.shape)
                known = (shared, self.numel, self.name, *wrapped(tuple(shared)))
                blocks[key] = by_identity[element_ty.name, id(shared)] = known
        self.element_ty = element_ty
        self.shape, self.numel, self.name, self.constant_shape, self.constant_numel = known

    @cache
    def wrapped(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        shape = core.tuple([core.constexpr(size) for size in sizes])
        return shape, core.constexpr(math.prod(sizes))

    no_shape, one = wrapped(())

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if type.is_block():
            self.shape, self.numel = type.constant_shape, type.constant_numel
        else:
            self.shape, self.numel = no_shape, one

    core.block_type.__init__ = make_block_once
    core.tensor.__init__ = make_tensor


def _call_operations_directly(interpreter: ModuleType) -> None:
    """Triton passes an operation's arguments on through two functions."""

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = interpreter.TritonSemantic(builder)
        operation = getattr(member, "__wrapped__", member)

        def call(*given: Any, _semantic: Any = None, **named: Any) -> Any:
            return operation(*given, **named, _semantic=semantic)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch_attr


def _compare_types_by_name(core: ModuleType) -> None:
    equal, unwrap = core.dtype.__eq__, core._unwrap_if_constexpr
    integers = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)
    plain = {int, float, bool, type(None), core.tensor, core.dtype}

    def equal_by_name(self: Any, other: Any) -> bool:
        return self.name == other.name if type(other) is core.dtype else equal(self, other)

    def unwrap_constants(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    core.dtype.__eq__, core._unwrap_if_constexpr = equal_by_name, unwrap_constants
    core.dtype.is_int = lambda self: self.name in integers


def _check_sizes_by_name(interpreter: ModuleType) -> None:
    """An element of a NumPy array is no larger than its type; asked twice for each value."""
    make, fits, sizes = interpreter.TensorHandle.__init__, interpreter._validate_np_data_size, {}

    def is_known(data: Any, dtype: Any) -> bool:
        """Whether it fits by what has been found; False also for what has not been asked."""
        key = (dtype.name, data.itemsize)
        if (found := sizes.get(key)) is None:
            found = sizes[key] = fits(data, dtype)
        return found

    def make_quickly(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        if is_known(data, dtype):
            self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        else:
            make(self, data, dtype)  # refuses it

    interpreter.TensorHandle.__init__ = make_quickly
    interpreter._validate_np_data_size = is_known


def _broadcast_unequal_shapes_only(interpreter: ModuleType) -> None:
    """What two shapes become is asked once. A block type's shape is one object for all equal ones
    (`_keep_types`)."""
    semantic, core = interpreter.TritonSemantic, interpreter.tl.core
    broadcast = semantic.broadcast_impl_value
    known: dict[tuple[int, int], tuple[bool, bool, Any]] = {}

    def widened(self: Any, value: Any, shape: Any) -> Any:
        handle = self.builder.create_broadcast(value.handle, shape)
        return core.tensor(handle, core.block_type(value.dtype, shape))

    def broadcast_if_unequal(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if not (lhs.type.is_block() and rhs.type.is_block()):
            return broadcast(self, lhs, rhs)
        key = (id(lhs.type.shape), id(rhs.type.shape))
        if (found := known.get(key)) is None:
            left, right = broadcast(self, lhs, rhs)
            if len(lhs.shape) == len(rhs.shape):
                known[key] = (left is lhs, right is rhs, left.type.shape)
            return left, right
        keeps_left, keeps_right, shape = found
        return (
            lhs if keeps_left else widened(self, lhs, shape),
            rhs if keeps_right else widened(self, rhs, shape),
        )

    semantic.broadcast_impl_value = broadcast_if_unequal


def _keep_constants(core: ModuleType, semantic: type) -> None:
    """Numbers become tensors of the other operand's type and shape, and operands of one type stay
    as they are. Nothing writes to a tensor."""
    check, convert = semantic.binary_op_type_checking_impl, semantic.to_tensor
    numbers: dict[Any, Any] = {}
    halves = ("fp16", "bf16")

    def keep(key: Any, constant: Any) -> Any:
        constant.handle.data.flags.writeable = False
        numbers[key] = constant
        return constant

    def convert_once(self: Any, value: Any, check_type: bool = True) -> Any:
        kind = type(value)
        if kind is core.tensor:
            return value
        if (kind is not int and kind is not float) or value != value:
            return convert(self, value, check_type)
        found = numbers.get((kind, value))
        return keep((kind, value), convert(self, value)) if found is None else found

    def check_once(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> tuple[Any, Any]:
        left, right = type(lhs), type(rhs)
        if named:
            return check(self, lhs, rhs, *flags, **named)
        if left is right is core.tensor:
            name = lhs.dtype.name
            is_widened = len(flags) == 4 and name in halves  # division, as float32
            if name == rhs.dtype.name and type(lhs.dtype) is core.dtype and not is_widened:
                return self.broadcast_impl_value(lhs, rhs)
        elif left is core.tensor and (right is int or right is float):
            key = (right, rhs, lhs.type.name, flags)
            if (found := numbers.get(key)) is not None:
                return lhs, found
            same, constant = check(self, lhs, rhs, *flags)
            if same is lhs and rhs == rhs:
                keep(key, constant)
            return same, constant
        elif right is core.tensor and (left is int or left is float):
            key = (left, lhs, rhs.type.name, flags, "on the left")
            if (found := numbers.get(key)) is not None:
                return found, rhs
            constant, same = check(self, lhs, rhs, *flags)
            if same is rhs and lhs == lhs:
                keep(key, constant)
            return constant, same
        return check(self, lhs, rhs, *flags)

    semantic.to_tensor = convert_once
    semantic.binary_op_type_checking_impl = check_once


def _keep_numpy_types(interpreter: ModuleType) -> None:
    find, known = interpreter._get_np_dtype, {}

    def find_once(type: Any) -> Any:
        if (found := known.get(type.name)) is None:
            found = known[type.name] = find(type)
        return found

    interpreter._get_np_dtype = find_once


def _drop_unread_overflow_checks(semantic: type) -> None:
    """The interpreter adds in 64 bits whatever it adds in 32, and reads it only when debugging."""
    check = semantic.binary_op_sanitize_overflow_impl

    def check_if_read(self: Any, *given: Any) -> None:
        if self.builder.options.debug:
            check(self, *given)

    semantic.binary_op_sanitize_overflow_impl = check_if_read
