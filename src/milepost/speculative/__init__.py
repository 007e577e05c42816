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
from milepost.speculative.speculation import Speculation, drafter_of, speculation_of

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
    "speculation_of",
]
