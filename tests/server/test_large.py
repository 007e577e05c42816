"""Large requests are read beside the event loop, one at a time."""

import asyncio
import threading

import pytest

from milepost.server import bodies
from milepost.server.bodies import LargeWork, size_of
from milepost.server.config import ServerConfig
from milepost.server.parts import Message
from tests.server.inprocess import answered


def run(main):
    async def with_work():
        work = LargeWork()
        try:
            return await main(work)
        finally:
            work.close()

    return asyncio.run(with_work())


def test_small_work_is_done_at_once_and_large_work_in_one_thread():
    async def main(work):
        here = threading.get_ident()
        assert await work.run(threading.get_ident, 100) == here
        threads = await asyncio.gather(*(work.run(threading.get_ident, 10**6) for _ in range(8)))
        assert len(set(threads)) == 1
        assert here not in threads

    run(main)


def test_the_loop_goes_on_meanwhile_and_errors_come_back():
    async def main(work):
        may_go = threading.Event()

        def fail():
            assert may_go.wait(30), "the loop stood still"
            raise ValueError("no such body")

        asking = asyncio.ensure_future(work.run(fail, 10**6))
        await asyncio.sleep(0)
        may_go.set()
        with pytest.raises(ValueError, match="no such body"):
            await asking

    run(main)


def test_messages_and_parts_count_whatever_their_text():
    plain = [Message(role="user", content="a")] * 300
    parts = [Message(role="user", content=[{"type": "text", "text": "a"}] * 299)]
    assert size_of(plain) == size_of(parts)
    assert size_of(plain) > 2**16
    assert size_of(None) == 0


@pytest.mark.parametrize(("size", "is_apart"), [(2**10, False), (2**20, True)])
def test_large_bodies_are_read_in_the_thread(monkeypatch, size, is_apart):
    threads = []
    check = bodies.check_size
    monkeypatch.setattr(
        bodies, "check_size", lambda body: (threads.append(threading.current_thread()), check(body))
    )
    assert answered(ServerConfig(), "/tokenize", {"prompt": "a" * size}).status_code == 200
    assert [each.name.startswith("large-requests") for each in threads] == [is_apart]
