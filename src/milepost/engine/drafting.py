"""What an engine drafts with, by its configuration and its model."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from milepost.errors import UnsupportedModelError
from milepost.layers.context import LayerSpec
from milepost.runner.acceptance import Accept, accept_at, accept_equal
from milepost.scheduler.scheduler import Scheduler
from milepost.speculative import HeadDrafter, Speculation, drafter_of, policy_of
from milepost.speculative_config import SpeculativeConfig

logger = logging.getLogger(__name__)


def num_drafts_of(
    wanted: SpeculativeConfig | None, specs: Sequence[LayerSpec], *, has_head: bool
) -> int:
    """Of one step at most; 0 where nothing is drafted. Raises UnsupportedModelError for a model
    whose states cannot take drafts, unless the method is `auto`."""
    if wanted is None or (wanted.method == "auto" and not has_head):
        return 0
    others = sorted({type(spec).__name__ for spec in specs if not spec.takes_drafts})
    if not others:
        return wanted.num_tokens
    message = f"speculative_config: a model with states of {', '.join(others)} cannot take drafts"
    if wanted.method != "auto":
        raise UnsupportedModelError(f"{message}; leave it out")
    logger.warning("%s: nothing is drafted", message)
    return 0


def speculation_of(
    wanted: SpeculativeConfig | None, scheduler: Scheduler, num_drafts: int, *, has_head: bool
) -> Speculation | None:
    """What drafts for the scheduler's requests; None where nothing is drafted."""
    if wanted is None or not num_drafts:
        return None
    if wanted.rejection_sample_method == "synthetic":
        logger.warning("speculative_config: drafts are accepted at random, answers are wrong")
    head = HeadDrafter() if has_head else None
    drafter = drafter_of(wanted, head)
    return Speculation(drafter, policy_of(wanted), scheduler, head)


def accept_of(wanted: SpeculativeConfig | None) -> Accept:
    """Which drafts the runner accepts."""
    rates = None if wanted is None else wanted.synthetic_acceptance_rates
    return accept_equal if rates is None else accept_at(rates)
