"""/v1/responses: creates responses, and serves stored ones. These stay in memory: the oldest are
dropped first, and none outlives the server."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from milepost.server import conversation
from milepost.server.bodies import size_of
from milepost.server.callers import Caller
from milepost.server.errors import HttpError
from milepost.server.responses.convert import Converted, items_of, to_chat
from milepost.server.responses.protocol import ITEM, ItemReference, ResponseItem, ResponsesRequest
from milepost.server.responses.writer import Writer
from milepost.server.service import Service
from milepost.server.stream import send

MAX_RESPONSES = 4096
MAX_BYTES = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response, and the conversation up to its end, without instructions."""

    body: dict[str, Any]
    input_items: Sequence[dict[str, Any]]
    conversation: Sequence[ResponseItem]
    num_bytes: int
    """Size of the whole conversation as JSON, so that a long chain counts with all that it keeps
    alive."""

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

    def put(self, owner: str, id_: str, stored: StoredResponse) -> None:
        """Stores a response, unless it is larger than the whole store."""
        self._stored[owner, id_] = stored
        self.items |= {(owner, item.id): item for item in stored.said}
        self.num_bytes += stored.num_bytes
        while len(self._stored) > self._max_responses or self.num_bytes > self._max_bytes:
            (whose, _), oldest = self._stored.popitem(last=False)
            self._forget(whose, oldest)

    def delete(self, owner: str, id_: str) -> bool:
        """Deletes a stored response. Returns whether there was one."""
        stored = self._stored.pop((owner, id_), None)
        if stored is None:
            return False
        self._forget(owner, stored)
        return True

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


async def respond(
    service: Service, store: ResponseStore, request: ResponsesRequest, http: Request
) -> Response:
    """Creates a response."""
    model = service.check_model(request.model)
    owner = owner_of(http)
    new_items, items, converted = await chat_of(service, store, request, http)
    turn = await conversation.begin(
        service, converted.chat, http, field="input", fits_max_tokens=True
    )

    def keep(body: dict[str, Any]) -> None:
        if request.store is not False:
            store.put(owner, body["id"], _stored(body, new_items, items))

    writer = Writer(request, turn, model, converted.names, keep)
    close, is_stream = turn.generation.close, request.stream
    return await send(writer, http, close, is_stream=is_stream, failed=writer.failed)


async def count_tokens(
    service: Service, store: ResponseStore, request: ResponsesRequest, http: Request
) -> dict[str, Any]:
    """Returns the length of the prompt."""
    service.check_model(request.model)
    _, _, converted = await chat_of(service, store, request, http)
    count = await conversation.count(service, converted.chat, http)
    return {"object": "response.input_tokens", "input_tokens": count}


async def chat_of(
    service: Service, store: ResponseStore, request: ResponsesRequest, http: Request
) -> tuple[Sequence[ResponseItem], Sequence[ResponseItem], Converted]:
    """Returns the items of a request, the items of its whole conversation, and the chat request."""
    before = _conversation_before(store, owner_of(http), request.previous_response_id)
    new_items = store.resolved(owner_of(http), items_of(request.input))
    items = [*before, *new_items]
    try:
        converted = await service.large.run(lambda: to_chat(request, items), size_of(items))
    except ValidationError as error:
        finding = error.errors()[0]
        if finding["loc"] == ("messages",):
            message = "input: all of its items are of kinds that are left out here"
            raise HttpError(400, message, param="input") from error
        raise HttpError(400, finding["msg"].removeprefix("Value error, ")) from error
    except ValueError as error:
        raise HttpError(400, str(error), param="tools") from error
    return new_items, items, converted


def find(store: ResponseStore, http: Request, id_: str) -> StoredResponse:
    """Returns a stored response of the caller. Raises HttpError 404."""
    stored = store.get(owner_of(http), id_)
    if stored is None:
        raise _no_such(id_, "response_id")
    return stored


def delete(store: ResponseStore, http: Request, id_: str) -> dict[str, Any]:
    """Deletes a stored response of the caller. Raises HttpError 404."""
    if not store.delete(owner_of(http), id_):
        raise _no_such(id_, "response_id")
    return {"id": id_, "object": "response", "deleted": True}


def owner_of(http: Request) -> str:
    """Returns the caller's owner, as its key identifies it."""
    caller: Caller = http.scope["milepost.caller"]
    return caller.owner


def _conversation_before(
    store: ResponseStore, owner: str, id_: str | None
) -> Sequence[ResponseItem]:
    if id_ is None:
        return ()
    stored = store.get(owner, id_)
    if stored is None:
        raise _no_such(id_, "previous_response_id")
    return stored.conversation


def _no_such(id_: str, field: str, what: str = "response") -> HttpError:
    return HttpError(
        404,
        f"{field}={id_!r}: no such {what} is stored here: it was made with store=false, with "
        "another key, or long ago",
        param=field,
    )


def _stored(
    body: dict[str, Any], new_items: Sequence[ResponseItem], items: Sequence[ResponseItem]
) -> StoredResponse:
    said = [ITEM.validate_python(item) for item in body["output"]]
    conversation_ = (*items, *said)
    plain = [item.model_dump(exclude_none=True) for item in conversation_]
    num_bytes = len(msgspec.json.encode(plain)) + len(msgspec.json.encode(body))
    listed = [
        {"id": item.id or f"item_{place}", **item.model_dump(exclude_none=True)}
        for place, item in enumerate(new_items)
    ]
    return StoredResponse(
        body=body, input_items=listed, conversation=conversation_, num_bytes=num_bytes
    )
