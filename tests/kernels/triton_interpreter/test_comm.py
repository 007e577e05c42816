"""The one-shot sums over ranks, in Triton's interpreter. It runs one rank at a time, so what the
others would do meanwhile is done by hand."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from milepost.kernels import comm
from milepost.kernels.comm import one_shot, two_shot
from tests.kernels.comm_cases import add_norm as all_add_norm
from tests.kernels.comm_cases import boxes, mails
from tests.numbers import relative_error

C = 48


def on_all(ranks, kept, work, num_sent=1):
    """What `work` returns on each rank. First each sends, as if all others had, so often as what is
    sent depends on what was; then each runs the same turn again, and finds what they have sent."""
    turns = [mail.turns.clone() for mail in ranks]
    signals = kept[len(ranks) :]
    before = [each.clone() for each in signals]
    for each in signals:
        each.fill_(1 << 20)
    for rank, mail in [*enumerate(ranks)] * num_sent:
        work(rank)
        mail.turns.copy_(turns[rank])
    for each, held in zip(signals, before, strict=True):
        each.copy_(torch.where(each == 1 << 20, held, each))
    return [work(rank) for rank in range(len(ranks))]


@pytest.mark.parametrize(("size", "dtype"), [(3, torch.float32), (2, torch.bfloat16)])
def test_all_ranks_go_on_with_the_same_sum(size, dtype):
    generator = torch.Generator().manual_seed(0)
    ranks, kept = mails(size, C, dtype)
    hidden = torch.randn(2, C, generator=generator).to(dtype)
    scale = torch.rand(C, generator=generator)
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    for num_rows, num_parts in ((2, 1), (1, 3)):
        partials = [torch.randn(num_rows, num_parts, C, generator=generator) for _ in ranks]
        own, firsts = hidden[:num_rows], [each[:, 0].to(dtype) for each in partials]

        def add_norm(rank, own=own, partials=partials):
            return one_shot.add_norm(own, partials[rank], scale, 1e-6, ranks[rank], 0.5)

        def add_up(rank, firsts=firsts):
            return one_shot.add_up(firsts[rank], ranks[rank])

        found = on_all(ranks, kept, add_norm)
        for parts in zip(*found, strict=True):
            assert all(torch.equal(each, parts[0]) for each in parts)
        expected = all_add_norm(own, partials, scale, 1e-6, 0.5)
        for one, other in zip(found[0], expected, strict=True):
            assert relative_error(one.float(), other.float()) < bound
        sums = on_all(ranks, kept, add_up)
        assert all(torch.equal(each, sums[0]) for each in sums)
        assert relative_error(sums[0].float(), comm.add_up(firsts).float()) < bound
    for mail, signals in zip(ranks, kept[size:], strict=True):
        assert mail.turns[:3].tolist() == [4, 2, 0]
        heard = signals[:3, [rank for rank in range(size) if rank != mail.rank]]
        assert all(torch.equal(each, mail.turns[:3]) for each in heard.unbind(1))


def test_a_rank_waits_for_the_others():
    """It tells them first; what they have not written yet is NaN, and signals of the turn before
    are none of this one's."""
    ranks, (_, theirs, heard, signalled) = mails(2, C, torch.float32)
    own = torch.randn(1, 1, C)
    with ThreadPoolExecutor(1) as thread:
        for turn in (1, 2):
            sum_ = thread.submit(one_shot.add_up, own[:, 0], ranks[0])
            while signalled[0, 0] != turn:
                assert not sum_.done()
            theirs[turn % 2, 0] = 100 * turn
            heard[0, 1] = turn
            assert torch.equal(sum_.result(60), own[:, 0] + 100 * turn)


@pytest.mark.parametrize(("size", "dtype"), [(3, torch.float32), (2, torch.bfloat16)])
def test_of_many_rows_each_is_added_up_by_one_rank(size, dtype):
    """The last rank may have fewer than the others, or none."""
    generator = torch.Generator().manual_seed(0)
    ranks, kept = boxes(size, 3, C, dtype)
    scale = torch.rand(C, generator=generator)
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    for num_rows, num_parts in ((2 * size - 1, 2), (size + 1, 1)):
        hidden = torch.randn(num_rows, C, generator=generator).to(dtype)
        partials = [
            torch.randn(num_rows, num_parts, C, generator=generator).to(dtype) for _ in ranks
        ]

        def share(rank, hidden=hidden, partials=partials):
            return two_shot.share_norm(hidden, partials[rank], scale, 1e-6, ranks[rank], 0.5)

        found = on_all(ranks, kept, share, num_sent=2)
        for parts in zip(*found, strict=True):
            assert all(torch.equal(each, parts[0]) for each in parts)
        expected = all_add_norm(hidden, partials, scale, 1e-6, 0.5)
        for one, other in zip(found[0], expected, strict=True):
            assert relative_error(one.float(), other.float()) < bound
    for one in ranks:
        assert one.turns.tolist() == [2, 2, 0]
    last = ranks[-1].turns.new_tensor([1 if size == 3 else 2, 0, 0])
    for one, signals in zip(ranks, kept[size:], strict=True):
        for sender in {*range(size)} - {one.rank}:
            own = ranks[0].turns if one.rank < size - 1 else last
            assert torch.equal(signals[0, :, sender], own)
            own = ranks[0].turns if sender < size - 1 else last
            assert torch.equal(signals[1, :, sender], own)


def test_a_rank_that_shares_waits_twice():
    """For the others' parts of its own rows, then for what theirs come to."""
    ranks, (held, theirs, heard, signalled) = boxes(2, 1, C, torch.float32)
    hidden, own = torch.zeros(2, C), torch.randn(2, 1, C)
    with ThreadPoolExecutor(1) as thread:
        for turn in (1, 2):
            sums = thread.submit(two_shot.share_norm, hidden, own, torch.ones(C), 0.0, ranks[0])
            while signalled[0, 0, 0] != turn:
                assert not sums.done()
            assert torch.equal(theirs[0, 0, 0], own[1, 0])
            assert signalled[1, 0, 0] == turn - 1
            held[0, 1, 0] = 100 * turn
            heard[0, 0, 1] = turn
            while signalled[1, 0, 0] != turn:
                assert not sums.done()
            assert torch.equal(theirs[1, 0, 0], own[0, 0] + 100 * turn)
            held[1, 1, 0] = 7 * turn
            heard[1, 0, 1] = turn
            total, normed = sums.result(60)
            assert torch.equal(total, torch.stack([own[0, 0] + 100 * turn, held[1, 1, 0]]))
            assert torch.allclose(normed[1], torch.ones(C))
