"""Changes a checkpoint's files as somebody careless or hostile would, from a seed."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 2**15, 2**31, 2**40, 2**63, 10**30, -(2**40)),
    *(0.0, -0.5, 1.5, 1e308, float("inf"), float("nan"), {"__float__": "NaN"}, {"__float__": 3}),
    *(
        "",
        "x",
        "16",
        "auto",
        "\x00",
        "\ud800",
        "../../etc/passwd",
        "re:(.*)*!",
        "re:(",
        "x" * 10_000,
    ),
    *([], {}, [[]], [None], [1, 2], ["x"], {"a": 1}, [0] * 3000, [2**40], [[1], [2]]),
]


def mutate(folder: Path, name: str, seed: int) -> str:
    """Change the file of this name in one or two places; returns what was done."""
    rng = random.Random(f"{name} {seed}")
    path = folder / name
    if name.endswith(".json"):
        data = _mutated_json(path.read_bytes(), rng)
    elif name.endswith(".safetensors"):
        data = _mutated_header(path.read_bytes(), rng)
    else:
        data = _mutated_bytes(path.read_bytes(), rng)
    path.unlink()  # it may be a link to the original
    path.write_bytes(data)
    return f"{name}, seed {seed}"


def copy(source: Path, target: Path) -> Path:
    """A folder whose files are links to those of another."""
    target.mkdir()
    for path in source.iterdir():
        os.link(path, target / path.name)
    return target


def _mutated_json(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.15:
        return _mutated_bytes(data, rng)
    content = json.loads(data)
    for _ in range(rng.choice((1, 1, 2))):
        content = _changed(content, rng)
    return json.dumps(content).encode()


def _mutated_header(data: bytes, rng: random.Random) -> bytes:
    count = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + count], data[8 + count :]
    match rng.randrange(6):
        case 0:
            return data[: rng.randrange(len(data))]
        case 1:
            size = rng.choice((0, 1, count - 1, count + 1, 2**31, 2**63, 2**64 - 1))
            return size.to_bytes(8, "little") + data[8:]
        case 2:
            header = _mutated_bytes(header, rng)
        case _:
            header = _mutated_json(header, rng)
    return len(header).to_bytes(8, "little") + header + rest


def _mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data) + 1)
    changes: list[Callable[[], bytes]] = [
        lambda: b"",
        lambda: data[:place],
        lambda: data[:place] + rng.randbytes(1) + data[place + 1 :],
        lambda: data[:place] + b"\xff\xfe\x00" + data[place:],
        lambda: b"\xef\xbb\xbf" + data,
        lambda: b"[" * 200_000,
        lambda: b'{"a":' * 90 + data + b"}" * 90,
        lambda: b"[" + data + b"]",
        lambda: data + data,
        lambda: b"9" * 10_000,
        lambda: data.replace(b"1", b"9" * 5000, 1),
    ]
    return rng.choice(changes)()


def _changed(content: Any, rng: random.Random) -> Any:
    """One value, or its name, changed at a random place."""
    places = _places(content)
    if not places:
        return rng.choice(VALUES)
    holder, key = rng.choice(places)
    match rng.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(("x", "type", "rope_theta", "text_config", str(key) + "s"))] = holder[
                key
            ]
        case 2:
            other, place = rng.choice(places)
            holder[key] = json.loads(json.dumps(other[place])) if place in _keys(other) else None
        case 3:
            holder[key] = _deep(rng)
        case _:
            holder[key] = rng.choice(VALUES)
    return content


def _deep(rng: random.Random) -> Any:
    value: Any = 1
    for _ in range(rng.choice((5, 70, 300))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def _keys(holder: Any) -> list[Any]:
    return list(holder) if isinstance(holder, dict) else list(range(len(holder)))


def _places(content: Any) -> list[tuple[Any, Any]]:
    """Holders with their keys: shallow ones as often as all that lie deeper."""
    found: list[tuple[Any, Any]] = []
    todo, shallow = [(content, 0)], 0
    while todo:
        holder, depth = todo.pop(0)
        if not isinstance(holder, dict | list):
            continue
        for key in _keys(holder)[:200]:
            found.append((holder, key))
            todo.append((holder[key], depth + 1))
        if depth == 0:
            shallow = len(found)
    return found[:shallow] * max(1, len(found) // max(shallow, 1)) + found
