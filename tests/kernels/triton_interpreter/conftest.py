"""Triton's interpreter runs the kernels on a CPU (tests/conftest.py chooses it before triton is
imported). On a machine with a GPU they run there, in tests/gpu.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

if torch.cuda.is_available():
    collect_ignore_glob = ["*.py"]
else:
    interpreter = pytest.importorskip(
        "triton.runtime.interpreter", reason="the Triton kernels need the package triton"
    )
    _patch, _patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    _LANGUAGE = SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core})
    _patched: list[Any] = []
    """The scope of the launch that runs, if one does."""

    def _patch_lang_tensor(tensor, scope):
        """Loop bounds are arrays of one number, which NumPy 2.4 no longer takes for a number."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def _patch_lang(_):
        """Patch the language once a launch, for all functions that its kernel calls: Triton looks
        through all of it again at each call of one, which takes a quarter of the time."""
        if _patched:
            return interpreter._LangPatchScope()
        scope = _patch_language(_LANGUAGE)
        restore = scope.restore

        def restored() -> None:
            _patched.clear()
            restore()

        scope.restore = restored
        _patched.append(scope)
        return scope

    interpreter._patch_lang_tensor = _patch_lang_tensor
    interpreter._patch_lang = _patch_lang
