"""/v1/responses: creates responses, and keeps them in the server's store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from milepost.server import conversation
from milepost.server.bodies import size_of
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
    new_items, items, converted = await chat_of(service, request, http)
    turn = await conversation.begin(
        service, converted.chat, http, field="input", fits_max_tokens=True
    )

    def keep(body: dict[str, Any]) -> None:
        if request.store is not False:
            service.responses.put(owner_of(http), body["id"], _stored(body, new_items, items))

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
) -> tuple[Sequence[ResponseItem], Sequence[ResponseItem], Converted]:
    """Returns the items of a request, the items of its whole conversation, and the chat request."""
    store, owner, last = service.responses, owner_of(http), request.previous_response_id
    before: Sequence[ResponseItem] = ()
    if last is not None:
        before = store.find(owner, last, "previous_response_id").conversation
    new_items = store.resolved(owner, items_of(request.input))
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


def owner_of(http: Request) -> str:
    """Returns the caller's owner, as its key identifies it."""
    caller: Caller = http.scope["milepost.caller"]
    return caller.owner


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
