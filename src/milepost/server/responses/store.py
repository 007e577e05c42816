"""The responses that a server keeps in memory: the oldest are dropped first, and none outlives the
server."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from milepost.server.errors import HttpError
from milepost.server.responses.protocol import ItemReference, ResponseItem

MAX_RESPONSES = 4096
MAX_BYTES = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response, and the conversation up to its end, without instructions."""

    body: dict[str, Any]
    input_items: Sequence[dict[str, Any]]
    conversation: Sequence[ResponseItem]
    conversation_bytes: int
    """Size of the whole conversation as JSON, so that a long chain counts with all that it keeps
    alive."""
    num_bytes: int
    """Size of the conversation and the body."""

    @property
    def said(self) -> Sequence[ResponseItem]:
        """The items of the answer."""
        return self.conversation[len(self.conversation) - len(self.body.get("output", ())) :]


class ResponseStore:
    """The stored responses of one server."""

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self.items: dict[tuple[str, str], ResponseItem] = {}
        """Items of the stored answers, by owner and id."""
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def get(self, owner: str, id_: str) -> StoredResponse | None:
        return self._stored.get((owner, id_))

    def find(self, owner: str, id_: str, field: str = "response_id") -> StoredResponse:
        """Returns a stored response, whose id is in this field. Raises HttpError 404."""
        stored = self.get(owner, id_)
        if stored is None:
            raise _no_such(id_, field)
        return stored

    def put(self, owner: str, id_: str, stored: StoredResponse) -> None:
        """Stores a response, unless it is larger than the whole store."""
        self._stored[owner, id_] = stored
        self.items |= {(owner, item.id): item for item in stored.said}
        self.num_bytes += stored.num_bytes
        while len(self._stored) > self._max_responses or self.num_bytes > self._max_bytes:
            (owner_of_oldest, _), oldest = self._stored.popitem(last=False)
            self._forget(owner_of_oldest, oldest)

    def delete(self, owner: str, id_: str) -> None:
        """Deletes a stored response. Raises HttpError 404."""
        self._forget(owner, self.find(owner, id_))
        del self._stored[owner, id_]

    def resolved(self, owner: str, items: Sequence[ResponseItem]) -> Sequence[ResponseItem]:
        """Returns the items, with those of stored answers in place of references to them. Raises
        HttpError 404, or 400 if one is named twice: a short body could make an endless prompt."""
        named = [item.id for item in items if isinstance(item, ItemReference)]
        if len(set(named)) < len(named):
            raise HttpError(400, "input: name each item once", param="input")
        return [
            self._item(owner, item.id) if isinstance(item, ItemReference) else item
            for item in items
        ]

    def _item(self, owner: str, id_: str) -> ResponseItem:
        item = self.items.get((owner, id_))
        if item is None:
            raise _no_such(id_, "input", "item")
        return item

    def _forget(self, owner: str, stored: StoredResponse) -> None:
        self.num_bytes -= stored.num_bytes
        for item in stored.said:
            self.items.pop((owner, item.id), None)


def _no_such(id_: str, field: str, what: str = "response") -> HttpError:
    return HttpError(
        404,
        f"{field}={id_!r}: no such {what} is stored here: it was made with store=false, with "
        "another key, or long ago",
        param=field,
    )
