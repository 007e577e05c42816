"""One running request's blocks in `OnePool`, and where its prefill saves states."""

from __future__ import annotations

from dataclasses import dataclass, field

from milepost.cache.allocation import Allocation, State
from milepost.cache.memory import ZERO_SLOT
from milepost.cache.placement import Kind, PromptFacts, floor
from milepost.cache.plans import Export
from milepost.cache.tree import Chain, End, Match
from milepost.simulator.vllm.blocks import Key


def aligned_ends(facts: PromptFacts, start: int, end: int) -> dict[int, Kind]:
    """Places states at the last block boundaries of the prompt and of the KV cached for it."""
    last = floor(facts.prompt_length - 1, facts.block_size)
    found = {last: Kind.PROMPT_END} | dict.fromkeys(facts.branch_points, Kind.BRANCH_POINT)
    return {p: found[p] for p in sorted(found) if start < p <= end}


@dataclass(slots=True)
class Hold:
    """The blocks of one running request, besides those of its own state."""

    used: list[Key]
    """KV that it shares or has published, from the start of the path."""
    source: Key | None
    """The state to resume from, until the first commit."""
    num_kv: int
    """Number of blocks on its path, shared ones included."""
    num_full: int
    """Number of full blocks on its path."""
    num_seen: int
    """Number of pages that are noted as seen."""
    exports: list[Export] = field(default_factory=list)


def new_allocation(chain: Chain, match: Match, block_size: int) -> Allocation:
    """Returns an allocation that resumes where the match says."""
    position = match.report.state_length
    return Allocation(
        chain=chain,
        report=match.report,
        state=State.READY,
        page_table=[],
        path=[],
        state_length=position,
        write_from=position,
        slot_in=ZERO_SLOT,
        slot_out=ZERO_SLOT,
        source=None,
        page_copy=None,
        pinned_tail=(),
        end=End(position=len(chain), time=0),
        facts=PromptFacts(
            prompt_length=len(chain),
            grid=block_size,
            branch_points=match.branch_points,
            block_size=block_size,
        ),
    )
