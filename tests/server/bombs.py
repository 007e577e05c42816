"""Requests that are meant to hurt: bodies, forms, texts, and what comes before a body.

Each of BODIES is (path, body), and a body may be a function that makes it: all of them together
take half a second. Each of RAW is the pieces that are sent on a connection of its own.
A server answers each with a 4xx, or with a right answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

MIB = 2**20
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "a"}
EPHEMERAL = {"type": "ephemeral"}


Body = bytes | Callable[[], bytes]


def _dumped(body: Any) -> Body:
    return lambda: json.dumps(body).encode()


def _repeated(head: bytes, unit: bytes, tail: bytes, size: int = MIB) -> Body:
    return lambda: head + b",".join([unit] * (size // (len(unit) + 1))) + tail


def _lists() -> Iterator[tuple[str, str, Body]]:
    """Long lists of what does not belong there."""
    units = {"1": b"1", "text": b'"ab"', "float": b"1.5", "null": b"null", "list": b"[]"}
    units |= {"object": b"{}", "true": b"true", "large": b"99999999999", "-1": b"-1"}
    for name, unit in units.items():
        for last in ("1", '"a"', "[1]"):
            body = _repeated(b'{"prompt": [', unit, f", {last}]}}".encode(), MIB // 2)
            yield f"prompt of {name}, then {last}", COMPLETIONS, body
        yield f"messages of {name}", CHAT, _repeated(b'{"messages": [', unit, b"]}")
        parts = b'{"messages": [{"role": "user", "content": ['
        yield f"parts of {name}", CHAT, _repeated(parts, unit, b"]}]}")
    for field in ("stop", "stop_token_ids", "cache_marks", "logprobs", "seed"):
        head = b'{"prompt": "a", "%s": [' % field.encode()
        yield f"{field} of null", COMPLETIONS, _repeated(head, b"null", b"]}")
    head = b'{"messages": [{"role": "user", "content": "a"}], "tools": ['
    yield "tools of null", CHAT, _repeated(head, b"null", b"]}")
    yield "tokens of text", "/detokenize", _repeated(b'{"tokens": [', b'"a"', b"]}")
    yield "tokens too large", "/detokenize", _repeated(b'{"tokens": [', b"4000000000", b"]}")


def _shapes() -> Iterator[tuple[str, str, Body]]:
    """Bodies that are large or deep in other ways."""
    yield "nothing", COMPLETIONS, b""
    yield "no JSON", COMPLETIONS, b"\x00" * MIB
    yield "deep lists", COMPLETIONS, b'{"prompt": ' + b"[" * 50_000
    yield "deeper lists", COMPLETIONS, b'{"prompt": ' + b"[" * MIB
    yield "deep objects", CHAT, b'{"a":' * 50_000
    yield "an open string", COMPLETIONS, b'{"prompt": "' + b"a" * MIB
    yield "escapes", COMPLETIONS, b'{"prompt": "' + b"\\u0061" * (MIB // 6) + b'"}'
    yield "half a character", COMPLETIONS, b'{"prompt": "\\ud800"}'
    yield "a huge number", COMPLETIONS, b'{"prompt": "a", "max_tokens": ' + b"9" * 100_000 + b"}"
    fields = {f"f{i}": i for i in range(20_000)}
    yield "fields", COMPLETIONS, _dumped({"prompt": "a", **fields})
    yield "fields of a message", CHAT, _dumped({"messages": [{**USER, **fields}]})
    yield "biases", COMPLETIONS, _dumped({"prompt": "a", "logit_bias": dict.fromkeys(fields, 1)})
    yield "a model's name", COMPLETIONS, _dumped({"prompt": "a", "model": "m" * MIB})
    yield "a user's name", COMPLETIONS, _dumped({"prompt": "a", "user": "u" * MIB})
    yield "a salt", COMPLETIONS, _dumped({"prompt": "a", "cache_salt": "s" * MIB})
    words = [f"{i} fox" * 200 for i in range(256)]
    yield "bad words", COMPLETIONS, _dumped({"prompt": "a", "bad_words": words, "max_tokens": 9})
    yield "answers", COMPLETIONS, _dumped({"prompt": "a", "n": 10**6})
    yield "prompts", COMPLETIONS, _dumped({"prompt": ["a"] * 60_000, "max_tokens": 1})
    rendered = f"{COMPLETIONS}/render"
    yield "empty prompts to render", rendered, _dumped({"prompt": [""] * 500_000})
    yield "ids to render", rendered, _repeated(b'{"prompt": [', b"1", b"]}")
    yield "a long text", COMPLETIONS, _dumped({"prompt": "word " * 200_000})
    yield "spaces", COMPLETIONS, _dumped({"prompt": " " * MIB})
    yield "one letter", COMPLETIONS, _dumped({"prompt": "a" * MIB})
    yield "accents", COMPLETIONS, _dumped({"prompt": "e\u0301" * 100_000})
    yield "a long message", CHAT, _dumped({"messages": [{**USER, "content": "word " * 200_000}]})
    yield "messages", CHAT, _dumped({"messages": [USER] * 30_000})
    part = {"type": "text", "text": "a", "cache_control": EPHEMERAL}
    marked = [{"role": "user", "content": [part] * 12_000}]
    yield "breakpoints", CHAT, _dumped({"messages": marked, "max_tokens": 1})
    yield (
        "marked messages",
        CHAT,
        _dumped({"messages": [{**USER, "cache_control": EPHEMERAL}] * 8000, "max_tokens": 1}),
    )
    kwargs = {f"k{i}": i for i in range(20_000)}
    yield "template variables", CHAT, _dumped({"messages": [USER], "chat_template_kwargs": kwargs})
    named = {"messages": [USER], "chat_template_kwargs": {"k" * MIB: 1}}
    yield "a template variable's name", CHAT, _dumped(named)
    yield (
        "a template",
        CHAT,
        _dumped(
            {"messages": [USER], "chat_template_kwargs": {"chat_template": "{{ 'a' * 10**9 }}"}}
        ),
    )


def _called(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _tool_texts() -> Iterator[tuple[str, str, Body]]:
    """Calls in messages, and tools."""
    for name, arguments in {
        "no JSON": "{" * 100_000,
        "deep JSON": "[" * 100_000 + "]" * 100_000,
        "a long argument": json.dumps({"a": "x" * 200_000}),
        "many arguments": json.dumps({f"a{i}": i for i in range(20_000)}),
        "tags": json.dumps({"a": "</tool_call><tool_call>" * 5_000}),
    }.items():
        body = {"messages": [USER, _called(arguments), USER], "max_tokens": 1}
        yield f"a call with {name}", CHAT, _dumped(body)
    call = {"function": {"name": "f" * 100_000, "arguments": "{}"}}
    calls = {"role": "assistant", "tool_calls": [call] * 10}
    yield "calls of long names", CHAT, _dumped({"messages": [USER, calls, USER], "max_tokens": 1})
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "wrong"}}}
    body = {"messages": [USER], "tools": [tool], "tool_choice": "required"}
    yield "a tool of no type", CHAT, _dumped(body)
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(5000)]
    yield "many tools", CHAT, _dumped({**body, "tools": tools})


def _optional(number: int, schema: Any = None) -> dict[str, Any]:
    named = {f"key{i}": schema or {"type": "string"} for i in range(number)}
    return {"type": "object", "properties": named, "additionalProperties": False}


def _deep(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


SCHEMAS: dict[str, Any] = {
    "patterns": {"patternProperties": {f"^k{i:04d}$": {} for i in range(1000)}},
    "overlapping patterns": {"patternProperties": {f"^k{i}": {} for i in range(300)}},
    "optional": _optional(5000),
    "required": {**_optional(5000), "required": [f"key{i}" for i in range(5000)]},
    "a large enum": {"enum": [f"value {i}" for i in range(5000)]},
    "many shapes": {"anyOf": [_optional(3, {"const": i}) for i in range(1000)]},
    "all of many": {"allOf": [{"type": "string", "pattern": f"a{{{i}}}"} for i in range(200)]},
    "itself": {"$ref": "#"},
    "a ring": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
    "a reference away": {"$ref": "http://127.0.0.1:9/x"},
    "depth": {"$ref": "#/" + "a/" * 10_000},
    "a long string": {"type": "string", "minLength": 10**6, "maxLength": 10**9},
    "a long list": {"type": "array", "minItems": 10**6, "items": {"type": "integer"}},
    "a large number": {"type": "integer", "minimum": 10**300, "maximum": 10**301},
    "a fine number": {"type": "number", "multipleOf": 1e-300},
    "no type": {"type": "wrong"},
    "types that are none": {"type": 5, "properties": 7},
    "an unknown word": {"uniqueItems": True, "type": "array"},
    "a pattern that is none": {"type": "string", "pattern": "("},
    "a growing pattern": {"type": "string", "pattern": "(a|b)*a(a|b){200}"},
}
REGEXES = {
    "open": "(",
    "powers": "((a{1,1000}){1,1000}){1,1000}",
    "stars": "(.*a){500}",
    "a far look back": "(a|b)*a(a|b){1000}",
    "words": r"(\w+\s?){1,500}",
    "optional": "(?:a?){1000}a{1000}",
    "alternatives": "|".join(f"word{i}.*" for i in range(2000)),
    "every letter": r"(?:[\p{L}\p{N}]{1,50}[\s\S]?){1,400}",
    "too long": "a" * 300_000,
    "a back reference": r"(a)\1",
}
GRAMMARS = {
    "no start": "begin: x",
    "nothing": "start: start",
    "ambiguous": 'start: e\ne: e e | e e e | "x"',
    "deep": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
    "lexemes": "start: ("
    + " | ".join(f"/[a-z]*{chr(97 + i % 26)}[a-z]{{{i}}}/" for i in range(99))
    + ")*",
    "many words": "start: " + " | ".join(f'"word {i}"' for i in range(10_000)),
}


def _forms() -> Iterator[tuple[str, str, Body]]:
    own = {"prompt": "a", "max_tokens": 12, "seed": 1}
    for name, schema in SCHEMAS.items():
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        yield f"schema: {name}", COMPLETIONS, _dumped({**own, "response_format": form})
    for kind, forms in (("regex", REGEXES), ("grammar", GRAMMARS)):
        for name, form in forms.items():
            body = {**own, "structured_outputs": {kind: form}}
            yield f"{kind}: {name}", COMPLETIONS, _dumped(body)
    body = {**own, "structured_outputs": {"choice": [f"choice {i}" for i in range(10_000)]}}
    yield "choices", COMPLETIONS, _dumped(body)
    yield (
        "a deep schema",
        COMPLETIONS,
        _dumped({**own, "structured_outputs": {"json": _deep(9999)}}),
    )


BODIES: dict[str, tuple[str, Body]] = {
    name: (path, body)
    for kind in (_lists, _shapes, _tool_texts, _forms)
    for name, path, body in kind()
}

_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
_LINE = b"x-name: " + b"a" * 1000 + b"\r\n"
RAW: dict[str, list[bytes]] = {
    "one header": [_HEAD, b"x: ", *[b"a" * 65536] * 40],
    "many headers": [_HEAD, *[_LINE * 60] * 40],
    "empty headers": [_HEAD, *[b"a: b\r\n" * 10_000] * 40],
    "a path": [b"GET /", *[b"a" * 65536] * 40],
    "no request": [b"\x16\x03\x01" * 20_000] * 40,
    "line ends": [b"\r\n" * 30_000] * 40,
    "trailers": [_HEAD, b"transfer-encoding: chunked\r\n\r\n0\r\n", *[_LINE * 60] * 40],
    "a chunk's extension": [_HEAD, b"transfer-encoding: chunked\r\n\r\n1;", *[b"a" * 65536] * 40],
    "a negative length": [_HEAD, b"content-length: -1\r\n\r\n{}"],
    "a length that is none": [_HEAD, b"content-length: x\r\n\r\n{}"],
    "a length beyond bounds": [_HEAD, b"content-length: 99999999999999999999\r\n\r\n{}"],
    "two lengths": [_HEAD, b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}a"],
    "a length too much": [_HEAD, b"content-length: 99999999\r\n\r\n"],
    "both framings": [_HEAD, b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"],
    "requests ahead": [(_HEAD + b"content-length: 2\r\n\r\n{}") * 2000],
    "another protocol": [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
    "an upgrade": [b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"],
}
