"""The messages between engines: msgpack over ZeroMQ, mostly questions with one answer each.

Hello    who I am and my memory's layout         -> Welcome, or Declined, with why
Claim    what does this lease cover?             -> Granted, or Gone
Beat     I still need these                      (no answer)
Reading  I begin to read under this lease        (no answer)
Release  I have read; was it valid throughout?   -> Released
Find     how much of these tokens do you have?   -> Granted under a new lease, or Gone
"""

from __future__ import annotations

import msgspec

VERSION = 2


class MemoryRows(msgspec.Struct, frozen=True, array_like=True):
    """Equal pieces of memory: `count` of `length` bytes, `stride` bytes apart."""

    address: int
    stride: int
    length: int
    count: int


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Where the pieces of each page and of each slot lie: one of each row, by their numbers."""

    pages: list[MemoryRows]
    slots: list[MemoryRows]

    @property
    def piece_bytes(self) -> list[list[int]]:
        """What two engines must have alike."""
        return [[row.length for row in rows] for rows in (self.pages, self.slots)]


class Hello(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The first message to an engine: who asks, and how its memory is laid out."""

    version: int
    identity: bytes
    """Of the model as it is run, and of the page size: what keys are made of."""
    engine_id: str
    transport: str
    host: str
    port: int
    """Where the sender is asked in turn."""
    layout: Layout
    """Of the first rank."""
    num_ranks: int = 1


class Welcome(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The answer to it, where the two can exchange."""

    engine_id: str
    layout: Layout
    metadata: bytes
    """Of the transport."""


class Declined(msgspec.Struct, tag="Refused", frozen=True):
    """The answer to it, where they cannot."""

    why: str


class Claim(msgspec.Struct, tag=True, frozen=True):
    """Asks what a lease is of."""

    lease: str


class Granted(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What a lease is of, and where it lies."""

    lease: str
    position: int
    key: bytes
    """Of the state at that position, which stands for all tokens before."""
    pages: tuple[int, ...]
    slot: int | None


class Gone(msgspec.Struct, tag=True, frozen=True):
    """There is no such lease, or none any more; or nothing is cached."""


class Beat(msgspec.Struct, tag=True, frozen=True):
    leases: list[str]


class Reading(msgspec.Struct, tag=True, frozen=True):
    lease: str


class Release(msgspec.Struct, tag=True, frozen=True):
    lease: str


class Released(msgspec.Struct, tag=True, frozen=True):
    was_valid: bool


class Find(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    tokens: bytes
    """Packed, little-endian uint32."""
    salt: str
    least: int
    """Fewer tokens than that are no use."""


Question = Hello | Claim | Beat | Reading | Release | Find
Answer = Welcome | Declined | Granted | Gone | Released
QUESTIONS = msgspec.msgpack.Decoder(Question)
ANSWERS = msgspec.msgpack.Decoder(Answer)
ENCODER = msgspec.msgpack.Encoder()


def misfit(hello: Hello, own: Hello) -> str:
    """Why two engines cannot exchange anything; empty if they can."""
    if hello.version != own.version:
        return f"version {hello.version} of the exchange, and here it is {own.version}"
    if hello.transport != own.transport:
        return f"transport {hello.transport!r}, and here it is {own.transport!r}"
    if hello.num_ranks != own.num_ranks:
        return f"tensor_parallel_size={hello.num_ranks}, and here it is {own.num_ranks}"
    if hello.layout.piece_bytes != own.layout.piece_bytes:
        return "pages or states of another size: another model, page size or type"
    if hello.identity != own.identity:
        return "another model, or the same with another page size, type or seed"
    return ""
