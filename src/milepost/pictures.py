"""A picture in a prompt, as everything but the tower knows it: no pixels, no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile, zip_longest

import msgspec

from milepost.errors import InvalidPromptError

IDENTITY_BYTES = 16


class Picture(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A picture that takes `num_tokens` tokens of a prompt from `offset` on.

    The identity is a hash of the decoded and resized pixels and of the grid. Pictures of one
    identity are the same to the model, whatever file or request they came in.
    """

    identity: bytes
    """`IDENTITY_BYTES` bytes."""
    offset: int
    """Index of its first token in the prompt. The tokens around it, such as `<|vision_start|>`, are
    text."""
    num_tokens: int
    grid: tuple[int, int, int]
    """Frames, rows and columns in patches, like transformers' `image_grid_thw`."""
    num_positions: int
    """Rotary positions that the picture takes: the token after it is this many after its first.
    Equal to `num_tokens` in models without M-RoPE; with M-RoPE the longer side in tokens."""

    @property
    def end(self) -> int:
        """Index of the first token after it."""
        return self.offset + self.num_tokens


def overlapping(pictures: Sequence[Picture], start: int, end: int) -> Iterator[Picture]:
    """Yields the pictures of a prompt with tokens in [start, end). Costs the logarithm of all."""
    first = bisect_right(pictures, start, key=lambda each: each.end)
    return takewhile(lambda each: max(each.offset, start) < end, islice(pictures, first, None))


def position_shift(pictures: Iterable[Picture], index: int) -> int:
    """Returns the rotary position of a token minus its index; 0 or negative. The tokens of a
    picture have the shift of its first one. It depends only on the pictures that end at or before
    the token, so a resume anywhere in a prompt finds the positions of a cold run."""
    return sum(each.num_positions - each.num_tokens for each in pictures if each.end <= index)


def past_picture(pictures: Sequence[Picture], position: int) -> int:
    """Returns the end of the picture that a position is inside of, or the position itself."""
    inside = overlapping(pictures, position - 1, position + 1)
    return next((each.end for each in inside if each.offset < position < each.end), position)


def group_ends(pictures: Sequence[Picture], least_apart: int, most: int) -> list[int]:
    """Returns the ends of the last `most` groups of pictures, which have texts of `least_apart`
    tokens or more between them: the turns of a conversation.
    """
    following = [each.offset for each in pictures[1:]]
    ends = [
        each.end
        for each, after in zip_longest(pictures, following)
        if after is None or after - each.end >= least_apart
    ]
    return ends[-most:]


def check_pictures(pictures: Sequence[Picture], num_tokens: int) -> None:
    """Raises InvalidPromptError unless pictures follow each other in a prompt of `num_tokens`."""
    done = 0
    for index, each in enumerate(pictures):
        if len(each.identity) != IDENTITY_BYTES:
            raise InvalidPromptError(
                f"picture {index}: an identity of {len(each.identity)} bytes: use {IDENTITY_BYTES}"
            )
        if each.num_tokens < 1 or not 1 <= each.num_positions <= each.num_tokens:
            raise InvalidPromptError(
                f"picture {index}: {each.num_tokens} tokens with {each.num_positions} positions: "
                "use 1 token or more, and no more positions than tokens"
            )
        if each.offset < done or each.end >= num_tokens:
            raise InvalidPromptError(
                f"picture {index}: tokens {each.offset} to {each.end} of a prompt of {num_tokens}: "
                "pictures follow one another, and a token follows the last"
            )
        done = each.end
