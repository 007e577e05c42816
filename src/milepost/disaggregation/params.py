"""`kv_transfer_params`: what routers carry from the engine that prefills to the one that decodes.

The first gets `do_remote_decode`; its answer, with `do_remote_prefill` and where its KV is, goes to
the second unchanged. Routers read no other field. The decode engine does not trust the fields: it
asks the other engine what the lease covers, and compares keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from milepost.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """`position` tokens of a prompt, on another engine, under a lease."""

    engine_id: str
    host: str
    port: int
    lease: str
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferWish:
    """What a request asks of this engine beside its answer."""

    prefills: bool = False
    """To keep the prompt's KV and state for another engine, and answer with where they are."""
    remote: Remote | None = None
    """To fetch them from there."""


def read(params: Mapping[str, Any] | None) -> TransferWish | None:
    """None where nothing is asked for. Raises InvalidRequestError."""
    if not params:
        return None
    if params.get("do_remote_decode"):
        return TransferWish(prefills=True)
    if not params.get("do_remote_prefill"):
        return None
    return TransferWish(
        remote=Remote(
            engine_id=_get(params, "remote_engine_id", str),
            host=_get(params, "remote_host", str),
            port=_get(params, "remote_port", int),
            lease=_get(params, "remote_request_id", str),
            position=_get(params, "remote_num_tokens", int),
        )
    )


def written(
    remote: Remote, pages: tuple[int, ...], slot: int | None, num_ranks: int
) -> dict[str, Any]:
    """The other way: as the answer of who prefilled has it."""
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


def _get(params: Mapping[str, Any], name: str, kind: type) -> Any:
    value = params.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidRequestError(
            f"kv_transfer_params.{name}={value!r}: pass on what the other engine answered"
        )
    return value
