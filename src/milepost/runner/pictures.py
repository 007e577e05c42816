"""Pictures on the device: pixels that wait to be encoded, and embeddings that steps read.

Which of them are kept is decided by plans alone (`StepPlan.encodes`, `StepPlan.drops`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from milepost.images import ImageSettings, normalisation
from milepost.layers.context import PictureRows
from milepost.layers.tower import Tower
from milepost.models.decoder import Decoder
from milepost.runner.positions import PicturePart, parts
from milepost.scheduler.plans import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PicturePixels:
    """A picture to encode."""

    rows: NDArray[np.uint8]
    """[patches, bytes], as `images.prepare` makes them."""
    grid: tuple[int, int, int]


class EncodedPictures:
    """Encodes pictures with a model's tower, and keeps the embeddings by identity."""

    def __init__(self, tower: Tower, settings: ImageSettings) -> None:
        self._tower = tower
        self._device, dtype = tower.positions.device, tower.positions.dtype
        self._table = torch.from_numpy(normalisation(settings)).to(self._device, dtype)
        self._pixels: dict[bytes, PicturePixels] = {}
        self._embeddings: dict[bytes, Tensor] = {}

    @staticmethod
    def of(model: Decoder, settings: ImageSettings | None) -> EncodedPictures | None:
        """Returns those of a model; None if it has no tower."""
        if model.tower is None:
            return None
        return EncodedPictures(model.tower, settings or ImageSettings())

    @property
    def merge_size(self) -> int:
        """Patches of a token's side."""
        return self._tower.shapes.merge_size

    @property
    def num_bytes(self) -> int:
        """Bytes of the embeddings that are kept."""
        return sum(each.nbytes for each in self._embeddings.values())

    def take(self, identity: bytes, pixels: PicturePixels) -> None:
        """Keeps the pixels of a picture until a plan encodes or drops it."""
        if identity not in self._embeddings:
            self._pixels[identity] = pixels

    def follow(self, plan: StepPlan) -> None:
        """Drops and encodes what the plan says. Encoding is queued before the step's launches."""
        for identity in plan.drops:
            self._pixels.pop(identity, None)
            self._embeddings.pop(identity, None)
        for picture in plan.encodes:
            if picture.identity in self._embeddings:
                continue
            pixels = self._pixels.pop(picture.identity, None)
            assert pixels is not None, "I1: the pixels of a picture come before its encoding"
            self._embeddings[picture.identity] = self._encode(pixels)

    def embeddings_of(self, part: PicturePart) -> Tensor:
        """Returns the embeddings [N, C] of some of a picture's tokens."""
        whole = self._embeddings.get(part.identity)
        assert whole is not None, "I2: a picture is encoded before its tokens are computed"
        return whole[part.first : part.first + len(part.tokens)]

    def _encode(self, pixels: PicturePixels) -> Tensor:
        return self._tower(self.send(pixels.rows), self._table, pixels.grid)

    def send(self, values: NDArray[np.uint8] | NDArray[np.int64]) -> Tensor:
        """Returns the values on the device, without waiting for it."""
        is_cuda = self._device.type == "cuda"
        dtype = torch.uint8 if values.dtype == np.uint8 else torch.int64
        own = torch.empty(values.shape, dtype=dtype, pin_memory=is_cuda)
        own.numpy()[...] = values
        return own.to(self._device, non_blocking=True)


def rows_of(
    pictures: EncodedPictures | None, plan: StepPlan, merge_size: int | None
) -> PictureRows | None:
    """Returns the tokens of a step that stand for pictures; None if there are none."""
    if pictures is None or not plan.has_pictures:
        return None
    found = list(parts(plan.sequences, merge_size))
    columns = ("tokens", "rows", "columns")
    places = [np.concatenate([getattr(part, name) for part in found]) for name in columns]
    sent = pictures.send(np.stack(places))
    return PictureRows(
        tokens=sent[0],
        embeddings=torch.cat([pictures.embeddings_of(part) for part in found]),
        positions=sent[1:].int(),
    )
