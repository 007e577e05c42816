"""Answers of a server, and the state of an engine, for the page's tests."""

from __future__ import annotations

from typing import Any

STATE = {
    "engine": {
        "device": "made up for this picture",
        "dtype": "bfloat16",
        "weights_bytes": 70 * 2**30,
        "page_bytes": 2**21,
        "slot_bytes": 2**26,
        "cache_bytes": 48 * 2**30,
    },
    "page_size": 64,
    "grid": 64,
    "pages": {"used": 90, "cached": 8000, "free": 900, "total": 8990},
    "slots": {"used": 3, "cached": 210, "free": 43, "total": 256},
    "pages_a_slot": 0,
    "lost": {},
    "evicted": 0,
    "samples": [
        [300 - 10 * n, 900 * n, 700 * n, 190 * n, 400 * n, 12 * n + n % 5, max(0, n - 20)]
        for n in range(31)
    ],
    "prompts": [
        {
            "id": f"chatcmpl-{n}",
            "at": 40 - 7 * n,
            "num_tokens": 700 + 300 * n,
            "kv_length": 300 * n,
            "state_length": 300 * n,
            "reused": 300 * n,
            "lost": {"unseen": 600, "grid": 99, "last_token": 1},
            "hit": None,
        }
        for n in range(5)
    ],
    "num_running": 1,
    "num_waiting": 0,
    "running": [],
    "tree": {
        "num_runs": 4,
        "runs": [
            [0, None, 0, 0, 0, [], 0, None],
            [1, 0, 0, 20, 0, [[1280, "branch_point", 4]], 1, None],
            [2, 1, 20, 9, 0, [[1790, "answer_end", 1]], 1, None],
            [3, 1, 20, 4, 1, [[1472, "prompt_end", 2]], 1, None],
        ],
    },
}

USAGE = {
    "prompt_tokens": 400,
    "completion_tokens": 30,
    "total_tokens": 430,
    "prompt_tokens_details": {
        "cached_tokens": 320,
        "lost_tokens": {"unseen": 79, "last_token": 1},
    },
}


def stream(
    *deltas: Any, finish: str | None = "stop", usage: dict[str, Any] = USAGE, pauses: bool = False
) -> dict[str, Any]:
    """A stream of these deltas; a text is a piece of content. Without `finish` it does not end."""
    pieces = [{"content": delta} if isinstance(delta, str) else delta for delta in deltas]
    choices = [{"index": 0, "delta": piece, "finish_reason": None} for piece in pieces]
    if finish:
        choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    events = [{"choices": [choice], "usage": usage} for choice in choices]
    return {"events": events, "ends": finish is not None, "pauses": pauses}


def refusal(message: str, status: int = 400) -> dict[str, Any]:
    return {"status": status, "body": {"error": {"message": message}}}


def calls(*called: tuple[str, str]) -> list[dict[str, Any]]:
    """Deltas of tool calls: names with their arguments, which come in two pieces."""
    return [
        {"tool_calls": [piece]}
        for index, (name, arguments) in enumerate(called)
        for piece in (
            {"index": index, "id": f"call_{index}", "function": {"name": name, "arguments": ""}},
            {"index": index, "function": {"arguments": arguments[:5]}},
            {"index": index, "function": {"arguments": arguments[5:]}},
        )
    ]
