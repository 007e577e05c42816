"""Reads request traces: lengths, times and page ids, no text.

One JSON object a line, in order of arrival, plain or gzip:

    timestamp_ms    arrival, milliseconds from any start (`timestamp` is taken too)
    input_length    prompt tokens, at least 1
    output_length   answer tokens; 0 is read as 1
    hash_ids        ids of the prompt's blocks from its start; an id stands for its block *and
                    everything before it*, so it always follows the same one. All full blocks, and
                    maybe the partial one after them.
    session         optional: the conversation that the request belongs to
    agent           optional: which of a session's agents asks
    think_time      optional: seconds between the agent's previous answer and this request
    images          optional: [first token, tokens, id] for each picture in the prompt, in order;
                    pictures of one id are the same

Every line of a file uses one block size; it is found from the lengths, or named by the caller. It
is the page size of the replay, since reuse cannot be seen in smaller steps.

An answer's tokens have no ids of their own in such a file. They only appear when a later prompt
contains them. `Trace.link_answers` finds that prompt: the first one that continues a request's
prompt and has room for the answer. Then the pages after the prompt take that prompt's ids, so that
a state saved at the answer's end can be found again. Answers that no prompt continues have ids that
no request asks for.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from milepost.checks import is_number, is_whole
from milepost.errors import TraceError
from milepost.pictures import IDENTITY_BYTES, Picture, check_pictures
from milepost.small_files import read_lines

_LARGEST = sys.float_info.max
"""Largest number; one in JSON may be larger, and then infinite."""

MAX_TOKENS = 2**24
"""Longest prompt or answer."""
MAX_PAGE_IDS = 2**28
"""Largest number of distinct ids of a trace: a replay takes some 50 bytes for each."""
BLOCK_SIZES = tuple(1 << k for k in range(4, 12))
"""Block sizes that are found from the lengths: 16 to 2048."""


@dataclass(slots=True, kw_only=True, eq=False)
class TraceRequest:
    """One line of a trace; ids of pages are numbered 0, 1, 2 ... by first use."""

    arrival_s: float
    input_length: int
    output_length: int
    page_ids: array[int]
    """Ids of the prompt's full pages."""
    session: str | None = None
    agent: str | None = None
    think_s: float | None = None
    pictures: tuple[Picture, ...] = ()
    answer_ids: array[int] = field(default_factory=lambda: array("I"))
    """Ids of the pages after the prompt's full ones, taken from the prompt that continues it."""
    own_id: int = 0
    """First id for pages after the prompt that no other prompt has."""

    @property
    def thread(self) -> tuple[str, str | None] | None:
        """Names the requests that follow each other: those of a session's agent."""
        return (self.session, self.agent) if self.session is not None else None


@dataclass(slots=True, kw_only=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    page_size: int
    requests: list[TraceRequest]
    num_page_ids: int
    """Number of distinct ids, those of unseen answers included."""

    @property
    def input_tokens(self) -> int:
        return sum(request.input_length for request in self.requests)

    def digests(self) -> list[bytes]:
        """Makes a digest for each page id, once per replay: its chains share them."""
        return [id_.to_bytes(8, "little") for id_ in range(self.num_page_ids)]

    def link_answers(self) -> None:
        """Gives each request the page ids of its answer, if a later prompt shows them."""
        at_end: dict[int, TraceRequest] = {}
        for request in self.requests:
            ids = request.page_ids
            for depth in range(len(ids), 0, -1):
                before = at_end.get(ids[depth - 1])
                if before is not None:
                    self._link(before, request)
                    break
            if ids:
                at_end[ids[-1]] = request

    def _link(self, before: TraceRequest, after: TraceRequest) -> None:
        total = before.input_length + before.output_length
        if before.answer_ids or after.input_length < total:
            return
        first = len(before.page_ids)
        before.answer_ids = after.page_ids[first : -(-total // self.page_size)]

    def bound(self) -> float:
        """Returns the share of the input tokens that earlier requests held: in their prompts, and
        in answers that were linked."""
        size = self.page_size
        held = array("H", bytes(2 * self.num_page_ids))
        hits = 0
        for request in self.requests:
            ids, known = request.page_ids + request.answer_ids, 0
            for id_ in ids:
                known += held[id_]
                if held[id_] < size:
                    break
            hits += min(known, request.input_length - 1)
            left = request.input_length + request.output_length
            for id_ in ids:
                held[id_] = max(held[id_], min(left, size))
                left -= size
        return hits / self.input_tokens


def read_trace(
    path: Path,
    *,
    block_size: int | None = None,
    limit: int | None = None,
) -> Trace:
    """Reads a file, or its first `limit` requests. Raises TraceError for a bad line."""
    ids = PageIds()
    requests: list[TraceRequest] = []
    sizes = (block_size,) if block_size else BLOCK_SIZES
    last_s = float("-inf")
    for line_number, line in enumerate(_lines(path), start=1):
        if limit is not None and len(requests) >= limit:
            break
        if not line.strip():
            continue
        where = f"{path}:{line_number}"
        request = _parse(line, where, ids)
        if request.arrival_s < last_s:
            raise TraceError(f"{where}: timestamp goes back in time")
        last_s = request.arrival_s
        sizes = _sizes_that_fit(request, sizes, where)
        requests.append(request)
    if not requests:
        raise TraceError(f"{path}: no requests")
    return _finish(path, requests, _one_size(sizes, path), len(ids))


def _finish(path: Path, requests: list[TraceRequest], page_size: int, num_ids: int) -> Trace:
    start_s = requests[0].arrival_s
    for request in requests:
        request.arrival_s -= start_s
        del request.page_ids[request.input_length // page_size :]
        request.own_id = num_ids
        total = request.input_length + request.output_length
        num_ids += total // page_size + 1 - len(request.page_ids)
    if num_ids > MAX_PAGE_IDS:
        raise TraceError(f"{path}: {num_ids} pages, more than {MAX_PAGE_IDS}: read fewer requests")
    return Trace(name=path.name, page_size=page_size, requests=requests, num_page_ids=num_ids)


def _one_size(sizes: tuple[int, ...], path: Path) -> int:
    if len(sizes) > 1:
        raise TraceError(
            f"{path}: blocks of {' or '.join(map(str, sizes))} tokens would fit; "
            "name the block size"
        )
    return sizes[0]


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from read_lines(path)
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 text") from error
    except (OSError, EOFError, ValueError) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _parse(line: str, where: str, ids: PageIds) -> TraceRequest:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError, too, for thousands of digits
        raise TraceError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise TraceError(f"{where}: not a JSON object")
    time_key = "timestamp_ms" if "timestamp_ms" in row else "timestamp"
    think_s = row.get("think_time")
    return TraceRequest(
        arrival_s=_number(row, time_key, where) / 1000,
        input_length=_count(row, "input_length", where, least=1),
        output_length=max(1, _count(row, "output_length", where, least=0)),
        page_ids=ids.of(row.get("hash_ids"), where),
        session=None if row.get("session") is None else str(row["session"]),
        agent=None if row.get("agent") is None else str(row["agent"]),
        think_s=None if think_s is None else max(0.0, _number(row, "think_time", where)),
        pictures=_pictures(row, where),
    )


def _pictures(row: dict[str, Any], where: str) -> tuple[Picture, ...]:
    given = row.get("images") or ()
    try:
        pictures = tuple(
            Picture(
                identity=blake2b(repr(id_).encode(), digest_size=IDENTITY_BYTES).digest(),
                offset=_count({"image": offset}, "image", where, least=0),
                num_tokens=_count({"image": num_tokens}, "image", where, least=1),
                grid=(1, 1, num_tokens),
                num_positions=num_tokens,
            )
            for offset, num_tokens, id_ in given
        )
        check_pictures(pictures, row["input_length"])
    except (TypeError, ValueError) as error:
        raise TraceError(f"{where}: images={str(given)[:80]}: {error}") from error
    return pictures


def _number(row: dict[str, Any], key: str, where: str) -> float:
    value: Any = row.get(key)
    if not is_number(value) or not abs(value) <= _LARGEST:
        raise TraceError(f"{where}: {key}={value!r} is not a number")
    return float(value)


def _count(row: dict[str, Any], key: str, where: str, *, least: int) -> int:
    value = row.get(key)
    if not is_whole(value) or not least <= value <= MAX_TOKENS:
        raise TraceError(
            f"{where}: {key}={str(value)[:40]} is not a count of {least} to {MAX_TOKENS}"
        )
    return value


def _sizes_that_fit(request: TraceRequest, sizes: tuple[int, ...], where: str) -> tuple[int, ...]:
    tokens, num = request.input_length, len(request.page_ids)
    fitting = tuple(s for s in sizes if num in (tokens // s, -(-tokens // s)))
    if not fitting:
        raise TraceError(
            f"{where}: {num} hash_ids do not fit {tokens} tokens in blocks of "
            f"{' or '.join(map(str, sizes))}"
        )
    return fitting


_NONE = 2**32 - 1
"""Stands for the id before a prompt's first."""


class PageIds:
    """Numbers of a trace's ids, by first use, and the id that each follows."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._before = array("I")
        """Number -> number of the id before it, or `_NONE`."""

    def __len__(self) -> int:
        return len(self._before)

    def of(self, given: Any, where: str) -> array[int]:
        """Returns the numbers of one prompt's ids. Raises TraceError."""
        if not isinstance(given, list):
            raise TraceError(f"{where}: hash_ids is not a list")
        try:
            return array("I", self._numbered(given, where))
        except TypeError as error:
            raise TraceError(f"{where}: hash_ids holds something that is not an id") from error

    def _numbered(self, given: list[Any], where: str) -> Iterator[int]:
        before = _NONE
        for id_ in given:
            number = self._numbers.get(id_)
            if number is None:
                number = self._numbers[id_] = len(self._before)
                self._before.append(before)
            elif self._before[number] != before:
                raise TraceError(
                    f"{where}: hash_ids: {str(id_)[:40]} follows another id than the first time: "
                    "an id stands for its block and everything before it"
                )
            before = number
            yield number
