"""What routers are told, and again if they missed it."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from random import Random

import msgspec
import pytest
import zmq

from milepost.cache import Cache
from milepost.cache.placement import Kind
from milepost.config import EngineConfig
from milepost.errors import ConfigError
from milepost.kv_config import KVEventsConfig
from milepost.kv_events import EventPublisher, MessageWriter
from milepost.kv_events import messages as told
from milepost.pictures import Picture
from tests.follower import Follower
from tests.kv_events.router import Router
from tests.pictured_texts import LENGTHS, picture

PAGE = 16


def run(cache: Cache, tokens: list[int], salt: str = "", pictures: Sequence[Picture] = ()) -> None:
    """One request from its prompt to its end."""
    chain = cache.chain(tokens, salt, pictures)
    allocation = cache.admit(chain, cache.match(chain))
    position = allocation.committed
    while position < len(tokens):
        position = min(position + 64, len(tokens))
        exports = cache.take_exports(allocation, position)
        written = {export.slot: export.position for export in exports}
        cache.commit(allocation, position, {**written, allocation.slot_out: position})
    cache.release(allocation, Kind.ANSWER_END)


@pytest.mark.parametrize("form", ["map", "array"])
def test_a_router_knows_what_can_be_reached_and_nothing_else(form):
    random, cache = Random(3), Cache(num_pages=60, num_slots=6, page_size=PAGE)
    cache.listen()
    follower, router, messages = Follower(PAGE), Router(PAGE), MessageWriter(PAGE, form, "bytes")
    texts = [[random.randrange(50) for _ in range(300)] for _ in range(4)]
    lengths = set()
    for step in range(300):
        salt = "mine" if random.random() < 0.2 else ""
        text = random.choice(texts)[: random.randrange(20, 300)]
        run(cache, text, salt)
        if step == 200:
            cache.reset()
        events = cache.take_events()
        follower.follow(events)
        for payload in messages.payloads(events, 0.0):
            router.feed(payload)
        follower.check(cache)
        assert router.blocks.keys() == follower.reachable - follower.salted
        lengths.add(len(router.blocks))
    assert len(lengths) > 10, "it came and went"


def test_pages_are_announced_up_to_the_first_picture():
    """In one run of pages, and where a later run continues after a page with a picture."""
    cache, router, messages = Cache(num_pages=60, num_slots=6, page_size=PAGE), Router(PAGE), []
    cache.listen()
    writer, pictures = MessageWriter(PAGE, "map", "bytes"), (picture(min(LENGTHS), 3 * PAGE + 1),)
    for length in (5 * PAGE, 9 * PAGE):
        run(cache, [1] * length, "", pictures)
        messages += list(writer.payloads(cache.take_events(), 0.0))
    run(cache, [1] * 2 * PAGE + [2] * PAGE)
    cache.reset()
    for payload in [*messages, *writer.payloads(cache.take_events(), 0.0)]:
        router.feed(payload)
        if payload == messages[-1]:
            assert router.blocks.keys() == set(cache.chain([1] * 3 * PAGE).full_digests())
    assert not router.blocks


def test_events_of_nothing_that_routers_know_are_no_message():
    assert not list(MessageWriter(PAGE, "map", "bytes").payloads((), 0.0))
    cache = Cache(num_pages=60, num_slots=6, page_size=PAGE)
    cache.listen()
    run(cache, list(range(100)), "mine")
    assert not list(MessageWriter(PAGE, "map", "bytes").payloads(cache.take_events(), 0.0))


def test_a_hash_is_the_last_64_bits_of_a_digest_unless_all_of_it_is_wanted():
    """As vLLM's by default: Dynamo reads nothing else."""
    cache, found = Cache(num_pages=60, num_slots=6, page_size=PAGE), {}
    cache.listen()
    run(cache, list(range(40)))
    first, second = cache.chain(range(32)).full_digests()
    events = cache.take_events()
    for hashes in ("int", "bytes"):
        (payload,) = MessageWriter(PAGE, "map", hashes).payloads(events, 0.0)
        found[hashes] = msgspec.msgpack.decode(payload)[1][0]["block_hashes"]
    assert found["bytes"] == [first, second]
    assert found["int"] == [int.from_bytes(each[8:], "big") for each in (first, second)]


def test_no_message_is_larger_than_routers_take(monkeypatch):
    """A router that refuses a message forgets all that it knows of a server."""
    monkeypatch.setattr(told, "MAX_BLOCKS", 4)
    monkeypatch.setattr(told, "MAX_EVENTS", 2)
    cache, router, messages = Cache(num_pages=90, num_slots=9, page_size=PAGE), Router(PAGE), []
    cache.listen()
    for own in range(5):
        run(cache, [7] * 160 + [own] * 40)
    making = MessageWriter(PAGE, "map", "bytes")
    messages += making.payloads(cache.take_events(), 0.0)
    assert len(messages) > 3
    for payload in messages:
        events = msgspec.msgpack.decode(payload)[1]
        assert len(events) <= 2
        assert sum(len(event["block_hashes"]) for event in events) <= 4
        router.feed(payload)
    assert router.hit([7] * 160 + [4] * 40 + [1]) == 192
    cache.reset()
    for payload in making.payloads(cache.take_events(), 0.0):
        router.feed(payload)
    assert not router.blocks


def test_a_reset_withdraws_each_page_for_who_passes_over_the_event_of_all():
    cache, making = (
        Cache(num_pages=60, num_slots=6, page_size=PAGE),
        MessageWriter(PAGE, "map", "int"),
    )
    cache.listen()
    run(cache, list(range(100)))
    run(cache, list(range(100)), "mine")
    told = [msgspec.msgpack.decode(each)[1] for each in making.payloads(cache.take_events(), 0.0)]
    cache.reset()
    (payload,) = making.payloads(cache.take_events(), 0.0)
    removed, cleared = msgspec.msgpack.decode(payload)[1]
    stored = [key for events in told for event in events for key in event["block_hashes"]]
    assert removed["block_hashes"] == stored
    assert cleared == {"type": "AllBlocksCleared"}


@pytest.fixture
def published(tmp_path):
    """A publisher of three messages, the addresses, and the context to ask from."""
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("pub", "replay")]
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=addresses[0],
        replay_endpoint=addresses[1],
        buffer_steps=2,
        topic="kv@here",
    )
    cache = Cache(num_pages=60, num_slots=6, page_size=PAGE)
    cache.listen()
    publisher, context = EventPublisher(config, PAGE, clock=lambda: 7.0), zmq.Context()
    yield publisher, addresses, context, cache
    publisher.close()
    context.term()


def test_what_was_missed_is_sent_again(published, request):
    publisher, (_, replay), context, cache = published
    heard = []
    for number in range(3):
        run(cache, [number] * 100)
        publisher.publish(cache.take_events())
    asking = context.socket(zmq.DEALER)
    request.addfinalizer(asking.close)
    asking.connect(replay)
    for first, found in ((0, [1, 2]), (2, [2]), (9, [])):
        asking.send_multipart([b"", first.to_bytes(8, "big")])
        for number in found:
            empty, topic, packed, payload = asking.recv_multipart()
            assert (empty, topic, int.from_bytes(packed, "big")) == (b"", b"kv@here", number)
            heard.append(payload)
        assert asking.recv_multipart() == [b"", b"", b"\xff" * 8, b""]
    router = Router(PAGE)
    router.feed(heard[0])
    assert router.hit([1] * 100) == 96
    asking.send_multipart([b"", b"no number"])
    asking.send_multipart([b"", bytes(8)])
    assert asking.recv_multipart()[1] == b"kv@here", "nonsense is passed over"


def test_what_routers_send_ends_nothing(published, request, monkeypatch, caplog):
    """Messages that are too long close their connection; one that fails is one router's."""
    publisher, (_, replay), context, cache = published
    run(cache, [1] * 100)
    publisher.publish(cache.take_events())

    def asking():
        socket = context.socket(zmq.DEALER)
        request.addfinalizer(lambda: socket.close(linger=0))
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.connect(replay)
        return socket

    hostile = asking()
    monitor = hostile.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    for frames in ([b"x"], [b"", b"", b""], [b""] * 1000, [b"", b"\xff" * 8], [b"", bytes(2**17)]):
        hostile.send_multipart(frames)
    is_closed = monitor.poll(10_000)
    hostile.disable_monitor()
    monitor.close()
    assert is_closed
    replayed = publisher._replay

    def fail():
        publisher._replaying.recv_multipart()
        monkeypatch.setattr(publisher, "_replay", replayed)
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(publisher, "_replay", fail)
    polite = asking()
    for _ in range(2):
        polite.send_multipart([b"", bytes(8)])
    assert polite.recv_multipart()[1] == b"kv@here"
    assert "a router could not be sent again what it missed" in caplog.text


def test_the_end_of_the_thread_is_no_hang(published, monkeypatch):
    publisher, _, _, cache = published
    publisher._bell.send(b"end")
    publisher._thread.join()
    run(cache, [1] * 100)
    with pytest.raises(RuntimeError, match="publishes KV events has ended"):
        publisher.publish(cache.take_events())


def test_a_subscriber_hears_in_order(published, request):
    publisher, (endpoint, _), context, cache = published
    listener = context.socket(zmq.SUB)
    request.addfinalizer(listener.close)
    listener.subscribe("kv@here")
    listener.connect(endpoint)
    listener.setsockopt(zmq.RCVTIMEO, 50)
    number = 0
    while True:  # until the subscription has arrived
        run(cache, [number] * 100)
        publisher.publish(cache.take_events())
        try:
            _, first, _ = listener.recv_multipart()
            break
        except zmq.Again:
            number += 1
    run(cache, [1000] * 100)
    publisher.publish(cache.take_events())
    listener.setsockopt(zmq.RCVTIMEO, 10_000)
    _, second, _ = listener.recv_multipart()
    assert int.from_bytes(second, "big") == int.from_bytes(first, "big") + 1


def test_who_missed_something_connects(request):
    """A replay address without a `*` is bound as well: whoever asks there connects."""
    context = zmq.Context()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    config = KVEventsConfig(
        enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*", replay_endpoint=address
    )
    publisher, asking = EventPublisher(config, PAGE), context.socket(zmq.DEALER)
    asking.setsockopt(zmq.RCVTIMEO, 10_000)
    asking.connect(address)
    asking.send_multipart([b"", bytes(8)])
    assert asking.recv_multipart()[2] == b"\xff" * 8
    asking.close()
    publisher.close()
    context.term()


def read(value):
    return EngineConfig(kv_events_config=value).kv_events_config


def test_the_configuration_in_vllms_words():
    given = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv", "hwm": 5}
    config = read(json.dumps(given))
    assert config == read(given) == read(config)
    assert (config.is_on, config.endpoint, config.replay_endpoint) == (True, "tcp://*:5557", None)
    assert read({"enable_kv_cache_events": True}).publisher == "zmq"
    assert not read({}).is_on
    assert not read({"publisher": "zmq"}).is_on
    assert read(None) is None


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("{", "not JSON"),
        ([], "JSON object"),
        ({"publisher": "kafka"}, "publisher"),
        ({"format": "xml"}, "format"),
        ({"hashes": "md5"}, "hashes"),
        ({"port": 1}, "unknown field 'port'"),
        ({"hwm": -1}, "hwm"),
        ({"hwm": True}, "hwm"),
        ({"hwm": 2**31}, "hwm"),
        ({"buffer_steps": 10**30}, "buffer_steps"),
        ({"replay_endpoint": 5}, "replay_endpoint=5"),
        ({"topic": 3}, "topic"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events"),
    ],
)
def test_what_it_refuses_by_name(value, named):
    with pytest.raises(ConfigError, match=named):
        read(value)


def test_an_address_that_cannot_be_had_is_one_error():
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://nowhere.invalid:*")
    with pytest.raises(ConfigError, match=r"nowhere\.invalid"):
        EventPublisher(config, PAGE)
