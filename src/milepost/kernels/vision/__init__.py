"""Operations of vision towers: normalising bytes, adding positions, attention without a mask, norms
and feed-forwards. These are the definitions, in plain torch; on a GPU `attention`, `triton` and
torch's GEMM compute them.

Legend: P patches of one picture or of several, F frames (of a patch, or of all pictures), B bytes
of a patch, X pixels of a patch in one frame, D hidden size, H heads, E head_dim, O outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.platform.tables import fused
from milepost.kernels.platform.tensors import accumulation_dtype, cast

__all__ = [
    "PictureFrames",
    "add_averaged_positions",
    "add_cropped_positions",
    "add_norm",
    "add_positions",
    "attend",
    "multiply_gelu",
    "normalise",
    "turned_angles",
]


class PictureFrames(NamedTuple):
    """Frames that stand one after the other in a run of a tower, and each attend to themselves
    alone."""

    starts: Tensor | None
    """[F + 1] int32 on the device: the first patch of each, and the number of all patches. None for
    those of one picture, which are equally long."""
    lengths: tuple[int, ...]
    """Patches of each."""


@fused("vision.triton")
def normalise(rows: Tensor, table: Tensor, num_frames: int, num_pixels: int) -> Tensor:
    """Returns the values [P, 3 * F * X] of `rows` [P, B], uint8: each byte's in its channel's row
    of `table` [3, 256]. A row with one frame stands for all `num_frames`."""
    channels, num_values = table.shape
    frames = rows.view(len(rows), channels, -1, num_pixels)
    first = torch.arange(0, channels * num_values, num_values, device=rows.device)
    places = frames.to(torch.int32) + first.to(torch.int32)[:, None, None]
    values = table.flatten().index_select(0, places.flatten()).view(frames.shape)
    return values.expand(-1, -1, num_frames, -1).reshape(len(rows), -1)


@fused("vision.triton")
def add_positions(
    hidden: Tensor, table: Tensor, places: tuple[Tensor, Tensor], size: tuple[int, int]
) -> Tensor:
    """Returns `hidden` [P, D] with the embeddings of the patches' places added, which are rows [P]
    and columns [P] of a picture of `size` (rows, columns). The embeddings are those of `table`
    [side * side, D], a square whose corners are the picture's, with linear steps in between."""
    side = round(len(table) ** 0.5)
    near, shares = [], []
    for index, count in zip(places, size, strict=True):
        exact = index.to(torch.float32) * (side - 1) / max(count - 1, 1)
        before = exact.floor()
        share = exact - before
        own = before.long()
        near.append((own, (own + 1).clamp(max=side - 1)))
        shares.append((1 - share, share))
    total: Tensor | float = 0.0
    for row, row_share in zip(near[0], shares[0], strict=True):
        for column, column_share in zip(near[1], shares[1], strict=True):
            own = table.index_select(0, row * side + column)
            total = total + own * (row_share * column_share)[:, None]
    assert isinstance(total, Tensor), "there are four neighbours"
    return hidden + total.to(hidden.dtype)


def add_averaged_positions(
    hidden: Tensor, table: Tensor, places: tuple[Tensor, Tensor], size: tuple[int, int]
) -> Tensor:
    """Adds embeddings to `hidden` [P, D] as `add_positions` does, but first resizes the whole
    `table` to `size`, bilinearly and with antialiasing."""
    return _add_resized(hidden, table, places, size, antialias=True)


def add_cropped_positions(
    hidden: Tensor, table: Tensor, places: tuple[Tensor, Tensor], size: tuple[int, int]
) -> Tensor:
    """Adds embeddings to `hidden` [P, D] as `add_positions` does, but first resizes the `table`
    bilinearly to a square with the longer side of `size`. A picture takes the part that it covers,
    from the first corner."""
    return _add_resized(hidden, table, places, (max(size), max(size)))


def _add_resized(
    hidden: Tensor,
    table: Tensor,
    places: tuple[Tensor, Tensor],
    size: tuple[int, int],
    *,
    antialias: bool = False,
) -> Tensor:
    """Adds the embeddings at `places` in the `table`, resized bilinearly to `size`."""
    side = round(len(table) ** 0.5)
    square = cast(table, accumulation_dtype(table.dtype)).view(1, side, side, -1)
    resized = F.interpolate(
        square.permute(0, 3, 1, 2), size, mode="bilinear", align_corners=False, antialias=antialias
    )
    rows, columns = places
    return hidden + resized[0].flatten(1).t()[rows * size[1] + columns].to(hidden.dtype)


def turned_angles(rows: Tensor, columns: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines [P, E / 2] of patches at `rows` and `columns` [P]: the first half
    turns by the row, the second by the column, both with `frequencies` [E / 4]."""
    places = torch.stack((rows, columns), 1)[:, :, None].float()
    angles = (places * frequencies).flatten(1)
    return angles.cos(), angles.sin()


@fused("vision.attention")
def attend(
    projected: Tensor, angles: tuple[Tensor, Tensor], num_heads: int, frames: PictureFrames
) -> Tensor:
    """Returns the attended values [P, H * E] of `projected` [P, 3 * H * E], queries, keys and
    values one after the other. Each frame attends to all of itself. Queries and keys are turned by
    `angles`, cosines and sines [P, E / 2], where dimension i is paired with i + E / 2. `projected`
    may be overwritten."""
    query, key, value = projected.unflatten(1, (3, num_heads, -1)).unbind(1)
    query, key = _turn(query, angles), _turn(key, angles)
    split = (each.transpose(0, 1)[None].split(frames.lengths, 2) for each in (query, key, value))
    attended = [F.scaled_dot_product_attention(*each) for each in zip(*split, strict=True)]
    return torch.cat(attended, 2)[0].transpose(0, 1).reshape(len(projected), -1)


def _turn(heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turns `heads` [P, H, E] in float32 or wider."""
    cosines, sines = (each[:, None] for each in angles)
    first, second = cast(heads, accumulation_dtype(heads.dtype)).chunk(2, -1)
    turned = first * cosines - second * sines, second * cosines + first * sines
    return cast(torch.cat(turned, -1), heads.dtype)


@fused("vision.triton")
def add_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Adds `delta` to `hidden`, both [P, D], and norms the sum over D, with a mean of zero and a
    deviation of one, then `weight` and `bias` [D]. Returns the sum and its norm."""
    if delta is not None:
        hidden = hidden + delta
    return hidden, F.layer_norm(hidden, hidden.shape[-1:], weight, bias, eps)


@fused("vision.triton")
def multiply_gelu(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns the GELU, as a tanh approximates it (arXiv:1606.08415, section 2), of `rows` [P, D]
    times `weight` [O, D] plus `bias` [O]."""
    return F.gelu(F.linear(rows, weight, bias), approximate="tanh")
