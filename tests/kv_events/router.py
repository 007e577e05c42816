"""Who knows a server by what it publishes alone, as a router does: a longest prefix of pages that
some memory of it has."""

from __future__ import annotations

import msgspec
import zmq


class Router:
    def __init__(self, block_size: int) -> None:
        self.blocks: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}
        """By hash: parent and tokens."""
        self.media: dict[bytes, set[str]] = {}
        self.block_size = block_size
        self._children: dict[tuple[bytes | None, tuple[int, ...]], bytes] = {}

    def feed(self, payload: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            self._take(event if isinstance(event, dict) else _named(event))

    def _take(self, event: dict) -> None:
        if event["type"] == "AllBlocksCleared":
            for known in (self.blocks, self.media, self._children):
                known.clear()
            return
        medium = event["medium"]
        assert medium in ("GPU", "CPU", "STORAGE")
        if event["type"] == "BlockRemoved":
            for key in event["block_hashes"]:
                self.media[key].remove(medium)
                if not self.media[key]:
                    del self.media[key]
                    del self._children[self.blocks.pop(key)]
            return
        parent = event["parent_block_hash"]
        assert event["block_size"] == self.block_size
        assert parent is None or medium in self.media[parent], "it stands behind what is known"
        assert (event["lora_id"], event["lora_name"]) == (None, None)
        tokens = event["token_ids"]
        assert len(tokens) == self.block_size * len(event["block_hashes"])
        for index, key in enumerate(event["block_hashes"]):
            held = tuple(tokens[self.block_size * index : self.block_size * (index + 1)])
            assert medium not in self.media.setdefault(key, set())
            assert self.blocks.setdefault(key, (parent, held)) == (parent, held)
            self.media[key].add(medium)
            self._children[parent, held] = key
            parent = key

    def hit(self, tokens: list[int]) -> int:
        """What a prompt is predicted to hit; its last token is computed in any case."""
        parent, length = None, 0
        while length + self.block_size < len(tokens):
            key = self._children.get((parent, tuple(tokens[length : length + self.block_size])))
            if key is None:
                break
            parent, length = key, length + self.block_size
        return length

    def held_by(self, medium: str) -> set[bytes]:
        return {key for key, media in self.media.items() if medium in media}


class Following:
    """A router's view of a server, brought up to date by what is replayed."""

    def __init__(self, address: str) -> None:
        self.router = Router(64)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, 10_000)
        self._socket.connect(address)
        self._next = 0

    @property
    def number(self) -> int:
        """Of the last message that was taken in; -1 for none."""
        return self._next - 1

    def catch_up(self) -> None:
        self._socket.send_multipart([b"", self._next.to_bytes(8, "big")])
        while True:
            _, _, number, payload = self._socket.recv_multipart()
            if number == b"\xff" * 8:
                return
            assert int.from_bytes(number, "big") == self._next, "none is missing"
            self.router.feed(payload)
            self._next += 1

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


def _named(event: list) -> dict:
    names = {
        "BlockStored": (
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "lora_name",
        ),
        "BlockRemoved": ("block_hashes", "medium"),
        "AllBlocksCleared": (),
    }
    kind, *values = event
    return {"type": kind, **dict(zip(names[kind], values, strict=True))}
