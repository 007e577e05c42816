"""Reads other engines' memory through NIXL: GPU memory directly, main memory as UCX can."""

from __future__ import annotations

import contextlib
import importlib
import logging
from typing import Any

import numpy as np

from milepost.disaggregation.messages import Layout
from milepost.disaggregation.registered_pools import RegisteredMemory
from milepost.disaggregation.transport import TransferError, Transport
from milepost.errors import ConfigError, needing

CHECKS = 64
"""Checks per poll. A check handles the ends of about 16 pieces, and a prompt of 32,000 tokens has
550.
"""


class Nixl(Transport):
    """A transport through NIXL. Whoever has the metadata can read all registered memory, lent or
    not. Raises ConfigError if NIXL is not installed or lacks all of the backends."""

    name = "nixl"

    def __init__(self, memory: RegisteredMemory, name: str, backends: list[str]) -> None:
        with needing("kv_transfer_config", "disaggregation"):
            api: Any = importlib.import_module("nixl._api")
        _log_as_others_do()
        self._errors = _errors_of(api)
        self._kind = "DRAM" if memory.device is None else "VRAM"
        self._device = memory.device or 0
        # NIXL's own progress thread takes as much of a core as it gets, idle or not.
        config = api.nixl_agent_config(enable_prog_thread=False, num_threads=0, backends=backends)
        errors: tuple[type[Exception], ...] = (*self._errors, KeyError)
        ranges = [(address, size, self._device, "") for address, size in memory.ranges]
        try:  # NIXL skips a backend it lacks; without any, no memory is registered
            self._agent = api.nixl_agent(name, config)
            self._registered = self._agent.register_memory(ranges, self._kind)
        except errors as error:
            raise ConfigError(f"kv_transfer_config: backends={backends}: {error}") from error
        self._own = self._listed("NIXL_INIT_AGENT", memory.layout)

    def enter(self) -> None:
        """Sets the GPU's context in this thread, which begins the copies between GPUs."""
        if self._kind == "VRAM":
            import torch

            torch.cuda.set_device(self._device)
            torch.cuda.synchronize()

    def metadata(self) -> bytes:
        agent_metadata: bytes = self._agent.get_agent_metadata()
        return bytes([self._device]) + agent_metadata

    def add_peer(self, metadata: bytes, layout: Layout) -> Any:
        if len(metadata) < 2:
            raise TransferError("no metadata of NIXL's")
        try:
            name = self._agent.add_remote_agent(metadata[1:])
        except self._errors as error:
            raise TransferError(str(error)) from error
        try:
            return name, self._listed(name, layout, metadata[0])
        except self._errors as error:
            self._agent.remove_remote_agent(name)
            raise TransferError(str(error)) from error

    def remove_peer(self, peer: Any) -> None:
        name, pieces = peer
        with contextlib.suppress(*self._errors):  # the peer has gone by itself
            self._agent.release_dlist_handle(pieces)
            self._agent.remove_remote_agent(name)

    def begin(self, peer: Any, lease: str, local: list[int], remote: list[int]) -> Any:  # noqa: ARG002
        _, pieces = peer
        here, there = np.array(local, np.int32), np.array(remote, np.int32)
        try:
            transfer = self._agent.make_prepped_xfer("READ", self._own, here, pieces, there)
            if self._agent.transfer(transfer) == "ERR":
                raise TransferError("NIXL could not begin")
        except self._errors as error:
            raise TransferError(f"NIXL: {error}") from error
        return transfer

    def is_done(self, transfer: Any) -> bool:
        try:
            for _ in range(CHECKS):
                state = self._agent.check_xfer_state(transfer)
                if state != "PROC":
                    break
            else:
                return False
            self._agent.release_xfer_handle(transfer)
        except self._errors as error:
            self.cancel(transfer)
            raise TransferError(f"NIXL: {error}") from error
        if state != "DONE":
            raise TransferError(f"NIXL: the transfer ended as {state}")
        return True

    def make_progress(self) -> None:
        """Makes progress for readers: a read is only over for the reader once both sides have made
        progress.
        """
        with contextlib.suppress(*self._errors):  # the reader sees the outcome
            self._agent.get_new_notifs()

    def cancel(self, transfer: Any) -> bool:
        try:
            self._agent.release_xfer_handle(transfer)
        except self._errors:
            return False
        return True

    def close(self) -> None:
        self._agent.release_dlist_handle(self._own)
        self._agent.deregister_memory(self._registered)

    def _listed(self, name: str, layout: Layout, device: int | None = None) -> Any:
        """Returns a list of all pieces of an engine's memory, in which they go by number."""
        device = self._device if device is None else device
        rows = [(row.address, row.length, device, row.stride, row.count) for row in layout.rows]
        return self._agent.prep_xfer_dlist(name, np.array(rows, np.uint64), self._kind)


def _errors_of(api: Any) -> tuple[type[Exception], ...]:
    """Returns all exceptions that NIXL raises: its own have only `Exception` in common."""
    known = vars(api.nixlBind).values()
    errors = [each for each in known if isinstance(each, type) and issubclass(each, Exception)]
    return (RuntimeError, *errors)


def _log_as_others_do() -> None:
    """Redirects NIXL's log to the root logger, since standard output is for programs."""
    nixl_logger = logging.getLogger("nixl")
    nixl_logger.handlers.clear()
    nixl_logger.propagate = True
