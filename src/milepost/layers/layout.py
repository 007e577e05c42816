"""What all layers of a kind would work out alike from a step's batch, worked out once a step.

Legend: T tokens, S sequences, D decoding sequences (the first D of S).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from milepost.kernels import attention, conv, gated_delta
from milepost.layers.context import BatchContext, DeviceBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """Where the batch's tokens stand in the kernels; parts that no sequence needs are None or
    empty."""

    cosines: Tensor
    """[T, 1, half of the turned dimensions], as are `sines`."""
    sines: Tensor
    decode_pages: attention.DecodePages | None = None
    prefill_pages: tuple[attention.PrefillPages, ...] = ()
    chunks: gated_delta.ChunkLayout | None = None
    windows: conv.ConvLayout | None = None


def lay_out(
    ctx: BatchContext | DeviceBatch, angles: tuple[Tensor, Tensor], num_taps: int
) -> BatchLayout:
    """Lay out one step's batch; `num_taps` is the kernel size of the short convolutions.

    A batch for the fused kernels brings its own layout: only the angles are added to it.
    """
    if isinstance(ctx, DeviceBatch):
        return BatchLayout(cosines=angles[0], sines=angles[1])
    decodes = ctx.num_decodes
    starts, lengths = ctx.starts[decodes:], ctx.lengths[decodes:]
    exports = [(each.sequence - decodes, each.position, each.slot) for each in ctx.exports]
    pool = next(iter(ctx.kv.values()), None)
    decode_pages, prefill_pages = None, ()
    if pool is not None and decodes:
        decode_pages = attention.lay_out_decodes(
            ctx.page_table[:decodes],
            ctx.kv_lengths[:decodes],
            max(ctx.starts[:decodes]) + 1,
            pool,
        )
    if pool is not None and starts:
        prefill_pages = attention.lay_out_prefills(ctx.page_table[decodes:], starts, lengths, pool)
    chunks = windows = None
    if ctx.states and starts:
        chunks = gated_delta.lay_out_chunks(starts, lengths, exports, ctx.device)
        windows = conv.lay_out_windows(starts, lengths, exports, num_taps, ctx.device)
    return BatchLayout(
        cosines=angles[0],
        sines=angles[1],
        decode_pages=decode_pages,
        prefill_pages=prefill_pages,
        chunks=chunks,
        windows=windows,
    )
