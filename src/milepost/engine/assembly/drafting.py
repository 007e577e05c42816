"""Makes the drafters of an engine, by its configuration and its model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeGuard

from milepost.errors import UnsupportedModelError
from milepost.layers.context import LayerSpec, RecurrentSpec
from milepost.runner.in_flight import Accept, accept_at, accept_equal
from milepost.scheduler.scheduler import Scheduler
from milepost.speculative import HeadDrafter, Speculation, drafter_of, policy_of
from milepost.speculative_config import SpeculativeConfig

logger = logging.getLogger(__name__)


def num_drafts_of(
    wanted: SpeculativeConfig | None,
    specs: Sequence[LayerSpec],
    without: Sequence[str],
    *,
    has_head: bool,
    is_fused: bool,
) -> int:
    """Returns the largest number of drafts in one step; 0 if nothing is drafted. `without` names
    mixers that have no kernels for drafts. Raises UnsupportedModelError for a model with such
    mixers, or with head sizes that the fused kernels do not support, unless the method is `auto`.
    """
    if wanted is None or (wanted.method == "auto" and not has_head):
        return 0
    odd = {spec.recurrent_shape[1:] for spec in specs if is_fused and _takes_drafts_plain(spec)}
    if not without and not odd:
        return wanted.num_tokens
    which = f"layers of {' and '.join(without)}"
    if not without:
        which = f"heads of {' by '.join(map(str, min(odd)))}, on a GPU,"
    message = f"speculative_config: a model with {which} cannot take drafts"
    if wanted.method != "auto":
        raise UnsupportedModelError(f"{message}; leave it out")
    logger.warning("%s: nothing is drafted", message)
    return 0


def _takes_drafts_plain(spec: LayerSpec) -> TypeGuard[RecurrentSpec]:
    """Whether only the reference kernels support drafts for this layer."""
    return isinstance(spec, RecurrentSpec) and not spec.takes_drafts_fused


def speculation_of(
    wanted: SpeculativeConfig | None, scheduler: Scheduler, num_drafts: int, *, has_head: bool
) -> Speculation | None:
    """Returns what drafts for the scheduler's requests; None if nothing is drafted."""
    if wanted is None or not num_drafts:
        return None
    if wanted.rejection_sample_method == "synthetic":
        logger.warning("speculative_config: drafts are accepted at random, answers are wrong")
    head = HeadDrafter() if has_head else None
    drafter = drafter_of(wanted, head)
    return Speculation(drafter, policy_of(wanted), scheduler, head)


def accept_of(wanted: SpeculativeConfig | None) -> Accept:
    """Returns the rule by which the runner accepts drafts."""
    rates = None if wanted is None else wanted.synthetic_acceptance_rates
    return accept_equal if rates is None else accept_at(rates)
