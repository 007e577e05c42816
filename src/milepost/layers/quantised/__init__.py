"""Quantised weight forms, as checkpoints have them: FP8, int8 and four bits."""

from milepost.layers.quantised.eight_bits import Fp8Precision, Int8Precision
from milepost.layers.quantised.fp4 import Fp4Precision
from milepost.layers.quantised.int4 import Int4Precision

__all__ = ["Fp4Precision", "Fp8Precision", "Int4Precision", "Int8Precision"]
