"""`kv_transfer_params`: the fields that routers carry from the engine that prefills to the one that
decodes.

The first engine gets `do_remote_decode`. Its answer, with `do_remote_prefill` and the place of its
KV, goes to the second engine unchanged. Routers read no other field. The decode engine does not
trust the fields: it connects only to its own peers, asks the other engine what the lease covers,
and compares keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from milepost.errors import InvalidRequestError
from milepost.kv_config import KVTransferConfig

MAX_CHARS = 256
"""Largest number of characters in a text field."""
_LEASE = re.compile("[0-9a-f]{32}")
FIELDS = (
    "do_remote_decode",
    "do_remote_prefill",
    "remote_engine_id",
    "remote_host",
    "remote_port",
    "remote_request_id",
    "remote_num_tokens",
)
"""Fields that an engine reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """The first `position` tokens of a prompt on another engine, under a lease."""

    engine_id: str
    host: str
    port: int
    lease: str
    position: int

    @property
    def place(self) -> tuple[str, int]:
        return self.host, self.port


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferWish:
    """A request's wishes for a transfer, besides its answer."""

    prefills: bool = False
    """Whether to keep the prompt's KV and state for another engine, and answer with their place."""
    remote: Remote | None = None
    """The place to fetch the prompt's KV and state from."""


def read(params: Mapping[str, Any] | None) -> TransferWish | None:
    """Parses the fields. Returns None if they ask for nothing. Raises InvalidRequestError."""
    if not params:
        return None
    prefills = _get(params, "do_remote_decode", bool | None)
    fetches = _get(params, "do_remote_prefill", bool | None)
    if prefills:
        return TransferWish(prefills=True)
    if not fetches:
        return None
    return TransferWish(
        remote=Remote(
            engine_id=_text(params, "remote_engine_id"),
            host=_text(params, "remote_host"),
            port=_number(params, "remote_port", 2**16),
            lease=_lease(params, "remote_request_id"),
            position=_number(params, "remote_num_tokens", 2**32),
        )
    )


def as_read(params: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns the fields that an engine reads, bounded and of the right types; other fields of a
    router are dropped. Returns None if they ask for nothing. Raises InvalidRequestError.
    """
    if read(params) is None or params is None:
        return None
    wanted = FIELDS[:1] if params.get(FIELDS[0]) else FIELDS
    return {name: params[name] for name in wanted if name in params}


def check_exchange(wish: TransferWish, config: KVTransferConfig | None) -> None:
    """Raises InvalidRequestError unless an engine with this configuration may fulfil the wish."""
    if config is None:
        raise InvalidRequestError(
            "kv_transfer_params: this engine exchanges nothing with others: start it with "
            "--kv-transfer-config"
        )
    peers = config.exchange.peers
    if not peers:
        raise InvalidRequestError(
            "kv_transfer_params: this engine exchanges nothing with others: list their addresses "
            "or networks in --kv-transfer-config, as kv_connector_extra_config.peers"
        )
    if wish.remote is not None and wish.remote.host not in peers:
        raise InvalidRequestError(
            f"kv_transfer_params: remote_host={wish.remote.host!r}: that is the address of none of "
            "this engine's peers (kv_connector_extra_config.peers of --kv-transfer-config)"
        )


def written(
    remote: Remote, pages: tuple[int, ...], slot: int | None, num_ranks: int
) -> dict[str, Any]:
    """Returns the fields for `read`, as the engine that prefilled answers with them."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": remote.engine_id,
        "remote_request_id": remote.lease,
        "remote_host": remote.host,
        "remote_port": remote.port,
        "remote_block_ids": [list(pages), [] if slot is None else [slot]],
        "remote_num_tokens": remote.position,
        "tp_size": num_ranks,
    }


def _get(params: Mapping[str, Any], name: str, kind: Any) -> Any:
    value = params.get(name)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise _unfit(name, value)
    return value


def _text(params: Mapping[str, Any], name: str) -> str:
    value: str = _get(params, name, str)
    if len(value) > MAX_CHARS or not value.isprintable():
        raise _unfit(name, value)
    return value


def _lease(params: Mapping[str, Any], name: str) -> str:
    value: str = _get(params, name, str)
    if _LEASE.fullmatch(value) is None:
        raise _unfit(name, value)
    return value


def _number(params: Mapping[str, Any], name: str, end: int) -> int:
    value: int = _get(params, name, int)
    if not 0 < value < end:
        raise _unfit(name, value)
    return value


def _unfit(name: str, value: object) -> InvalidRequestError:
    shown = type(value).__name__
    if isinstance(value, str):
        shown = ascii(value if len(value) <= MAX_CHARS else f"{value[:MAX_CHARS]}...")
    elif value is None or (isinstance(value, int | float) and abs(value) < 2**64):
        shown = repr(value)
    return InvalidRequestError(
        f"kv_transfer_params: {name}={shown}: pass on what the other engine answered"
    )
