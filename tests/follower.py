"""Who knows the cache by its events alone, and refuses any that cannot be true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from milepost.cache import Cache, Chain
from milepost.cache.events import (
    Cleared,
    Departure,
    Event,
    PagesCached,
    PagesReachable,
    PagesUnreachable,
    StateCached,
)
from milepost.cache.tree import checkpoint_key

_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(list[Event])


class Follower:
    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[bytes, tuple[bytes, bytes]] = {}
        """Parent and tokens, by key."""
        self.states: dict[bytes, StateCached] = {}
        self.reachable: set[bytes] = set()
        self.salted: set[bytes] = set()
        self.ids: dict[bytes, int] = {}
        """Where each page was when it came: memory with a boundary moves some."""
        self._uses: Counter[bytes] = Counter()
        """Pages and states right behind a key."""

    def follow(self, events: Iterable[Event]) -> None:
        for event in _DECODER.decode(_ENCODER.encode(list(events))):
            match event:
                case PagesCached():
                    self._pages_came(event)
                case StateCached():
                    self._state_came(event)
                case PagesReachable():
                    self._reached(event)
                case PagesUnreachable(keys=keys):
                    assert self.reachable.issuperset(keys)
                    assert len(set(keys)) == len(keys)
                    self.reachable.difference_update(keys)
                case Departure():
                    self._left(event)
                case Cleared():
                    self.__init__(self.page_size)

    def _runs(self, event: PagesCached | PagesReachable) -> list[tuple[bytes, bytes, bytes]]:
        """Key, parent and tokens of each page."""
        size = 4 * self.page_size
        assert len(event.tokens) == size * len(event.keys)
        parents = [event.parent, *event.keys]
        return [
            (key, parent, event.tokens[size * index : size * (index + 1)])
            for index, (key, parent) in enumerate(zip(event.keys, parents, strict=False))
        ]

    def _pages_came(self, event: PagesCached) -> None:
        self.ids.update(zip(event.keys, event.ids, strict=True))
        for key, parent, tokens in self._runs(event):
            assert key not in self.pages
            self.pages[key] = parent, tokens
            self._uses[parent] += 1
            if event.is_salted:
                self.salted.add(key)
        assert self._position(event.parent) == event.position

    def _state_came(self, event: StateCached) -> None:
        assert event.key == checkpoint_key(event.parent, event.tokens)
        assert event.key not in self.states
        assert (event.tail_page is None) == (not event.tokens)
        assert self._position(event.parent) + len(event.tokens) // 4 == event.position
        self.states[event.key] = event
        self._uses[event.parent] += 1

    def _reached(self, event: PagesReachable) -> None:
        assert event.parent in self.reachable or event.parent not in self.pages
        assert event.is_salted == (event.keys[0] in self.salted)
        for key, parent, tokens in self._runs(event):
            assert key not in self.reachable
            assert self.pages[key] == (parent, tokens)
            self.reachable.add(key)
        assert self._position(event.parent) == event.position

    def _left(self, event: Departure) -> None:
        if event.what == "tail":
            assert event.key not in self.states, "it goes with its state"
            assert event.tokens
            return
        if event.what == "state":
            state = self.states.pop(event.key)
            assert (state.parent, state.tokens, state.position, state.id) == (
                event.parent,
                event.tokens,
                event.position,
                event.id,
            )
        else:
            assert not self._uses[event.key], "what builds on a page goes first"
            assert event.key not in self.reachable
            assert self.pages.pop(event.key) == (event.parent, event.tokens)
            assert self._position(event.parent) + self.page_size == event.position
        self._uses[event.parent] -= 1

    def _position(self, key: bytes) -> int:
        """Tokens up to the end of a page; 0 for a root. Costs the pages before it."""
        position = 0
        while key in self.pages:
            key = self.pages[key][0]
            position += self.page_size
        return position

    def hit(self, chain: Chain) -> int:
        """Where a prompt would resume from a state: the deepest one on its path."""
        size, last, best = self.page_size, len(chain) - 1, 0
        digests = [chain.root, *chain.full_digests()]
        for state in self.states.values():
            depth, rest = divmod(state.position, size)
            if best < state.position <= last and digests[depth] == state.parent:
                tail = chain.token_bytes(depth * size, depth * size + rest)
                best = state.position if tail == state.tokens else best
        return best

    def check(self, cache: Cache) -> None:
        """It knows exactly what there is."""
        nodes = cache.tree.nodes
        assert self.pages.keys() == nodes.keys()
        for key, (parent, tokens) in self.pages.items():
            node = nodes[key]
            assert (node.parent.digest, node.content) == (parent, tokens)
            assert (key in self.salted) == node.is_salted
            assert self.ids[key] == node.page or cache.storage.pages_a_slot
        kept = {c.key: c for c in cache.tree.at_slot.values()}
        assert self.states.keys() == kept.keys()
        for key, state in self.states.items():
            assert (state.id, state.position) == (kept[key].slot, kept[key].position)
            assert (state.kind, state.tokens) == (kept[key].kind, kept[key].tail)
        expected = set(nodes)
        if cache.slots_each:
            expected = {
                node.digest
                for checkpoint in kept.values()
                for node in checkpoint.node.ancestors()
                if not node.is_root
            }
        assert self.reachable == expected
