"""`overlap` for kernels in Gluon, which run on Hopper alone."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def launch_dependents():
    _control("griddepcontrol.launch_dependents; // $0")


@gluon.jit
def wait_for_inputs():
    _control("griddepcontrol.wait; // $0")


@gluon.jit
def wait_as_padding():
    if gl.program_id(0) + gl.program_id(1) + gl.program_id(2) == 0:
        wait_for_inputs()


@gluon.jit
def _control(instruction: gl.constexpr):
    gl.inline_asm_elementwise(instruction, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
