"""Drafts what may follow the tokens of running requests, and decides how much of it to judge.

This is the door: callers import from here. Host only; needs no torch. A drafter that runs on the
model's device (`mtp`) is made by whoever has the model, and handed to `drafter_of`.

Whatever is drafted, answers are the same: a draft is accepted where it is the very token that would
have been sampled (`runner.flight`).
"""

from __future__ import annotations

from milepost.speculative.drafter import Drafter, Wish
from milepost.speculative.methods import FirstOf
from milepost.speculative.ngram import NgramDrafter
from milepost.speculative.suffix import SuffixDrafter
from milepost.speculative_config import SpeculativeConfig

__all__ = ["Drafter", "FirstOf", "NgramDrafter", "SuffixDrafter", "Wish", "drafter_of"]


def drafter_of(config: SpeculativeConfig, mtp: Drafter | None = None) -> Drafter | None:
    """The drafter of a configuration; `mtp` is the model's own, where it has one. None where
    `auto` finds none.
    """
    drafters: list[Drafter] = []
    for method in config.methods:
        if method == "suffix":
            drafters.append(
                SuffixDrafter(
                    depth=config.suffix_decoding_max_tree_depth,
                    factor=config.suffix_decoding_max_spec_factor,
                    min_prob=config.suffix_decoding_min_token_prob,
                    max_answers=config.suffix_decoding_max_cached_requests,
                )
            )
        elif method == "ngram":
            drafters.append(NgramDrafter(*config.lookup))
        elif mtp is not None:
            drafters.append(mtp)
        else:
            assert method == "auto", "a head that is asked for is there"
    if len(drafters) == 1:
        return drafters[0]
    return FirstOf(drafters) if drafters else None
