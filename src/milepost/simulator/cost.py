"""Duration of a step on a machine, from measured constants in a small TOML or JSON file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from milepost.errors import TraceError
from milepost.pictures import Picture
from milepost.scheduler.encoders import TowerCost
from milepost.scheduler.plans import StepPlan
from milepost.small_files import read_small

SHIPPED = Path(__file__).with_name("costs")
MAX_COST = 2**53
"""Largest number of a cost model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds and bytes; a file names every field, but for those of a vision tower."""

    name: str
    step_s: float
    """Fixed time of a step that prefills."""
    prefill_token_s: float
    attention_pair_s: float
    """Time for one prefilled token to attend to one earlier token."""
    decode_step_s: float
    """Fixed time of a step that only decodes."""
    decode_seq_s: float
    decode_context_s: float
    """Time to read the KV of one token before a decoded one."""
    page_token_bytes: int
    """Bytes of one token's KV in all attention layers."""
    state_bytes: int
    """Bytes of one slot."""
    encoder_token_s: float = 0.0
    """Time of the vision tower for one token of a picture."""
    encoder_pair_s: float = 0.0
    """The encoder's time for each pair of tokens of a picture."""
    encoder_depth: int = 1
    """Number of its layers, and so the most steps that one picture is encoded over."""

    @property
    def tower(self) -> TowerCost:
        """Returns the work of the vision tower in tokens of text, for the scheduler."""
        token_s = self.prefill_token_s or 1.0
        return TowerCost(
            linear=self.encoder_token_s / token_s,
            quadratic=self.encoder_pair_s / token_s,
            depth=max(int(self.encoder_depth), 1),
        )

    def step_time_s(self, plan: StepPlan) -> float:
        """Returns the duration of one step."""
        num_decodes = plan.num_decodes
        decodes, prefills = plan.sequences[:num_decodes], plan.sequences[num_decodes:]
        context = sum(sequence.start for sequence in decodes)
        decode_s = num_decodes * self.decode_seq_s + context * self.decode_context_s
        if plan.encodes or plan.encode_part is not None:
            decode_s += self.tower.of_step(plan) * self.prefill_token_s
        if not prefills:
            return self.decode_step_s + decode_s
        prefill_s = sum(self.prefill_s(s.start, s.end) for s in prefills)
        return self.step_s + prefill_s + decode_s

    def prefill_s(self, start: int, end: int) -> float:
        """Returns the time that computing the tokens [start, end) adds to a step."""
        num_tokens = end - start
        pairs = num_tokens * (start + end) / 2
        return num_tokens * self.prefill_token_s + pairs * self.attention_pair_s

    def encode_s(self, pictures: Sequence[Picture], end: int) -> float:
        """Returns the time of the vision tower for the pictures that end in a prompt's first `end`
        tokens."""
        whole = [each for each in pictures if each.end <= end]
        return sum(map(self.tower.of, whole)) * self.prefill_token_s

    def bytes_of(self, num_pages: int, num_slots: int, page_size: int) -> int:
        """Returns the bytes of pages and slots together."""
        return num_pages * page_size * self.page_token_bytes + num_slots * self.state_bytes

    def split(self, num_bytes: int, page_size: int, max_num_seqs: int) -> tuple[int, int]:
        """Returns the pages and slots that an engine with two pools makes of its bytes: a slot for
        each request that may run, and a sixth of the rest for more.
        """
        running = min(max_num_seqs * self.state_bytes, num_bytes // 2)
        num_slots = (running + (num_bytes - running) // 6) // self.state_bytes
        kv_bytes = num_bytes - num_slots * self.state_bytes
        return kv_bytes // (page_size * self.page_token_bytes), num_slots


def shipped_costs() -> list[str]:
    """Returns the names of the cost models in the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def read_cost(name: str) -> CostModel:
    """Reads a shipped model by name, or a file by path. Raises TraceError."""
    path = SHIPPED / f"{name}.toml" if name in shipped_costs() else Path(name)
    try:
        text = read_small(path)
        row = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        known = ", ".join(shipped_costs())
        raise TraceError(
            f"cost model {name!r}: {error.strerror}; give a file or one of {known}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"cost model {path}: {error}") from error
    return _checked(row, path)


def _checked(row: dict[str, Any], path: Path) -> CostModel:
    known = fields(CostModel)
    needed = {field.name for field in known if field.default is MISSING}
    wrong = sorted((needed - row.keys()) | (row.keys() - {field.name for field in known}))
    if wrong:
        raise TraceError(f"cost model {path}: missing or unknown: {', '.join(wrong)}")
    for name in sorted(row.keys() - {"name"}):
        least = 1 if name.endswith("_bytes") else 0
        if not isinstance(row[name], (int, float)) or not least <= row[name] < MAX_COST:
            raise TraceError(
                f"cost model {path}: {name}={str(row[name])[:40]} is not a number from {least} up"
            )
    return CostModel(**row)
