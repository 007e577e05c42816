"""Triton's interpreter runs the kernels on a CPU (tests/conftest.py chooses it before triton is
imported). On a machine with a GPU they run there, in tests/gpu.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_interpreter.quicker import quicken

if torch.cuda.is_available():
    collect_ignore_glob = ["*.py"]
else:
    interpreter = pytest.importorskip(
        "triton.runtime.interpreter", reason="the Triton kernels need the package triton"
    )
    _patch = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor, scope):
        """Loop bounds are arrays of one number, which NumPy 2.4 no longer takes for a number."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_lang_tensor
    quicken(interpreter)
