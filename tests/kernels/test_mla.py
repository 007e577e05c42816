"""Latent attention's reference against every head's own keys and values, in float64.

Legend: T tokens, H heads, R latent_dim, P shared_dim, N entries of a key made of the latent.
"""

from __future__ import annotations

import numpy as np
import torch

from milepost.kernels import attention
from milepost.kernels.attention import PagedKV, TurnedEntries
from milepost.kernels.layout.batch import Batch, Capacity
from tests.numbers import relative_error

HEADS, LATENT, SHARED, OWN, PAGE = 3, 12, 4, 5, 8
TABLES = np.array([[4, 1, 6, 2], [3, 5, 7, 0]], np.int32)


def make_batch(starts: list[int], lengths: list[int], num_decodes: int = 0) -> Batch:
    position = np.concatenate(
        [start + np.arange(n) for start, n in zip(starts, lengths, strict=True)]
    )
    row = np.arange(len(starts)).repeat(lengths)
    kv_rows = TABLES[row, position // PAGE].astype(np.int64) * PAGE + position % PAGE
    return Batch(
        starts=np.array(starts),
        lengths=np.array(lengths),
        num_decodes=num_decodes,
        folds=np.zeros(len(starts), np.int64),
        record_rows=np.full(len(starts), -1),
        rows=np.arange(len(starts)),
        kv_rows=kv_rows,
        slot_in=np.zeros(len(starts), np.int64),
        slot_out=np.ones(len(starts), np.int64),
        exports=(),
        tables=TABLES,
        page_size=PAGE,
        page_rows=PAGE,
        capacity=Capacity(num_tokens=sum(lengths), num_sequences=len(starts)),
        device=torch.device("cpu"),
        chip=None,
    )


def test_it_is_attention_of_heads_with_keys_and_values_of_their_own() -> None:
    """Prefills of two sequences in two parts, then a decode of each; what lies in pages that no
    token was written to is NaN."""
    random = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random, dtype=torch.float64)

    ends = 21, 13
    latents = [normal(end, LATENT + SHARED) for end in ends]
    queries = [normal(end, HEADS, OWN + SHARED) for end in ends]
    norm, up_key, up_value = normal(LATENT), normal(HEADS, OWN, LATENT), normal(HEADS, 7, LATENT)
    pool = torch.full((8, 1, PAGE, 1, LATENT + SHARED), torch.nan, dtype=torch.float64)
    operation = attention.LatentOperation(num_heads=HEADS, latent_dim=LATENT, shared_dim=SHARED)
    outputs = [[], []]
    for begins, stops in (((0, 0), (9, 3)), ((9, 3), (20, 12)), ((20, 12), ends)):
        lengths = [stop - begin for begin, stop in zip(begins, stops, strict=True)]
        batch = make_batch(list(begins), lengths, num_decodes=2 if max(lengths) == 1 else 0)
        layout = operation.lay_out(batch)
        new, query = (
            torch.cat(
                [part[begin:stop] for part, begin, stop in zip(parts, begins, stops, strict=True)]
            )
            for parts in (latents, queries)
        )
        kv_rows = torch.from_numpy(batch.kv_rows)
        attention.store_latents(new, norm, 1e-6, PagedKV(pool), kv_rows, layout)
        own, shared = query.split((OWN, SHARED), -1)
        absorbed = torch.einsum("thn,hnr->thr", own, up_key)
        kv = PagedKV(pool)
        attended = attention.attend(absorbed, None, kv, layout, 0.3, shared_query=shared)
        values = torch.einsum("thr,hvr->thv", attended.view(absorbed.shape), up_value)
        for output, part in zip(outputs, values.split(lengths), strict=True):
            output.append(part)

    for tokens, query, output in zip(latents, queries, outputs, strict=True):
        compressed, shared = tokens.split((LATENT, SHARED), -1)
        scale = (compressed.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        compressed = compressed * scale * norm
        keys = torch.einsum("tr,hnr->thn", compressed, up_key)
        keys = torch.cat((keys, shared[:, None].expand(-1, HEADS, -1)), -1)
        scores = torch.einsum("qhn,khn->hqk", query, keys) * 0.3
        is_later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(is_later, -torch.inf).softmax(-1)
        values = torch.einsum("tr,hvr->thv", compressed, up_value)
        expected = torch.einsum("hqk,khv->qhv", weights, values)
        assert relative_error(torch.cat(output), expected) < 1e-13


def test_a_token_whose_latent_is_there_already_is_not_written() -> None:
    batch = make_batch([0], [6])
    batch.kv_rows[:4] = -1
    pool = torch.full((8, 1, PAGE, 1, LATENT + SHARED), torch.nan)
    operation = attention.LatentOperation(num_heads=HEADS, latent_dim=LATENT, shared_dim=SHARED)
    new, layout = torch.ones(6, LATENT + SHARED), operation.lay_out(batch)
    kv_rows = torch.from_numpy(batch.kv_rows)
    attention.store_latents(new, torch.ones(LATENT), 1e-6, PagedKV(pool), kv_rows, layout)
    assert pool.isfinite().flatten(1).sum(1).tolist() == [
        0,
        0,
        0,
        0,
        2 * (LATENT + SHARED),
        0,
        0,
        0,
    ]


def test_shared_entries_are_rotated_in_pairs_of_neighbours() -> None:
    """As complex numbers, in the pages and in the queries; the latent's own entries are not."""
    random = torch.Generator().manual_seed(2)
    new = torch.randn(6, LATENT + SHARED, generator=random, dtype=torch.float64)
    query = torch.randn(6, HEADS, SHARED, generator=random, dtype=torch.float64)
    angle = torch.rand(6, 1, SHARED // 2, generator=random, dtype=torch.float64)
    pool = torch.zeros(8, 1, PAGE, 1, LATENT + SHARED, dtype=torch.float64)
    operation = attention.LatentOperation(num_heads=HEADS, latent_dim=LATENT, shared_dim=SHARED)
    batch, plain = make_batch([0], [6]), query.clone()
    own = torch.ones(LATENT, dtype=torch.float64), 1e-6, PagedKV(pool)
    turned = TurnedEntries(angle.cos(), angle.sin(), query)
    kv_rows = torch.from_numpy(batch.kv_rows)
    attention.store_latents(new, *own, kv_rows, operation.lay_out(batch), turned)

    def turn(entries: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(entries.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    stored = pool.flatten(0, 3)[kv_rows]
    assert relative_error(stored[:, LATENT:], turn(new[:, None, LATENT:])[:, 0]) < 1e-14
    assert relative_error(query, turn(plain)) < 1e-14
    scale = (new[:, :LATENT].square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert relative_error(stored[:, :LATENT], new[:, :LATENT] * scale) < 1e-14
