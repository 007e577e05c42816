"""Makes Triton's interpreter faster without changing what it computes.

Most of its time goes into objects that are made again for each value: the type of a block, the
shape of a tensor, a table of NumPy's types. They are kept here by what they are made of.
"""

from __future__ import annotations

import math
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any


def quicken(interpreter: ModuleType) -> None:
    """Patch the module `triton.runtime.interpreter`, and the language that it interprets."""
    _patch_the_language_once_a_launch(interpreter)
    _keep_types(interpreter.tl.core)
    _keep_numpy_types(interpreter)
    _broadcast_unequal_shapes_only(interpreter.TritonSemantic)
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

    def make_block_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if (known := blocks.get(key)) is None:
            make_block(self, element_ty, shape)
            shared = shapes.setdefault(tuple(self.shape), self.shape)
            known = blocks[key] = (shared, self.numel, self.name)
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known

    @cache
    def wrapped(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        shape = core.tuple([core.constexpr(size) for size in sizes])
        return shape, core.constexpr(math.prod(sizes))

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = wrapped(tuple(type.shape) if type.is_block() else ())

    core.block_type.__init__ = make_block_once
    core.tensor.__init__ = make_tensor


def _broadcast_unequal_shapes_only(semantic: type) -> None:
    broadcast = semantic.broadcast_impl_value

    def broadcast_if_unequal(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_if_unequal


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
