"""One request's part of a step, as data: the tokens it computes, and the pages and slots it reads
and writes."""

from __future__ import annotations

import sys
from array import array

from milepost.pictures import overlapping, position_shift
from milepost.scheduler.memory import PrefixMemory
from milepost.scheduler.plans import PromptScoring, SequencePlan
from milepost.scheduler.request import Request


def plan_sequence(
    memory: PrefixMemory,
    request: Request,
    num_tokens: int,
    *,
    num_drafts: int = 0,
    max_num_exports: int = 0,
    num_lookahead_tokens: int = 0,
) -> SequencePlan:
    """Plans a running request's next `num_tokens` tokens and the drafts after them. With neither,
    the part only folds the committed tokens into the state. If there is room, the page table of a
    request that samples reaches `num_lookahead_tokens` further than necessary."""
    allocation, chain = request.allocation, request.chain
    assert allocation is not None
    start = allocation.planned
    end = start + num_tokens
    is_ahead = num_tokens > 0 and start == request.num_tokens
    samples = num_tokens > 0 and end >= request.num_tokens and request.max_tokens > 0
    num_known = min(num_drafts, request.num_tokens - end)
    tokens = b"" if is_ahead else chain.token_bytes(start, end + max(num_known, 0))
    if num_drafts > num_known:
        tokens += array("I", request.drafts[:num_drafts]).tobytes()
    if samples and num_lookahead_tokens:
        longest = request.num_prompt_tokens + request.max_tokens
        memory.extend(allocation, min(end + num_drafts + num_lookahead_tokens, longest))
    # Planning the chunk changes the allocation, and this step reads what it was before.
    fold, slot_in, page_copy = allocation.num_unfolded, allocation.slot_in, allocation.page_copy
    window_copy = allocation.window_copy
    is_new, is_prompt = not request.num_planned_pages, request.is_at_prompt
    exports = tuple(memory.take_exports(allocation, end, max_num_exports, num_drafts))
    new_pages = tuple(allocation.page_table[request.num_planned_pages :])
    new_windows = tuple(allocation.window_table[request.num_planned_windows :])
    request.num_planned_pages = len(allocation.page_table)
    request.num_planned_windows = len(allocation.window_table)
    return SequencePlan(
        number=request.number,
        start=start,
        num_tokens=num_tokens + num_drafts,
        tokens=tokens,
        new_pages=new_pages,
        write_from=allocation.write_from,
        slot_in=slot_in,
        slot_out=allocation.slot_out,
        exports=exports,
        page_copy=page_copy,
        new_windows=new_windows,
        window_copy=window_copy,
        samples=samples,
        fold=fold,
        num_drafts=num_drafts,
        is_ahead=is_ahead,
        is_prompt=is_prompt,
        scoring=_scoring(request, start, end),
        pictures=tuple(overlapping(chain.pictures, start, end)),
        shift=position_shift(chain.pictures, start),
        history=chain.token_bytes(0, start) if is_new and request.keeps_history else None,
    )


def place_in_batch(plan: SequencePlan) -> tuple[int, int]:
    """Sort key of a sequence in the batch: decodes come first, by slot, since states that are
    adjacent need not be gathered. Decodes whose token is not known yet come before the others."""
    if not plan.is_decode:
        return 2, sys.maxsize
    return 1 - plan.is_ahead, plan.slot_out


def _scoring(request: Request, start: int, end: int) -> PromptScoring | None:
    """Returns which log-probabilities a request wants for the chunk [start, end); None if it wants
    none."""
    num_top = request.num_prompt_logprobs
    end = min(end + 1, request.num_prompt_tokens)
    if num_top is None or start + 1 >= end:
        return None
    return PromptScoring(targets=request.chain.token_bytes(start + 1, end), num_top=num_top)
