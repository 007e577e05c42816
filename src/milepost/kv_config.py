"""Settings of what others see of the cache: routers, which are told what it has, in the form of
vLLM's `--kv-events-config`; and other engines, for prefill and decode on different ones, in that of
its `--kv-transfer-config`.

Nothing here reads files, the environment or torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Literal

from milepost.checks import check_choice, is_number, is_whole
from milepost.errors import ConfigError

MOST = 86_400
"""Upper limit of a numeric setting: a day, for those in seconds."""
ANY = "any"


@dataclass(frozen=True, slots=True)
class PeerNetworks:
    """Networks of the engines to exchange KV with; empty for none."""

    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    @staticmethod
    def read(given: object) -> PeerNetworks:
        """Parses a list of addresses and networks, or `any`. Raises ConfigError."""
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
        """Whether `host` is the address of a peer. A host name never is."""
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
class ExchangeSettings:
    """Settings of KV transfers that are ours, as `kv_connector_extra_config`. Raises
    ConfigError."""

    peers: PeerNetworks = PeerNetworks()
    """Addresses and networks of the engines to exchange with, or `any`; without peers, nothing is
    exchanged."""
    transport: str = "nixl"
    """`nixl`, or `socket` for main memory on machines without NIXL."""
    backends: Sequence[str] = ("UCX",)
    """NIXL's backends."""
    lease_s: float = 30.0
    """How long prefilled KV is kept for a reader that sends no heartbeat."""
    lend_share: float = 0.75
    """Share of the cache that may be lent at a time."""
    timeout_s: float = 30.0
    """Limit for an answer or a transfer."""
    max_transfers: int = 8
    """How many requests may wait for a transfer."""

    @staticmethod
    def read(given: object) -> ExchangeSettings:
        """Reads the settings from a mapping. Raises ConfigError."""
        if not isinstance(given, Mapping):
            raise ConfigError(f"kv_connector_extra_config={given!r}: use a JSON object")
        names = [each.name for each in fields(ExchangeSettings)]
        for name in given:
            if name not in names:
                raise ConfigError(
                    f"kv_connector_extra_config: unknown field {name!r}: use {', '.join(names)}"
                )
        peers = PeerNetworks.read(given.get("peers", ()))
        return ExchangeSettings(**{**given, "peers": peers})

    def __post_init__(self) -> None:
        for name in ("lease_s", "lend_share", "timeout_s", "max_transfers"):
            value = getattr(self, name)
            if not _is_positive(value):
                raise ConfigError(f"{name}={value!r}: use more than 0, and {MOST} at most")
        check_choice("transport", self.transport, ("nixl", "socket"))
        if self.lend_share > 1:
            raise ConfigError(f"lend_share={self.lend_share}: use 1 or less")
        if not isinstance(self.max_transfers, int):
            raise ConfigError(f"max_transfers={self.max_transfers!r}: use a whole number")
        if not isinstance(self.backends, list | tuple) or not self.backends:
            raise ConfigError(f"backends={self.backends!r}: use a list of names")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """Settings of KV transfers. Raises ConfigError. Each engine plays both roles, and each request
    says which it needs; `kv_role` is only accepted for compatibility with vLLM's command lines.
    """

    kv_connector: str = "NixlConnector"
    """Name of the connector; there is only one."""
    kv_role: str = "kv_both"
    """`kv_both`, `kv_producer` or `kv_consumer`; it has no effect."""
    engine_id: str | None = None
    """Unique name of the engine; generated by default."""
    kv_ip: str = "127.0.0.1"
    """Address at which other engines reach this one."""
    kv_port: int = 5600
    """Port for messages between engines; 0 takes a free one."""
    kv_load_failure_policy: str = "recompute"
    """Policy for KV that cannot be loaded: always `recompute`."""
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    """Our own settings: the fields of `ExchangeSettings`."""
    kv_buffer_device: str | None = None
    """Accepted for compatibility; it has no effect."""
    kv_buffer_size: float | None = None
    """Accepted for compatibility; it has no effect."""
    kv_rank: int | None = None
    """Accepted for compatibility; it has no effect."""
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
        _ = self.exchange

    @property
    def exchange(self) -> ExchangeSettings:
        """Our own settings. Raises ConfigError."""
        return ExchangeSettings.read(self.kv_connector_extra_config)


def _is_positive(value: object) -> bool:
    return is_number(value) and 0 < value <= MOST


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Settings of KV events. Raises ConfigError."""

    enable_kv_cache_events: bool = False
    """Whether to send events."""
    publisher: Literal["null", "zmq"] | None = None
    """`zmq` by default if events are enabled, otherwise `null`."""
    endpoint: str = "tcp://*:5557"
    """Socket that publishes events. It is bound if the address has a `*` or `::` or is no TCP
    address, otherwise connected.
    """
    replay_endpoint: str | None = None
    """Socket that resends messages a subscriber has missed; always bound."""
    buffer_steps: int = 10_000
    """Number of messages that can be resent."""
    hwm: int = 100_000
    """Largest number of messages that wait for a slow subscriber before it misses some."""
    max_queue_size: int = 100_000
    """Largest number of messages that wait for the publishing thread before the engine waits
    too."""
    topic: str = ""
    """Prefix of each message, by which subscribers of several engines can filter."""
    format: Literal["map", "array"] = "map"
    """Form of an event on the wire: `map`, or `array` for routers from before June 2026."""
    hashes: Literal["int", "bytes"] = "int"
    """Form of a page's hash on the wire: `int` is the last 64 bits of its digest, vLLM's default;
    `bytes` is the whole digest, which Dynamo's routers do not read.
    """

    def __post_init__(self) -> None:
        if self.publisher is None:
            chosen = "zmq" if self.enable_kv_cache_events else "null"
            object.__setattr__(self, "publisher", chosen)
        check_choice("publisher", self.publisher, ("null", "zmq"))
        check_choice("format", self.format, ("map", "array"))
        check_choice("hashes", self.hashes, ("int", "bytes"))
        if not isinstance(self.enable_kv_cache_events, bool):
            raise ConfigError(f"enable_kv_cache_events={self.enable_kv_cache_events!r}: use true")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if not is_whole(value) or not 0 <= value < 2**31 - 1:
                raise ConfigError(f"{name}={value!r}: use 0 or more, and less than 2**31 - 1")
        for name in ("endpoint", "topic", "replay_endpoint"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name != "replay_endpoint"):
                raise ConfigError(f"{name}={value!r}: use text")

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"
