"""Triton's interpreter runs the kernels on a CPU; it must be chosen before triton is imported."""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="the Triton kernels need the package triton")
