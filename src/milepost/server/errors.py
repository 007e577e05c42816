"""Turns every error into a status and a body that OpenAI's and Anthropic's clients read."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from milepost.errors import (
    EngineAsleepError,
    EngineDeadError,
    InvalidPromptError,
    InvalidRequestError,
    MilepostError,
    QueueFullError,
    QueueWaitError,
    RequestTimeoutError,
    ServerClosingError,
)

RETRY_AFTER_S = 1
TOO_LONG = "context_length_exceeded"
"""OpenAI's code for a prompt that the model has no room for."""
MAX_MESSAGE_LEN = 2000
"""Largest length of a message. Longer ones repeat what the client sent, so their middle is left
out."""

MEANINGS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request cannot be served; `error.param` names the field."},
    401: {"description": "No valid key."},
    404: {"description": "No such model."},
    413: {"description": "The body is too large."},
    415: {"description": "The body is declared as something other than JSON."},
    429: {"description": "The queue is full; see Retry-After."},
    503: {
        "description": "The wait would be too long (see Retry-After), the engine has died, or the "
        "server is shutting down."
    },
    504: {"description": "The request took longer than the server allows."},
}
"""Meanings of the response statuses, for the description of the API."""

_STATUS: dict[type[MilepostError], int] = {
    InvalidRequestError: 400,
    QueueFullError: 429,
    ServerClosingError: 503,
    EngineAsleepError: 503,
    EngineDeadError: 503,
    QueueWaitError: 503,
    RequestTimeoutError: 504,
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout",
    409: "conflict",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_error",
    431: "request_headers_too_large",
    499: "client_closed_request",
    500: "internal_error",
    501: "not_implemented",
    503: "service_unavailable",
    504: "timeout",
}
_OTHER_TASKS = ("/embed", "/score", "/rerank", "/pooling", "/classify", "/audio", "/images")
"""Beginnings of paths that other servers have for other kinds of models."""
_SLEEP = ("/sleep", "/wake_up", "/is_sleeping")
_FIELD = re.compile(r"^([a-z_]+)(?:\[[^]]*\])?(?:=|: )")
"""Beginning of a message about one field."""


class HttpError(HTTPException):
    """An error with its own status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param
        self.code = code


class ClientGoneError(HttpError):
    """The client left before its response; logs and metrics show status 499."""

    def __init__(self) -> None:
        super().__init__(499, "the client left, or closed its side before the response had come")


def status_of(error: Exception) -> int:
    """Returns the HTTP status of an error."""
    if isinstance(error, HttpError):
        return error.status_code
    return next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)


def message_of(error: Exception) -> str:
    """Returns the message without the status."""
    message = error.detail if isinstance(error, HttpError) else str(error)
    if len(message) <= MAX_MESSAGE_LEN:
        return message
    half = MAX_MESSAGE_LEN // 2
    return f"{message[:half]} ... {message[-half:]}"


def body_of(error: Exception) -> dict[str, Any]:
    """{"error": {message, type, param, code}}"""
    status, message, param, code = status_of(error), message_of(error), None, None
    if isinstance(error, HttpError):
        param, code = error.param, error.code
    elif isinstance(error, InvalidRequestError):
        field = _FIELD.match(message)
        param = field.group(1) if field else None
        if isinstance(error, InvalidPromptError) and error.is_too_long:
            code = TOO_LONG
    elif status == 500:
        message = "the server failed; its log says why"
    return error_body(message, _TYPES.get(status, "invalid_request_error"), param, code or status)


def error_body(
    message: str, kind: str, param: str | None = None, code: str | int | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def response_of(error: Exception, body: Mapping[str, Any]) -> Response:
    """Returns the response around a body."""
    status = status_of(error)
    headers = dict(getattr(error, "headers", None) or {})
    if status in (429, 503):
        headers["retry-after"] = str(getattr(error, "retry_after_s", RETRY_AFTER_S))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(body, status, headers)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(body), status, headers=headers, media_type="application/json"
    )


def of_validation(error: RequestValidationError, fields: Collection[str]) -> HttpError:
    """Describes what is wrong with a body, and where: the deepest finding, and the number of
    others.

    `fields` are the names of all fields; other steps of a location name the member of a union that
    was tried. Of several findings in one place, a wrong type says least: a list that is too long is
    not a string either.
    """
    findings = error.errors()
    paths = [path_of(finding, fields) for finding in findings]

    def worth(i: int) -> tuple[int, bool, int]:
        depth = paths[i].count(".") + paths[i].count("[")
        return depth, not findings[i]["type"].endswith("_type"), -i

    best = max(range(len(findings)), key=worth)
    message = _message(findings[best], paths[best])
    others = len(set(paths) - {paths[best]})
    if others:
        message += f" (and {others} more)"
    return HttpError(400, message, param=paths[best] or None)


def path_of(finding: Mapping[str, Any], fields: Collection[str]) -> str:
    """Returns ("body", "messages", 0, "content") as messages[0].content."""
    steps = finding["loc"][1:]
    path = ""
    for place, step in enumerate(steps):
        is_unknown_field = finding["type"] == "extra_forbidden" and place == len(steps) - 1
        if isinstance(step, int):
            path += f"[{step}]"
        elif step in fields or is_unknown_field:
            path += f".{step}" if path else step
    return path


def _message(finding: Mapping[str, Any], where: str) -> str:
    if finding["type"] == "extra_forbidden":
        return f"{where}: no such field here"
    if finding["type"] == "missing" and where:
        return f"{where}: this field is required"
    text: str = finding["msg"].removeprefix("Value error, ")
    if not where and finding["type"] == "value_error":
        return text
    if finding["loc"][0] == "query":
        return f"{finding['loc'][-1]}: {text[0].lower()}{text[1:]}"
    if not where:
        return f"the body is not a JSON object for this endpoint: {finding['msg']}"
    return f"{where}: {text[0].lower()}{text[1:]}"


def of_http(error: HTTPException, method: str, path: str, root: str) -> HttpError:
    """Explains an error of Starlette's, which is only a status: no such path, no such method.

    `path` is without the root; messages name the whole path, as the client asked for it.
    """
    message, asked = str(error.detail), root + path
    if error.status_code == 404 and path.removeprefix("/v1").startswith(_OTHER_TASKS):
        message = f"{asked} is not served: this server's models generate text"
    elif error.status_code == 404 and path in _SLEEP:
        message = f"{asked} is not served: start the server with --enable-sleep-mode"
    elif error.status_code == 404:
        message = f"{asked} does not exist: {root}/docs lists all paths"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{asked} does not take {method}: use {allowed}"
    return HttpError(error.status_code, message, headers=error.headers)


# --- in the form of Anthropic's API ------------------------------------------------------------

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_body_of(error: Exception) -> dict[str, Any]:
    """{"type": "error", "error": {type, message}}"""
    status = status_of(error)
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = body_of(error)["error"]["message"]
    return {"type": "error", "error": {"type": kind, "message": message}}


_NAMED = {
    "/v1/messages": {"response_format": "output_config.format"},
    "/v1/responses": {"response_format": "text.format", "messages": "input"},
}
"""Names of a chat request's fields in the APIs whose requests are converted to one."""


def body_for(path: str, error: Exception) -> dict[str, Any]:
    """Returns the body of an error in the form, and with the field names, of the API that `path`
    belongs to."""
    api = next((api for api in _NAMED if path.startswith(api)), "")
    body = anthropic_body_of(error) if api == "/v1/messages" else body_of(error)
    fields = body["error"]
    for name, named in _NAMED.get(api, {}).items():
        if fields["message"].startswith(f"{name}: "):
            fields["message"] = named + fields["message"].removeprefix(name)
        if fields.get("param") == name:
            fields["param"] = named
    return body
