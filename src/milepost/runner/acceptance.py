"""Decides which drafts of a step are accepted: those equal to the token that would have been
sampled.

After each draft, the model's own token is sampled with the noise of its position, as if the drafts
before it had been sampled one by one. So a run equals what plain decoding would have returned,
sampled or greedy, for any drafts (Daliri, Musco and Suresh, Coupling without Communication, arXiv
2408.07978); drafts only decide how long the run is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from milepost.runner.choice import SampledToken
from milepost.scheduler.plans import SequencePlan, StepPlan

TokenRun = list[SampledToken]
_BITS = 2**64 - 1
Accept = Callable[[SequencePlan, Sequence[int], Sequence[SampledToken]], TokenRun]
"""Returns the run of a sequence, given its drafts and the tokens sampled before each draft and
after the last."""


def accept_equal(
    _sequence: SequencePlan, drafts: Sequence[int], sampled: Sequence[SampledToken]
) -> TokenRun:
    """Accepts the sampled tokens up to the first that differs from its draft."""
    num = 0
    while num < len(drafts) and sampled[num].token_id == drafts[num]:
        num += 1
    return list(sampled[: num + 1])


def accept_at(rates: Sequence[float]) -> Accept:
    """Accepts drafts at given rates, whatever they are: `rates[i]` is how often the first i + 1
    drafts are accepted together. For benchmarks only: answers are wrong."""

    def accept(
        sequence: SequencePlan, drafts: Sequence[int], sampled: Sequence[SampledToken]
    ) -> TokenRun:
        draw, num = _uniform(sequence.number << 32 | sequence.start), 0
        while num < len(drafts) and draw < rates[num]:
            num += 1
        return [*map(SampledToken, drafts[:num]), sampled[num]]

    return accept


def _uniform(number: int) -> float:
    """Returns a uniform number from 0 to 1 by mixing bits (Steele, Lea and Flood, SplitMix).
    Python's own generator would take as long as the rest of a run."""
    mixed = (number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _BITS
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _BITS
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _BITS
    return (mixed ^ mixed >> 31) / (_BITS + 1)


def runs_of(plan: StepPlan, sampled: TokenRun, accept: Accept) -> dict[int, TokenRun]:
    """Returns the run of each request that samples. `sampled` holds all tokens that a step sampled,
    request by request."""
    runs, first = {}, 0
    for sequence in plan.sequences:
        if sequence.samples:
            end = first + 1 + sequence.num_drafts
            run, first = sampled[first:end], end
            if sequence.num_drafts:
                run = accept(sequence, sequence.drafts, run)
            runs[sequence.number] = run
    return runs
