"""The messages between engines: msgpack over ZeroMQ, mostly questions with one answer each.

Hello    who I am and my memory's layout         -> Welcome, or Declined, with why
Claim    what does this lease cover?             -> Granted, or Gone
Beat     I still need these                      (no answer)
Reading  I begin to read under this lease        (no answer)
Release  I have read; was it valid throughout?   -> Released
Find     how much of these tokens do you have?   -> Granted under a new lease, or Gone

Links, the thread that sends them, reports to the engine's own thread what came of it: `Pulled`,
`Read`, `RemoteMatch` and `Asked`.

Every field is bounded as it is decoded: `decoded` returns a message whose numbers fit wherever they
are used, or raises BadMessageError.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from milepost.cache.tree import TOKEN_BYTES, Chain
from milepost.errors import InvalidPromptError
from milepost.kv_transfer_params import Remote
from milepost.pictures import Picture, check_pictures

VERSION = 4
MAX_QUESTION_BYTES = 16 * 2**20
"""Largest number of bytes in a frame of a question; the longest has four bytes for each token of a
prompt."""
MAX_ANSWER_BYTES = 4 * 2**20
"""Largest number of bytes in a frame of an answer; the longest names each page of a prompt, or
describes each rank's memory.
"""
MAX_PIECES = 2**31 - 1
"""Largest number of pieces in a layout: NIXL numbers pieces with 32 bits."""

Address = Annotated[int, Meta(ge=0, lt=2**62)]
Bytes = Annotated[int, Meta(ge=0, lt=2**40)]
Number = Annotated[int, Meta(ge=0, le=MAX_PIECES)]
Position = Annotated[int, Meta(ge=0, lt=2**32)]
ShortText = Annotated[str, Meta(max_length=256)]
Digest = Annotated[bytes, Meta(max_length=64)]
LeaseId = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]


class MemoryRows(msgspec.Struct, frozen=True, array_like=True):
    """Equal pieces of memory: `count` pieces of `length` bytes, `stride` bytes apart."""

    address: Address
    stride: Bytes
    length: Bytes
    count: Number


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Position in memory of the pieces of each page, each slot and each page of windows, which have
    one piece in each row of their kind, at the index of their id. Raises ValueError if there are
    more pieces than can be numbered.
    """

    pages: list[MemoryRows]
    slots: list[MemoryRows]
    windows: list[MemoryRows] = []

    def __post_init__(self) -> None:
        if self.num_pieces > MAX_PIECES:
            raise ValueError(f"{self.num_pieces} pieces of memory: use {MAX_PIECES} at most")

    @property
    def kinds(self) -> tuple[list[MemoryRows], ...]:
        """Rows of pages, of slots and of pages of windows; pieces are counted in this order."""
        return self.pages, self.slots, self.windows

    @property
    def rows(self) -> list[MemoryRows]:
        """All rows, in the order in which their pieces are counted."""
        return [row for rows in self.kinds for row in rows]

    @property
    def num_pieces(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def piece_bytes(self) -> list[list[int]]:
        """Sizes of the pieces, which must be the same on both engines."""
        return [[row.length for row in rows] for rows in self.kinds]


class Hello(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """First message to an engine: the sender and its memory's layout."""

    version: int
    identity: Digest
    """Identity of the model as it is run and of the page size; keys are computed from it."""
    engine_id: ShortText
    transport: ShortText
    host: ShortText
    port: Annotated[int, Meta(ge=0, lt=2**16)]
    """Port at which the sender can be asked in turn."""
    layout: Layout
    """Layout of the first rank."""
    num_ranks: int = 1


class Welcome(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Answer to a hello if the two engines can exchange."""

    engine_id: ShortText
    layout: Layout
    metadata: bytes
    """The transport's metadata."""


class Declined(msgspec.Struct, tag="Refused", frozen=True):
    """Answer to a hello if the two engines cannot exchange."""

    why: Annotated[str, Meta(max_length=1000)]


class Claim(msgspec.Struct, tag=True, frozen=True):
    """Asks what a lease covers."""

    lease: LeaseId


class Granted(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The contents of a lease and their place in memory."""

    lease: LeaseId
    position: Position
    key: Digest
    """Key of the state at that position, which stands for all tokens before it."""
    pages: tuple[Number, ...]
    slot: Number | None
    windows: tuple[Number, ...] = ()
    """Window pages that the state needs."""


class Gone(msgspec.Struct, tag=True, frozen=True):
    """Answers a question about a lease that is unknown or over, or about tokens if none are
    cached.
    """


class Beat(msgspec.Struct, tag=True, frozen=True):
    leases: list[LeaseId]


class Reading(msgspec.Struct, tag=True, frozen=True):
    lease: LeaseId


class Release(msgspec.Struct, tag=True, frozen=True):
    lease: LeaseId


class Released(msgspec.Struct, tag=True, frozen=True):
    was_valid: bool


class Find(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    tokens: bytes
    """Token ids, packed as little-endian uint32."""
    salt: str
    least: Position
    """Fewest tokens that are of use."""
    pictures: tuple[Picture, ...] = ()
    """Pictures among the tokens."""

    @staticmethod
    def of(chain: Chain, least: int) -> Find:
        """Returns the question for a prompt."""
        tokens, pictures = chain.token_bytes(0, len(chain)), tuple(chain.pictures)
        return Find(tokens=tokens, salt=chain.salt, least=least, pictures=pictures)

    @property
    def is_sound(self) -> bool:
        """Whether there are whole tokens, with the pictures inside."""
        try:
            check_pictures(self.pictures, len(self.tokens) // TOKEN_BYTES)
        except InvalidPromptError:
            return False
        return len(self.tokens) % TOKEN_BYTES == 0


PeerQuestion = Hello | Claim | Beat | Reading | Release | Find
PeerAnswer = Welcome | Declined | Granted | Gone | Released
QUESTIONS = msgspec.msgpack.Decoder(PeerQuestion)
ANSWERS = msgspec.msgpack.Decoder(PeerAnswer)
ENCODER = msgspec.msgpack.Encoder()
M = TypeVar("M")


class BadMessageError(Exception):
    """A message of another engine is malformed."""


def decoded(decoder: msgspec.msgpack.Decoder[M], body: bytes) -> M:
    """Decodes a message from outside. Raises BadMessageError."""
    try:
        return decoder.decode(body)
    # Bytes that are not UTF-8 raise ValueError, and deep nesting exhausts Python's stack.
    except (msgspec.DecodeError, ValueError, RecursionError, MemoryError) as error:
        raise BadMessageError(str(error) or type(error).__name__) from error


def endpoint(host: str, port: int | None = None) -> str:
    """Returns the address in ZeroMQ's form."""
    shown = f"[{host}]" if ":" in host else host
    return f"tcp://{shown}" if port is None else f"tcp://{shown}:{port}"


def misfit(hello: Hello, ours: Hello) -> str:
    """Returns why two engines cannot exchange anything, or an empty text if they can."""
    if hello.version != ours.version:
        return f"version {hello.version} of the exchange, and here it is {ours.version}"
    if hello.transport != ours.transport:
        return f"transport {hello.transport!r}, and here it is {ours.transport!r}"
    if hello.num_ranks != ours.num_ranks:
        return f"tensor_parallel_size={hello.num_ranks}, and here it is {ours.num_ranks}"
    if hello.layout.piece_bytes != ours.layout.piece_bytes:
        return "pages or states of another size: another model, page size or type"
    if hello.identity != ours.identity:
        return "another model, or the same with another page size, type or seed"
    return ""


@dataclass(frozen=True, slots=True)
class Pulled:
    """End of a pull: everything has arrived, or there was a problem."""

    number: int
    problem: str
    num_bytes: int
    seconds: float
    """Time from the request until the data was certain."""
    read_s: float
    """Part of `seconds` from the first byte to the last."""


@dataclass(frozen=True, slots=True)
class Read:
    """Another engine has read a loan, whose last full page is `page`. It can be asked for the
    continuation at `host` and `port`.
    """

    page: bytes
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class RemoteMatch:
    """Answer of another engine to a question about tokens; `remote` is None if it has nothing of
    use.
    """

    number: int
    remote: Remote | None


@dataclass(frozen=True, slots=True)
class Asked:
    """A question of another engine about tokens; `Links.tell` answers it."""

    who: bytes
    number: bytes
    find: Find


Outcome = Pulled | Read | RemoteMatch | Asked
