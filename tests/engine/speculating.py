"""Drafters that know the answers, and engines that ask them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from milepost import LLM
from milepost.scheduler.request import Request
from milepost.speculative import DraftWish
from tests.engines import VOCAB_SIZE


class Oracle:
    """Drafts what will come, but for mistakes: those that `errs` says of a place in an answer."""

    method = "oracle"

    def __init__(
        self,
        answers: Sequence[tuple[Sequence[int], Sequence[int]]],
        errs: Callable[[int], bool],
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self._answers = {tuple(prompt): list(answer) for prompt, answer in answers}
        self._errs = errs
        self._vocab_size = vocab_size

    def propose(self, wishes: Sequence[DraftWish]) -> list[Sequence[int]]:
        return [self._propose(wish.request, wish.most) for wish in wishes]

    def _propose(self, request: Request, most: int) -> list[int]:
        tokens = request.chain.tokens.tolist()
        answer = self._answers.get(tuple(tokens[: request.num_prompt_tokens]), [])
        first = request.num_output_tokens
        drafts = answer[first : first + most]
        return [
            (token + 1) % self._vocab_size if self._errs(place) else token
            for place, token in enumerate(drafts, start=first)
        ]

    def is_ready(self, request: Request) -> bool:
        return bool(self._propose(request, 1))

    def forget(self, request: Request) -> None:
        """It knows all the same."""


def never(_place: int) -> bool:
    return False


def drafting(num_drafts: int, **options: Any) -> dict[str, Any]:
    """Options of an engine that drafts as many tokens as it can."""
    config = {"method": "ngram", "num_speculative_tokens": num_drafts, "adaptive": False}
    return {"speculative_config": config | options}


def consult(llm: LLM, drafter: Any) -> LLM:
    """Have an engine ask this drafter."""
    llm.llm_engine.pipeline.speculation.drafter = drafter
    return llm
