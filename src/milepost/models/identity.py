"""Identifies a model's KV and states with a digest that is the same in every process.

Keys of pages and checkpoints are chained from it, so that a key from another process stands for the
same bytes. The digest does not read gigabytes of weights: for each file that is loaded it reads the
header (names, shapes, dtypes and offsets of tensors), the size, some pieces of the data, and a
piece of each tensor; if experts are stored one by one, only the first expert's tensors. So if only
some weights were trained further, as when an adapter was merged into the attention layers only, the
model gets another identity.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path

from milepost.models.reading import Header
from milepost.models.weights import WeightFiles

LAYOUT_VERSION = 1
"""Version of the memory layout of pages and states; a changed layout gets a new number."""
IDENTITY_BYTES = 16
NUM_PIECES, PIECE_BYTES = 16, 4096
_EXPERT = re.compile(r"(?<=\.experts\.)\d+")


def identify(folder: Path, *, has_weights: bool, facts: Mapping[str, str | int]) -> bytes:
    """Returns the identity of a checkpoint that is run with `facts`: dtypes, page size and so on.

    Only files that are loaded count. Raises WeightsError for a broken one.
    """
    told = {"layout": LAYOUT_VERSION, **facts}
    digest = blake2b(digest_size=IDENTITY_BYTES, person=b"milepost model")
    digest.update(json.dumps(told, sort_keys=True).encode())
    digest.update(blake2b((folder / "config.json").read_bytes()).digest())
    for file, header in WeightFiles(folder).headers() if has_weights else ():
        digest.update(_fingerprint(file, header))
    return digest.digest()


def _fingerprint(file: Path, header: Header) -> bytes:
    size = file.stat().st_size
    digest = blake2b(file.name.encode() + size.to_bytes(8, "little"))
    digest.update(header.text)
    with file.open("rb") as data:
        for begin, end in _tensors(header):
            data.seek(max((begin + end - PIECE_BYTES) // 2, begin))
            digest.update(data.read(min(PIECE_BYTES, end - begin)))
        for piece in range(NUM_PIECES):
            data.seek((size - 1) * piece // NUM_PIECES)
            digest.update(data.read(PIECE_BYTES))
        data.seek(max(size - PIECE_BYTES, 0))
        digest.update(data.read())
    return digest.digest()


def _tensors(header: Header) -> Iterator[tuple[int, int]]:
    """Yields where each tensor begins and ends, ordered by name."""
    seen = set()
    for name in sorted(header.entries):
        kind = _EXPERT.sub("", name)
        if kind not in seen:
            seen.add(kind)
            yield header.bounds(name)
