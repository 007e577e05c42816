"""Proposes draft tokens for running requests, and decides how many of them to verify.

Callers import from here. The package runs on the host only and needs no torch. Drafts of the
model's own head, which runs after a step (`runner.plain`), come in through `HeadDrafter`.

Drafts never change an answer: a draft is accepted only if it is the very token that would have been
sampled (`runner.in_flight`).
"""

from __future__ import annotations

from milepost.speculative.drafter import Drafter, DraftWish, FirstOf, HeadDrafter
from milepost.speculative.lookup import NgramDrafter, SuffixDrafter
from milepost.speculative.policy import Adaptive, Always, Policy
from milepost.speculative.speculation import Speculation
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
    """Builds the drafter of a configuration; `head` is the model's own, if it has one."""
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
    """Builds the policy that decides how many drafts each request gets."""
    return Adaptive(config.num_tokens) if config.adaptive else Always(config.num_tokens)
