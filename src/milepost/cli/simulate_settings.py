"""The flags of `milepost simulate`, and the checks of their combinations."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from milepost.cli.flags import Whole, WholeOrNone, whole
from milepost.errors import InvalidRequestError
from milepost.simulator.clients import Patience
from milepost.simulator.fleet import ROUTINGS, EngineLimits
from milepost.simulator.policies import POLICIES, CachePolicy, Pooled
from milepost.simulator.tiers import TierSizes

GIB = 2**30
MAX_GIB = 2**17
"""Largest simulated memory: its pages are counted one by one."""
MAX_ENGINES = 4096
MAX_RETRIES = 1000
DEFAULT_GIB = 64.0
COMPARED = ("vllm", "sglang", "auto")
_List = Parameter(negative_iterable=(), consume_multiple=(1, None))
_Wholes = Parameter(
    negative_iterable=(), consume_multiple=(1, None), converter=whole(list[int] | None)
)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a simulation. Each field is a flag."""

    gib: Annotated[list[float] | None, _List] = None
    """Sizes of device memory for KV and states together, in GiB (default 64: an H200 beside a model
    of 35B parameters in bfloat16)."""
    target_hit_rate: float | None = None
    """Find the least memory with which each policy hits this percentage of the prompt tokens."""
    host_gib: float = 0.0
    """Host memory, in GiB, for pages and states evicted from the device."""
    disk_gib: float = 0.0
    """Disk space, in GiB, for pages and states evicted from the device; they pass through host
    memory."""
    host_gb_s: float = 20.0
    """Bandwidth of the link to host memory, in GB per second each way."""
    disk_gb_s: float = 2.0
    """Bandwidth of the disk, in GB per second for reads and for writes."""
    policy: Annotated[list[str] | None, _List] = None
    """Policies to compare (default vllm sglang auto)."""
    seeds: Whole = 1
    """Number of replays of each size. The first is as recorded; in the others sessions swap their
    start times, or the gaps between arrivals are shuffled. The table shows means."""
    cost: str = "hybrid-35b-a3b-h200"
    """A shipped cost model or a file."""
    arrivals: Literal["auto", "recorded", "closed"] = "auto"
    """`recorded` keeps the trace's arrivals; with `closed`, each session continues its think time
    after its last answer. By default closed if the trace has sessions."""
    predict_answers: bool = True
    """Assume that an answer equals the part of the conversation's next prompt in its place."""
    load: float = 1.0
    """Let sessions start this many times as fast, or requests arrive if the trace has no
    sessions."""
    sessions: WholeOrNone = None
    """Number of sessions of made-up traffic, which start within ten minutes (default 100)."""
    client_timeout_s: float | None = None
    """Time after which a client gives up if no first token has come, and tries again."""
    client_retries: Whole = 2
    """How often a client tries again before it ends its session."""
    max_queue_wait_s: float | None = None
    """The engines' `--max-queue-wait-s`."""
    limit: WholeOrNone = None
    """Number of requests to read."""
    block_size: WholeOrNone = None
    """Tokens in a block of the trace, if the lengths leave it open."""
    max_num_seqs: Whole = 64
    """Maximum number of requests that run at once."""
    max_num_batched_tokens: Whole = 8192
    """Token budget of one step."""
    fleet: Annotated[list[int] | None, _Wholes] = None
    """Numbers of engines to route the trace to, each with the given memory."""
    prefill_engines: Whole = 0
    """Number of these engines that only prefill; the others decode with the KV and states they
    lend."""
    routing: Annotated[list[str] | None, _List] = None
    """Ways to route to compare: round-robin, session (a conversation stays on its engine), events
    (like vllm-router, by the engines' KV events), prefix (like milepost.ray). By default the first
    three."""
    transfer_gb_s: float = 50.0
    """Bandwidth between engines, in GB that one engine reads per second."""
    json: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None
    """Write all rows to this file; `-` is standard output, in place of the table."""
    plot: Path | None = None
    """Plot the hit rate and the p90 time to first token over memory to this file; with `--fleet`,
    over the number of engines."""

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_sizes()
        self._check_tiers()
        if self.fleet is not None:
            self._check_fleet(self.fleet)
        elif self.routing or self.prefill_engines:
            raise InvalidRequestError("--routing, --prefill-engines: give --fleet")

    def _check_counts(self) -> None:
        if not all(1 <= num <= MAX_ENGINES for num in self.fleet or ()):
            raise InvalidRequestError(f"--fleet {self.fleet}: use 1 to {MAX_ENGINES}")
        for name in (
            *("seeds", "limit", "sessions", "block_size"),
            *("max_num_seqs", "max_num_batched_tokens"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequestError(f"--{name.replace('_', '-')} {value}: use 1 or more")
        if not 0 <= self.client_retries <= MAX_RETRIES:
            raise InvalidRequestError(
                f"--client-retries {self.client_retries}: use 0 to {MAX_RETRIES}"
            )
        for name in ("load", "client_timeout_s", "max_queue_wait_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise InvalidRequestError(f"--{name.replace('_', '-')} {value:g}: use more than 0")

    def _check_sizes(self) -> None:
        if not all(0 < gib <= MAX_GIB for gib in self.gib or []):
            raise InvalidRequestError(f"--gib {self.gib}: use more than 0, up to {MAX_GIB}")
        if self.gib is not None and self.target_hit_rate is not None:
            raise InvalidRequestError("--gib, --target-hit-rate: use one of them")
        if self.target_hit_rate is not None and not 0 < self.target_hit_rate < 100:
            raise InvalidRequestError(
                f"--target-hit-rate {self.target_hit_rate:g}: use per cent, above 0 and below 100"
            )

    def _check_tiers(self) -> None:
        if self.disk_gib and not self.host_gib:
            raise InvalidRequestError("--disk-gib: give --host-gib too, since copies go through it")
        for name in ("host_gib", "disk_gib"):
            value, flag = getattr(self, name), name.replace("_", "-")
            if not 0 <= value <= MAX_GIB:
                raise InvalidRequestError(f"--{flag} {value:g}: use 0 to {MAX_GIB}")
        for name in ("host_gb_s", "disk_gb_s", "transfer_gb_s"):
            value, flag = getattr(self, name), name.replace("_", "-")
            if not 0 < value < inf:
                raise InvalidRequestError(f"--{flag} {value:g}: use more than 0")

    def _check_fleet(self, fleet: list[int]) -> None:
        if self.target_hit_rate is not None:
            raise InvalidRequestError("--fleet: give --gib in place of --target-hit-rate")
        if self.prefill_engines < 0:
            raise InvalidRequestError(f"--prefill-engines {self.prefill_engines}: use 0 or more")
        if not all(self.prefill_engines < num for num in fleet):
            raise InvalidRequestError(
                f"--prefill-engines {self.prefill_engines} of --fleet {fleet}: leave some to decode"
            )
        for routing in self.routing or ():
            if routing not in ROUTINGS:
                raise InvalidRequestError(f"--routing {routing}: use {', '.join(ROUTINGS)}")

    @property
    def policies(self) -> list[CachePolicy | Pooled]:
        """The policies to compare. Raises InvalidRequestError for one that cannot run."""
        names = self.policy or (["auto"] if self.fleet or self.host_gib else COMPARED)
        needs_cache = (self.fleet and "events of its cache") or (self.host_gib and "tiers")
        for name in names:
            if name not in POLICIES:
                raise InvalidRequestError(f"--policy {name}: use {', '.join(POLICIES)}")
            if needs_cache and isinstance(POLICIES[name], Pooled):
                raise InvalidRequestError(
                    f"--policy {name}: its {needs_cache} are not modelled; leave it out"
                )
        return [POLICIES[name] for name in names]

    @property
    def limits(self) -> EngineLimits:
        """Settings of the engines' schedulers."""
        return EngineLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_queue_wait_s=self.max_queue_wait_s,
        )

    @property
    def patience(self) -> Patience:
        """How long clients wait for a first token, and how often they try."""
        timeout_s = inf if self.client_timeout_s is None else self.client_timeout_s
        return Patience(timeout_s=timeout_s, max_retries=self.client_retries)

    @property
    def counts_goodput(self) -> bool:
        """Whether requests may end without an answer, so that good answers are counted."""
        return self.client_timeout_s is not None or self.max_queue_wait_s is not None

    @property
    def sizes(self) -> list[float]:
        """Sizes of device memory, in GiB."""
        return self.gib or [DEFAULT_GIB]

    @property
    def tiers(self) -> TierSizes | None:
        """Sizes of host and disk memory, or None without host memory."""
        if not self.host_gib:
            return None
        return TierSizes(
            host_bytes=int(self.host_gib * GIB),
            disk_bytes=int(self.disk_gib * GIB),
            host_bytes_per_s=self.host_gb_s * 1e9,
            disk_bytes_per_s=self.disk_gb_s * 1e9,
        )
