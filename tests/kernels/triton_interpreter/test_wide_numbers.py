"""PTX that widens numbers of four bits, run instruction by instruction: no interpreter has it."""

from __future__ import annotations

import re
import struct
from functools import partial

import pytest

from milepost.kernels.products.portable import four_bits

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
WIDENED = {
    "integers": (
        partial(four_bits.integer_ptx, power="0x43000000", is_wide=True),
        lambda q: 128.0 + q,
    ),
    "e2m1": (
        partial(four_bits.float_ptx, is_wide=True),
        lambda q: (E2M1[q] if q < 8 else -E2M1[q - 8]) * 2.0**-126,
    ),
}


def run(code: str, source: int) -> list[float]:
    """Returns the float32 outputs $0 to $3 of PTX for the input $4."""
    registers = {"$4": source}
    for line in re.sub(r"[{}]", "", code).split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, _, operands = line.strip().partition(" ")
        target, *given = (each.strip() for each in operands.split(","))
        values = [registers[each] if each in registers else int(each, 0) for each in given]
        registers[target] = OPERATIONS[name](*values) & 0xFFFFFFFF
    return [struct.unpack("f", struct.pack("I", registers[f"${i}"]))[0] for i in range(4)]


def permute(low: int, high: int, places: int) -> int:
    """PTX's prmt: each four bits name one of eight bytes, and ask for no sign here."""
    assert not places & 0x8888
    chosen = [(low | high << 32) >> 8 * (places >> 4 * i & 7) & 255 for i in range(4)]
    return sum(byte << 8 * i for i, byte in enumerate(chosen))


OPERATIONS = {
    "mov.b32": lambda value: value,
    "and.b32": lambda left, right: left & right,
    "shl.b32": lambda value, count: value << count,
    "shr.u32": lambda value, count: value >> count,
    "mul.lo.u32": lambda left, right: left * right,
    "prmt.b32": permute,
}


@pytest.mark.parametrize("name", WIDENED)
def test_every_byte_is_widened_in_its_place(name: str) -> None:
    ptx, number = WIDENED[name]
    for first in range(256):
        places = [first, 255 - first, first ^ 0x5A, (7 * first) & 255]
        source = sum(byte << 8 * i for i, byte in enumerate(places))
        assert run(ptx(0), source) == [number(byte & 15) for byte in places]
        assert run(ptx(1), source) == [number(byte >> 4) for byte in places]
