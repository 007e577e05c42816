"""The queue: its order, and who need not look again for room."""

from __future__ import annotations

import pytest

from milepost.cache import Cache
from milepost.scheduler.queue import Queue
from tests.fakes import make_request


class Roomy(Cache):
    """A cache whose room is said."""

    said = (3, 3)

    @property
    def room(self):
        return self.said


def queue_of(*ranks: tuple[int, int]):
    cache = Roomy(num_pages=8, num_slots=8)
    queue = Queue(cache)
    for priority, arrival in ranks:
        request = make_request(cache, f"{priority}-{arrival}", [1, 2, 3], priority=priority)
        request.number = arrival
        queue.add(request)
    return cache, queue


def test_order_is_by_priority_then_arrival():
    _, queue = queue_of((0, 3), (1, 0), (0, 1), (-1, 7), (0, 2))
    assert [request.id for request in queue] == ["-1-7", "0-1", "0-2", "0-3", "1-0"]
    for request in list(queue)[1::2]:
        queue.remove(request)
    assert [request.id for request in queue] == ["-1-7", "0-2", "1-0"]
    assert [request.id for request in queue.first(2)] == ["-1-7", "0-2"]


@pytest.mark.parametrize(
    ("room", "num_admitted", "blocked"),
    [
        ((3, 3), 0, True),
        ((2, 3), 0, True),
        ((4, 3), 0, False),
        ((3, 4), 0, False),
        ((4, 2), 0, False),
        ((2, 4), 0, False),
        ((3, 3), 1, False),
        ((2, 2), 1, False),
    ],
)
def test_a_blocked_request_looks_again_when_there_is_more_room_or_company(
    room, num_admitted, blocked
):
    cache, queue = queue_of((0, 0), (0, 1))
    other, request = queue
    assert not queue.is_blocked(request, 0.0)
    queue.block(request, cache.match(request.chain))
    assert queue.is_blocked(request, 0.0)
    cache.said = room
    for _ in range(num_admitted):
        queue.admit(other)
    assert queue.is_blocked(request, 0.0) is blocked


def test_a_request_that_is_held_back_looks_again_when_its_time_has_come():
    cache, queue = queue_of((0, 0))
    (request,) = queue
    queue.block(request, cache.match(request.chain), until_s=5.0)
    assert queue.is_blocked(request, 4.9)
    assert not queue.is_blocked(request, 5.0)
    queue.block(request, cache.match(request.chain))
    assert queue.is_blocked(request, 1e9), "it found no room"
