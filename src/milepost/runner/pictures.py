"""Pictures on the device: pixels that wait to be encoded, and embeddings that steps read.

Which of them are kept is decided by plans alone (`StepPlan.encodes`, `StepPlan.drops`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from milepost.images import ImageSettings, normalisation
from milepost.layers.context import PictureRows
from milepost.layers.tower import Tower
from milepost.layers.tower_parts import TowerRun
from milepost.models.decoder import Decoder
from milepost.runner.positions import PicturePart, parts
from milepost.runner.tower_graphs import Recorder, TowerGraphs
from milepost.scheduler.plans import EncodePart, StepPlan

FEW_PATCHES = 4096
"""Largest number of patches of a picture that is encoded together with others. A larger one keeps a
GPU busy alone."""
MOST_PATCHES = 16_384
"""Largest number of patches in one run of the tower, unless a single picture has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PicturePixels:
    """A picture to encode."""

    rows: NDArray[np.uint8]
    """[patches, bytes], as `images.prepare` makes them."""
    grid: tuple[int, int, int]

    def widened(self, num_bytes: int, num_channels: int) -> NDArray[np.uint8]:
        """Returns rows of `num_bytes`, in which each patch's one frame is repeated."""
        if self.rows.shape[1] == num_bytes:
            return self.rows
        frames = self.rows.reshape(len(self.rows), num_channels, 1, -1)
        times = num_bytes // self.rows.shape[1]
        return np.repeat(frames, times, axis=2).reshape(len(self.rows), num_bytes)


class EncodedPictures:
    """Encodes pictures with a model's tower, and keeps the embeddings by identity."""

    def __init__(self, tower: Tower, settings: ImageSettings, *, joins: bool = False) -> None:
        self._tower = tower
        self.joins = joins
        """Whether small pictures of a step are encoded in one run of the tower."""
        self._device, dtype = tower.scope.device, tower.scope.dtype
        self._table = torch.from_numpy(normalisation(settings)).to(self._device, dtype)
        self._pixels: dict[bytes, PicturePixels] = {}
        self._embeddings: dict[bytes, Tensor] = {}
        self._under_way: dict[bytes, TowerRun] = {}
        """The picture that is encoded over several steps."""
        self._graphs: TowerGraphs | None = None

    @staticmethod
    def of(model: Decoder, settings: ImageSettings | None) -> EncodedPictures | None:
        """Returns the pictures of a model; None if it has no tower."""
        if model.tower is None:
            return None
        return EncodedPictures(model.tower, settings or ImageSettings())

    def capture(self, most_bytes: int, recorder: Recorder | None = None) -> None:
        """Encodes small pictures by CUDA graphs from now on, which take up to `most_bytes`."""
        self._graphs = TowerGraphs(
            self._tower, self._table, most_bytes=most_bytes, recorder=recorder
        )
        self._graphs.prepare()

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
        """Drops and encodes the plan's pictures. Encoding is queued before the step's launches."""
        for identity in plan.drops:
            self._pixels.pop(identity, None)
            self._embeddings.pop(identity, None)
            self._under_way.pop(identity, None)
        if plan.encode_part is not None:
            self._encode_part(plan.encode_part)
        wanted = {each.identity: each for each in plan.encodes}
        several: dict[bytes, PicturePixels] = {}
        for identity in wanted:
            if identity in self._embeddings:
                continue
            pixels = self._take(identity)
            if not self.joins or len(pixels.rows) > FEW_PATCHES:
                self._embeddings[identity] = self._encode([pixels], is_fixed=False)
                continue
            num_patches = sum(len(each.rows) for each in (*several.values(), pixels))
            if num_patches > MOST_PATCHES or self._embeds_apart(pixels, several):
                self._encode_several(several)
            several[identity] = pixels
        self._encode_several(several)

    def embeddings_of(self, part: PicturePart) -> Tensor:
        """Returns the embeddings [N, C] of some of a picture's tokens."""
        whole = self._embeddings.get(part.identity)
        assert whole is not None, "I2: a picture is encoded before its tokens are computed"
        return whole[part.first : part.first + len(part.tokens)]

    def _embeds_apart(self, pixels: PicturePixels, others: Mapping[bytes, PicturePixels]) -> bool:
        """Whether the tower embeds this picture's patches by another projection than the others':
        one that reads floats has one for frames of videos."""
        lengths = {each.rows.shape[1] for each in (pixels, *others.values())}
        return self._tower.shapes.reads_floats and len(lengths) > 1

    def _take(self, identity: bytes) -> PicturePixels:
        pixels = self._pixels.pop(identity, None)
        assert pixels is not None, "I1: the pixels of a picture come before its encoding"
        return pixels

    def _encode_several(self, several: dict[bytes, PicturePixels]) -> None:
        """Encodes small pictures in one run, and drops their pixels. Each has the same bits as
        alone."""
        if not several:
            return
        merged = self.merge_size**2
        embeddings = self._encode([*several.values()], is_fixed=True)
        lengths = [len(each.rows) // merged for each in several.values()]
        self._embeddings.update(zip(several, embeddings.split(lengths), strict=True))
        several.clear()

    def _encode(self, pixels: Sequence[PicturePixels], *, is_fixed: bool) -> Tensor:
        rows, grids = self._staged(pixels), tuple(each.grid for each in pixels)
        if self._graphs is not None:
            embeddings = self._graphs.run(rows, grids, is_fixed=is_fixed)
            if embeddings is not None:
                return embeddings
        encoded: Tensor = self._tower(self._sent(rows), self._table, grids, is_fixed=is_fixed)
        return encoded

    def _encode_part(self, part: EncodePart) -> None:
        """Runs some of the tower's blocks for a large picture."""
        identity, tower = part.picture.identity, self._tower
        if identity in self._embeddings:
            return  # it was encoded by a step that the planner took back
        if part.first == 0:
            pixels = self._take(identity)
            rows = self._sent(self._staged([pixels]))
            self._under_way[identity] = tower.begin(rows, self._table, tower.lay_out([pixels.grid]))
        run, depth = self._under_way[identity], len(tower.blocks)
        first, end = (depth * number // part.num_parts for number in (part.first, part.end))
        tower.advance(run, first, end)
        if part.is_last:
            del self._under_way[identity]
            self._embeddings[identity] = tower.end(run)

    def _staged(self, pixels: Sequence[PicturePixels]) -> Tensor:
        """Returns the rows of pictures in memory that a GPU reads. Rows of still pictures are half
        as long as those of videos' frames; if both occur, the former are doubled."""
        longest = max(each.rows.shape[1] for each in pixels)
        rows = [each.widened(longest, self._tower.shapes.num_channels) for each in pixels]
        return self._pinned(rows[0] if len(rows) == 1 else np.concatenate(rows))

    def send(self, values: NDArray[np.int64]) -> Tensor:
        """Returns the values on the device, without waiting for it."""
        return self._sent(self._pinned(values))

    def _pinned(self, values: NDArray[np.uint8] | NDArray[np.int64]) -> Tensor:
        dtype = torch.uint8 if values.dtype == np.uint8 else torch.int64
        pinned = torch.empty(values.shape, dtype=dtype, pin_memory=self._device.type == "cuda")
        pinned.numpy()[...] = values
        return pinned

    def _sent(self, values: Tensor) -> Tensor:
        return values.to(self._device, non_blocking=True)


def rows_of(
    pictures: EncodedPictures | None, plan: StepPlan, merge_size: int | None
) -> PictureRows | None:
    """Returns the tokens of a step that stand for pictures; None if there are none."""
    if pictures is None or not plan.has_pictures:
        return None
    picture_parts = list(parts(plan.sequences, merge_size))
    columns = ("tokens", "rows", "columns")
    places = [np.concatenate([getattr(part, name) for part in picture_parts]) for name in columns]
    sent = pictures.send(np.stack(places))
    return PictureRows(
        tokens=sent[0],
        embeddings=torch.cat([pictures.embeddings_of(part) for part in picture_parts]),
        positions=sent[1:].int(),
    )
