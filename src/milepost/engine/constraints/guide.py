"""Constrains one answer: by a form, restrictions, or both.

A guide follows the tokens of one answer. Before each choice it says which tokens are allowed. If
the restrictions exclude everything that the form allows next, no token is allowed, and the answer
is over. A form that has begun defines by itself where reasoning is, so no reasoning budget counts
from there on.

Legend: W words of a mask, 32 tokens each: bit i of word w is token 32 w + i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from milepost.engine.constraints.guidance import FormGuide, Mask, form_masks
from milepost.engine.constraints.restrictions import Restriction


@dataclass(frozen=True, slots=True)
class Guide:
    """Follows one answer, which has a form, a restriction or both."""

    form: FormGuide | None
    restriction: Restriction | None

    @property
    def problem(self) -> str | None:
        """Why the form could not be followed to its end; None while it can."""
        return None if self.form is None else self.form.problem

    @property
    def counts(self) -> bool:
        """Whether the reasoning budget applies now."""
        return self.form is None or not self.form.is_bound

    @property
    def may_end(self) -> bool:
        """Whether the answer is complete if no further token is allowed."""
        return self.form is None or self.form.may_end

    @property
    def names(self) -> str:
        """The parameters that exclude tokens."""
        return "" if self.restriction is None else self.restriction.names

    def waits_for(self, num_tokens: int) -> bool:
        """Whether the next token is constrained by the last `num_tokens`, which are not known."""
        if self.form is not None:
            return True
        return self.restriction is not None and self.restriction.waits_for(num_tokens)

    def copy(self) -> Guide:
        """Returns a copy, to follow tokens that are not certain."""
        form, restriction = self.form, self.restriction
        return Guide(
            None if form is None else form.copy(),
            None if restriction is None else restriction.copy(),
        )

    def follows(self, token_id: int) -> bool:
        """Advances a copy over a token that is not certain. Returns False if it may not come, or
        nothing after it."""
        if self.restriction is not None:
            if not self.restriction.allows(token_id, counts=self.counts):
                return False
            self.restriction.accept(token_id)
        return self.form is None or self.form.follows(token_id)

    def allows(self, token_id: int) -> bool:
        """Whether a token may come next. Used for tokens that were sampled without their mask."""
        rules = self.restriction
        if rules is not None and not rules.allows(token_id, counts=self.counts):
            return False
        return self.form is None or self.form.allows(token_id)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Returns how many of these may come next, one after the other."""
        num = len(token_ids) if self.form is None else self.form.num_allowed(token_ids)
        if self.restriction is None:
            return num
        return self.restriction.num_allowed(token_ids[:num], counts=self.counts)

    def accept(self, token_id: int) -> None:
        """Advances by the token that was chosen."""
        if self.restriction is not None:
            self.restriction.accept(token_id)
        if self.form is not None:
            self.form.accept(token_id)


def masks(guides: Sequence[Guide | None]) -> list[Mask | None]:
    """Returns a mask [W] of the allowed next tokens for each answer. None allows all; an answer
    that is over allows none."""
    found = form_masks([None if guide is None else guide.form for guide in guides])
    for i, guide in enumerate(guides):
        if guide is not None and guide.restriction is not None:
            found[i] = _both(found[i], guide.restriction.mask(counts=guide.counts))
    return found


def masks_along(
    guide: Guide | None, drafts: Sequence[int], first: Mask | None
) -> list[Mask | None]:
    """Returns a mask [W] of the tokens that may follow each of an answer's drafts, given the drafts
    before it; `first` has those that may come now. The list ends at the first draft that is not
    allowed, or where the form becomes too complex, which the answer then finds by itself."""
    if guide is None:
        return [first] * (1 + len(drafts))
    found, guide = [first], guide.copy()
    for draft in drafts:
        if not guide.follows(draft):
            break
        (mask,) = masks([guide])
        if guide.problem:
            break
        found.append(mask)
    return found


def _both(form: Mask | None, restriction: Mask | None) -> Mask | None:
    """Returns the tokens that two masks allow."""
    if form is None or restriction is None:
        return restriction if form is None else form
    return form & restriction
