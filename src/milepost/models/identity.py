"""What makes a model's KV and states its own: a digest that is the same in every process.

Keys of pages and checkpoints are chained from it, so that a key from outside this process stands
for the same bytes. It does not read gigabytes of weights: of each file that is loaded it takes the
header (names, shapes, types and offsets of tensors), the size, some pieces of the data, and a piece
of each tensor; of experts that lie one by one, that of the first. So weights of which only some
were trained further, as when an adapter was merged into the attention layers alone, are another
model's.
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
"""Of pages and states in memory. Another layout has another number."""
IDENTITY_BYTES = 16
NUM_PIECES, PIECE_BYTES = 16, 4096
_EXPERT = re.compile(r"(?<=\.experts\.)\d+")


def identify(folder: Path, *, has_weights: bool, facts: Mapping[str, str | int]) -> bytes:
    """The identity of a checkpoint that is run as `facts` say: types, page size and such.

    Of files those that are loaded; raises WeightsError for a broken one.
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
    """Where tensors begin and end, by the order of their names."""
    seen = set()
    for name in sorted(header.entries):
        kind = _EXPERT.sub("", name)
        if kind not in seen:
            seen.add(kind)
            yield header.bounds(name)
