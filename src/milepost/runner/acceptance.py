"""Which drafts of a step are accepted: those that are what would have been sampled.

Behind each draft the model's own token is sampled with the noise of its position, as if the drafts
before it had been sampled one by one. So a run is what plain decoding would have returned, sampled
or greedy, whatever the drafts (Daliri, Musco and Suresh, Coupling without Communication, arXiv
2408.07978); they only decide how long it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from milepost.runner.choice import SampledToken
from milepost.scheduler.plans import SequencePlan, StepPlan

Run = list[SampledToken]
_BITS = 2**64 - 1
Accept = Callable[[SequencePlan, Sequence[int], Sequence[SampledToken]], Run]
"""The run of a sequence, of its drafts and what is sampled before each and behind the last."""


def accept_equal(
    _sequence: SequencePlan, drafts: Sequence[int], sampled: Sequence[SampledToken]
) -> Run:
    """Up to the first token that is no draft."""
    num = 0
    while num < len(drafts) and sampled[num].token_id == drafts[num]:
        num += 1
    return list(sampled[: num + 1])


def accept_at(rates: Sequence[float]) -> Accept:
    """Accepts the first drafts, up to each, so often, whatever they are. For benchmarks alone:
    answers are wrong.
    """

    def accept(
        sequence: SequencePlan, drafts: Sequence[int], sampled: Sequence[SampledToken]
    ) -> Run:
        draw, num = _uniform(sequence.number << 32 | sequence.start), 0
        while num < len(drafts) and draw < rates[num]:
            num += 1
        return [*map(SampledToken, drafts[:num]), sampled[num]]

    return accept


def _uniform(number: int) -> float:
    """From 0 to 1, by a mixing of bits (Steele, Lea and Flood, SplitMix): a generator of Python's
    would take as long as the rest of a run."""
    mixed = (number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _BITS
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _BITS
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _BITS
    return (mixed ^ mixed >> 31) / (_BITS + 1)


def runs_of(plan: StepPlan, sampled: Run, accept: Accept) -> dict[int, Run]:
    """The run of each request that samples, of all tokens that a step has sampled, request by
    request."""
    runs, first = {}, 0
    for sequence in plan.sequences:
        if sequence.samples:
            end = first + 1 + sequence.num_drafts
            run, first = sampled[first:end], end
            if sequence.num_drafts:
                run = accept(sequence, sequence.drafts, run)
            runs[sequence.number] = run
    return runs
