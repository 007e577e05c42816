"""Defines the load: sessions, each a conversation of one turn or more.

Pure and seeded: the same arguments return the same sessions. Texts are made of words of one or two
tokens each; the server's usage has the exact number.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

from milepost.errors import ConfigError
from milepost.small_files import read_lines

WorkloadKind = Literal["shared-prefix", "multi-turn", "agent", "labels", "trace"]

MAX_LENGTH = 10_000_000
"""Largest length that a trace may give. More words take long to make up, and no model accepts them.
"""

LABEL_SHARED_WORDS, LABEL_OWN_WORDS, LABEL_TOKENS = 200, 2, 10
"""Sizes of `labels`, as in https://github.com/vllm-project/vllm/issues/36010: about 369 tokens are
shared, one to four are a request's own, and ten come out."""

_SYLLABLES = tuple(a + b for a in "bdfglmnprs" for b in "aeiou")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request, with the messages that are new in it. Answers join the conversation
    automatically."""

    messages: tuple[Mapping[str, Any], ...]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    turns: tuple[Turn, ...]
    arrival_s: float | None = None
    """Arrival time, if a trace gives one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """Shape of the load; raises ConfigError."""

    workload: WorkloadKind = "shared-prefix"
    """`shared-prefix`: groups of single requests with a common system prompt; `multi-turn`: chats;
    `agent`: long growing conversations with short answers; `labels`: one system prompt of about
    369 tokens, up to two words of each request's own and ten tokens out, whatever is set for these;
    `trace`: a file of hash ids."""
    num_sessions: int = 64
    """Number of conversations, or of single requests."""
    num_groups: int = 4
    """Number of different system prompts."""
    num_turns: int = 4
    """Number of turns in a conversation (`multi-turn` and `agent`)."""
    shared_words: int = 400
    """Number of words in a system prompt."""
    own_words: int = 100
    """Number of words in each message."""
    output_tokens: int = 64
    """Largest number of tokens in an answer."""
    trace: str | None = None
    """JSON lines (.gz too) with input_length, output_length, hash_ids and timestamp_ms (or
    timestamp)."""
    trace_scale: float = 1.0
    """Multiplies the trace's lengths."""
    trace_speed: float = 1.0
    """Divides the trace's times: 2 plays it twice as fast."""
    workload_seed: int = 0
    """Seed of words and arrivals."""

    def __post_init__(self) -> None:
        for name in ("num_sessions", "num_groups", "num_turns", "own_words", "output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: use 1 or more")
        if self.shared_words < 0:
            raise ConfigError(f"shared_words={self.shared_words}: use 0 or more")
        for name in ("trace_scale", "trace_speed"):
            if not 0 < getattr(self, name) < inf:
                raise ConfigError(f"{name}={getattr(self, name)}: use more than 0")
        if (self.workload == "trace") != (self.trace is not None):
            raise ConfigError("workload='trace' and trace=FILE go together")


def sessions(config: WorkloadConfig) -> list[Session]:
    """Returns the load, in order of arrival."""
    if config.workload == "trace":
        return list(_trace(config))
    make = _SHAPES[config.workload]
    rng = random.Random(config.workload_seed)
    num_groups, num_words = config.num_groups, config.shared_words
    if config.workload == "labels":
        num_groups, num_words = 1, LABEL_SHARED_WORDS
    systems = [_message("system", words(rng, num_words)) for _ in range(num_groups)]
    return [make(config, systems[i % len(systems)], rng) for i in range(config.num_sessions)]


def words(rng: random.Random, count: int) -> str:
    """Returns `count` made-up words."""
    return " ".join("".join(rng.choices(_SYLLABLES, k=2)) for _ in range(count))


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _single(config: WorkloadConfig, system: Mapping[str, Any], rng: random.Random) -> Session:
    return _conversation(system, rng, 1, config.own_words, config.output_tokens)


def _chat(config: WorkloadConfig, system: Mapping[str, Any], rng: random.Random) -> Session:
    return _conversation(system, rng, config.num_turns, config.own_words, config.output_tokens)


def _label(_: WorkloadConfig, system: Mapping[str, Any], rng: random.Random) -> Session:
    return _conversation(system, rng, 1, rng.randint(1, LABEL_OWN_WORDS), LABEL_TOKENS)


def _agent(config: WorkloadConfig, system: Mapping[str, Any], rng: random.Random) -> Session:
    """Makes long messages, like the output of tools, and short answers."""
    return _conversation(
        system, rng, config.num_turns, 4 * config.own_words, -(-config.output_tokens // 4)
    )


def _conversation(
    system: Mapping[str, Any],
    rng: random.Random,
    num_turns: int,
    num_words: int,
    max_tokens: int,
) -> Session:
    turns = []
    for number in range(num_turns):
        user = _message("user", words(rng, num_words))
        messages = (system, user) if number == 0 else (user,)
        turns.append(Turn(messages=messages, max_tokens=max_tokens))
    return Session(turns=tuple(turns))


_SHAPES: Mapping[str, Callable[..., Session]] = {
    "shared-prefix": _single,
    "multi-turn": _chat,
    "agent": _agent,
    "labels": _label,
}


def _trace(config: WorkloadConfig) -> Iterator[Session]:
    """Reads a trace. Each line is a session of its own; equal hash ids become equal words. Times
    count from the first line."""
    path, num, start_s, last_s = Path(config.trace or ""), 0, 0.0, -inf
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            session, arrival_s = _traced(config, json.loads(line))
            if arrival_s < last_s:
                raise ValueError("its timestamp goes back in time")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else error
            raise ConfigError(f"trace={str(path)!r}: line {number}: {why}") from error
        start_s, last_s = start_s if num else arrival_s, arrival_s
        yield replace(session, arrival_s=(arrival_s - start_s) / config.trace_speed)
        num += 1
        if num == config.num_sessions:
            return
    if not num:
        raise ConfigError(f"trace={str(path)!r}: no requests are in it")


def _traced(config: WorkloadConfig, row: Mapping[str, Any]) -> tuple[Session, float]:
    """Returns a line's session and its arrival, in seconds from any start."""
    num_words = _length(row, "input_length", config.trace_scale)
    ids: Sequence[int] = row["hash_ids"] or [0]
    share = -(-num_words // len(ids))
    texts = [words(random.Random(f"{config.workload_seed}:{id_}"), share) for id_ in ids]
    text = " ".join(" ".join(texts).split(" ")[:num_words])
    max_tokens = _length(row, "output_length", config.trace_scale)
    turn = Turn(messages=(_message("user", text),), max_tokens=max_tokens)
    arrival_s = row.get("timestamp_ms", row.get("timestamp", 0)) / 1000
    if not -inf < arrival_s < inf:
        raise ValueError(f"it arrives after {arrival_s:g} seconds")
    return Session(turns=(turn,)), arrival_s


def _length(row: Mapping[str, Any], name: str, scale: float) -> int:
    """Returns a length from a trace's line; 0 is read as 1."""
    given: float = row[name]
    if not 0 <= given * scale <= MAX_LENGTH:
        raise ValueError(f"{name}={given}: use 0 to {MAX_LENGTH / scale:g}")
    return max(1, round(given * scale))


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from read_lines(path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace={str(path)!r}: not UTF-8 text") from error
    except (OSError, EOFError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"trace={str(path)!r}: {why}") from error
