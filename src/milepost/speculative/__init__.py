"""Drafts what may follow the tokens of running requests, and decides how much of it to verify.

Callers import from here. Host only; needs no torch. Drafts of the model's own head, which runs
behind a step (`runner.drafting`), come in through `HeadDrafter`.

Whatever is drafted, answers are the same: a draft is accepted if it is the very token that would
have been sampled (`runner.acceptance`).
"""

from __future__ import annotations

from milepost.speculative.drafter import Drafter, DraftWish
from milepost.speculative.head import HeadDrafter
from milepost.speculative.methods import FirstOf
from milepost.speculative.ngram import NgramDrafter
from milepost.speculative.policy import Adaptive, Always, Policy
from milepost.speculative.speculation import Speculation
from milepost.speculative.suffix import SuffixDrafter
from milepost.speculative_config import SpeculativeConfig

__all__ = [
    "Adaptive",
    "Always",
    "DraftWish",
    "Drafter",
    "FirstOf",
    "HeadDrafter",
    "NgramDrafter",
    "Policy",
    "Speculation",
    "SuffixDrafter",
    "drafter_of",
    "policy_of",
]


def drafter_of(config: SpeculativeConfig, head: HeadDrafter | None = None) -> Drafter:
    """The drafter of a configuration; `head` is the model's own, where it has one."""
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
        else:
            assert head is not None, "a head that is asked for is there"
            drafters.append(head)
    return drafters[0] if len(drafters) == 1 else FirstOf(drafters)


def policy_of(config: SpeculativeConfig) -> Policy:
    """How many drafts each request is given."""
    return Adaptive(config.num_tokens) if config.adaptive else Always(config.num_tokens)
