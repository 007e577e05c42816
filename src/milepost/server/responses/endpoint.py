"""/v1/responses: creates responses, and keeps them in the server's store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from milepost.server import conversation
from milepost.server.bodies import BODY_SIZE, size_of
from milepost.server.callers import Caller
from milepost.server.errors import HttpError, json_response
from milepost.server.responses.convert import Converted, items_of, to_chat
from milepost.server.responses.protocol import ITEM, ResponseItem, ResponsesRequest
from milepost.server.responses.store import StoredResponse
from milepost.server.responses.writer import Writer
from milepost.server.service import Service
from milepost.server.stream import send


async def respond(service: Service, request: ResponsesRequest, http: Request) -> Response:
    """Creates a response."""
    model = service.check_model(request.model)
    before, new_items, converted = await chat_of(service, request, http)
    listed: list[dict[str, Any]] = []
    if request.store is not False:
        listed = await service.large.run(lambda: _plain(new_items), http.scope[BODY_SIZE])
    turn = await conversation.begin(
        service, converted.chat, http, field="input", fits_max_tokens=True
    )

    def keep(body: dict[str, Any]) -> None:
        if request.store is not False:
            stored = _stored(body, before, new_items, listed)
            service.responses.put(owner_of(http), body["id"], stored)

    writer = Writer(request, turn, model, converted.names, keep)
    close, is_stream = turn.generation.close, request.stream
    return await send(writer, http, close, is_stream=is_stream, failed=writer.failed)


async def count_tokens(service: Service, request: ResponsesRequest, http: Request) -> Response:
    """Returns the length of the prompt."""
    service.check_model(request.model)
    _, _, converted = await chat_of(service, request, http)
    count = await conversation.count(service, converted.chat, http)
    return json_response({"object": "response.input_tokens", "input_tokens": count})


async def chat_of(
    service: Service, request: ResponsesRequest, http: Request
) -> tuple[StoredResponse | None, Sequence[ResponseItem], Converted]:
    """Returns the response that a request continues, the request's own items, and the chat request
    of the whole conversation."""
    store, owner, last = service.responses, owner_of(http), request.previous_response_id
    before = None if last is None else store.find(owner, last, "previous_response_id")
    new_items = store.resolved(owner, items_of(request.input))
    items = [*(() if before is None else before.conversation), *new_items]
    size = size_of(items) + http.scope[BODY_SIZE]
    try:
        converted = await service.large.run(lambda: to_chat(request, items), size)
    except ValidationError as error:
        finding = error.errors()[0]
        if finding["loc"] == ("messages",):
            message = "input: all of its items are of kinds that are left out here"
            raise HttpError(400, message, param="input") from error
        raise HttpError(400, finding["msg"].removeprefix("Value error, ")) from error
    except ValueError as error:
        raise HttpError(400, str(error), param="tools") from error
    return before, new_items, converted


def owner_of(http: Request) -> str:
    """Returns the caller's owner, as its key identifies it."""
    caller: Caller = http.scope["milepost.caller"]
    return caller.owner


def _plain(items: Sequence[ResponseItem]) -> list[dict[str, Any]]:
    return [item.model_dump(exclude_none=True) for item in items]


def _stored(
    body: dict[str, Any],
    before: StoredResponse | None,
    new_items: Sequence[ResponseItem],
    listed: Sequence[dict[str, Any]],
) -> StoredResponse:
    """Returns a response to store. `listed` are the new items as plain values."""
    said = [ITEM.validate_python(item) for item in body["output"]]
    num_bytes = len(msgspec.json.encode([*listed, *_plain(said)]))
    if before is not None:
        num_bytes += before.conversation_bytes
    return StoredResponse(
        body=body,
        input_items=[{"id": f"item_{place}", **item} for place, item in enumerate(listed)],
        conversation=(*(() if before is None else before.conversation), *new_items, *said),
        conversation_bytes=num_bytes,
        num_bytes=num_bytes + len(msgspec.json.encode(body)),
    )
