"""An interpolated Kneser-Ney 5-gram model over tokens: the yardstick beside Milepost-tiny.

Counts are sorted arrays of n-grams written as numbers in base V (6144^5 fits into 63 bits), so
training and scoring are a few sorts and binary searches. One discount an order, n1 / (n1 + 2 n2)
(Ney et al. 1994).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ORDER = 5


@dataclass(slots=True)
class Table:
    """Counts of one order: n-grams and contexts, each sorted."""

    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    followers: np.ndarray
    discount: float


def _grams(tokens: np.ndarray, order: int, base: int) -> np.ndarray:
    """Number of the n-gram that ends at each token from `order - 1` on."""
    number = np.zeros(len(tokens) - order + 1, dtype=np.int64)
    for offset in range(order):
        number = number * base + tokens[offset : len(tokens) - order + 1 + offset]
    return number


def _table(grams: np.ndarray, counts: np.ndarray, base: int) -> Table:
    contexts, first = np.unique(grams // base, return_index=True)
    ones, twos = (counts == 1).sum(), (counts == 2).sum()
    return Table(
        grams,
        counts,
        contexts,
        np.add.reduceat(counts, first),
        np.diff(np.append(first, len(grams))),
        float(ones / (ones + 2 * twos)),
    )


def train(tokens: np.ndarray, base: int) -> list[Table]:
    """Tables of order 1 to 5; all but the highest count the distinct tokens that come before."""
    tokens = tokens.astype(np.int64)
    grams, counts = np.unique(_grams(tokens, ORDER, base), return_counts=True)
    tables = [_table(grams, counts, base)]
    for order in range(ORDER - 1, 0, -1):
        grams, counts = np.unique(grams % base**order, return_counts=True)
        tables.append(_table(grams, counts, base))
    return tables[::-1]


def _find(keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return place, keys[place] == wanted


def bits(tables: list[Table], tokens: np.ndarray, base: int) -> float:
    """Bits that the model needs for tokens[4:], each after the four before it."""
    tokens = tokens.astype(np.int64)
    chance = np.full(len(tokens) - ORDER + 1, 1.0 / base)
    for order, table in enumerate(tables, 1):
        wanted = _grams(tokens, order, base)[ORDER - order :]
        place, known = _find(table.grams, wanted)
        count = np.where(known, table.counts[place], 0)
        place, known = _find(table.contexts, wanted // base)
        total = np.where(known, table.totals[place], 1)
        share = np.maximum(count - table.discount, 0) / total
        rest = np.where(known, table.discount * table.followers[place] / total, 1.0)
        chance = share + rest * chance
    return float(-np.log2(chance).sum())
