"""Errors in the form that Anthropic's clients read."""

from __future__ import annotations

from typing import Any

from milepost.server import errors

PREFIX = "/v1/messages"

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def body_of(error: Exception) -> dict[str, Any]:
    """{"type": "error", "error": {type, message}}"""
    status = errors.status_of(error)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = errors.body_of(error)["error"]["message"]
    return {"type": "error", "error": {"type": kind, "message": message}}


def body_for(path: str, error: Exception) -> dict[str, Any]:
    """The body of an error in the form of the API that `path` belongs to."""
    return body_of(error) if path.startswith(PREFIX) else errors.body_of(error)
