"""Prefill and decode on different engines, as a user says it: vLLM's `--kv-transfer-config`.

Nothing here reads files, the environment or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

from milepost.errors import ConfigError
from milepost.json_settings import check_choice

_EXTRA: Mapping[str, Any] = {
    "peers": (),
    "transport": "nixl",
    "backends": ("UCX",),
    "lease_s": 30.0,
    "lend_share": 0.75,
    "timeout_s": 30.0,
    "max_transfers": 8,
}
"""What `kv_connector_extra_config` may set."""


MOST = 86_400
"""A day, where seconds are set."""
ANY = "any"


@dataclass(frozen=True, slots=True)
class PeerNetworks:
    """The networks whose addresses this engine exchanges KV with; empty for none."""

    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    @staticmethod
    def read(given: object) -> PeerNetworks:
        """From a list of addresses and networks, or `any`. Raises ConfigError."""
        if given == ANY:
            given = ["0.0.0.0/0", "::/0"]
        if not isinstance(given, list | tuple):
            raise ConfigError(f"peers={given!r}: use a list of addresses and networks, or {ANY!r}")
        return PeerNetworks(tuple(map(_network, given)))

    @property
    def are_any(self) -> bool:
        return any(not network.prefixlen for network in self.networks)

    def __bool__(self) -> bool:
        return bool(self.networks)

    def __contains__(self, host: str) -> bool:
        """Whether `host` is the address of a peer; no name is one."""
        try:
            address = ip_address(host)
        except ValueError:
            return False
        if isinstance(address, IPv6Address):
            if address.scope_id is not None:
                return False
            address = address.ipv4_mapped or address
        return any(address in network for network in self.networks)


def _network(given: object) -> IPv4Network | IPv6Network:
    try:
        if not isinstance(given, str):
            raise ValueError("use text")
        return ip_network(given)
    except ValueError as error:
        raise ConfigError(
            f"peers={given!r}: use an address or a network, as 10.0.0.8 or 10.0.0.0/24 ({error})"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """Raises ConfigError. Each engine plays both roles, for each request the one that it asks for;
    `kv_role` is taken for the sake of vLLM's command lines.
    """

    kv_connector: str = "NixlConnector"
    """The only one that there is."""
    kv_role: str = "kv_both"
    """`kv_both`, `kv_producer` or `kv_consumer`; nothing depends on it."""
    engine_id: str | None = None
    """By default one that no other engine has."""
    kv_ip: str = "127.0.0.1"
    """Where other engines reach this one."""
    kv_port: int = 5600
    """The port for what engines say to each other; 0 takes a free one."""
    kv_load_failure_policy: str = "recompute"
    """Of what does not come: always `recompute`."""
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    """`peers`: addresses and networks of the engines to exchange with, or `any`; without them
    nothing is exchanged. `transport`: `nixl`, or `socket` for machines without it and main memory
    only. `backends` of NIXL. `lease_s`: how long prefilled KV is kept for a reader that sends no
    heartbeat. `lend_share`: the part of the cache that may be lent at a time. `timeout_s` of an
    answer or a transfer. `max_transfers`: how many requests wait for one."""
    kv_buffer_device: str | None = None
    """As `kv_role`."""
    kv_buffer_size: float | None = None
    """As `kv_role`."""
    kv_rank: int | None = None
    """As `kv_role`."""
    kv_parallel_size: int = 1
    """Always 1."""

    def __post_init__(self) -> None:
        check_choice("kv_connector", self.kv_connector, ("NixlConnector",))
        check_choice("kv_role", self.kv_role, ("kv_both", "kv_producer", "kv_consumer"))
        check_choice("kv_load_failure_policy", self.kv_load_failure_policy, ("recompute",))
        if not isinstance(self.kv_port, int) or not 0 <= self.kv_port < 65536:
            raise ConfigError(f"kv_port={self.kv_port!r}: use 0 to 65535")
        if self.kv_parallel_size != 1:
            raise ConfigError(f"kv_parallel_size={self.kv_parallel_size!r}: leave it out")
        self._check_extra()

    def _check_extra(self) -> None:
        extra = self.kv_connector_extra_config
        if not isinstance(extra, Mapping):
            raise ConfigError(f"kv_connector_extra_config={extra!r}: use a JSON object")
        for name, value in extra.items():
            if name not in _EXTRA:
                raise ConfigError(
                    f"kv_connector_extra_config: unknown field {name!r}: use {', '.join(_EXTRA)}"
                )
            if isinstance(_EXTRA[name], float | int) and not _is_positive(value):
                raise ConfigError(f"{name}={value!r}: use more than 0, and {MOST} at most")
        _ = self.peers
        check_choice("transport", self.transport, ("nixl", "socket"))
        if self.lend_share > 1:
            raise ConfigError(f"lend_share={self.lend_share}: use 1 or less")
        if not isinstance(self._extra("max_transfers"), int):
            raise ConfigError(f"max_transfers={self._extra('max_transfers')!r}: use a whole number")
        backends = self._extra("backends")
        if not isinstance(backends, list | tuple) or not backends:
            raise ConfigError(f"backends={backends!r}: use a list of names")

    def _extra(self, name: str) -> Any:
        return self.kv_connector_extra_config.get(name, _EXTRA[name])

    @property
    def peers(self) -> PeerNetworks:
        """The engines that this one exchanges with. Raises ConfigError."""
        return PeerNetworks.read(self._extra("peers"))

    @property
    def transport(self) -> str:
        return str(self._extra("transport"))

    @property
    def backends(self) -> list[str]:
        return [str(name) for name in self._extra("backends")]

    @property
    def lease_s(self) -> float:
        return float(self._extra("lease_s"))

    @property
    def lend_share(self) -> float:
        return float(self._extra("lend_share"))

    @property
    def timeout_s(self) -> float:
        return float(self._extra("timeout_s"))

    @property
    def max_transfers(self) -> int:
        return int(self._extra("max_transfers"))


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MOST
