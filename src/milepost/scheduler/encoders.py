"""Plans the work of the vision tower: which pictures a step encodes, and which outputs are dropped.

Outputs are kept by the identities of pictures, up to a number of tokens; those not used for longest
go first. A step encodes what its chunks reach, as far as its share of encoder work goes: then the
chunk ends before the picture, and the steps of other requests go on. Knows no pixels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from milepost.cache.placement import floor
from milepost.errors import InvalidPromptError
from milepost.pictures import Picture, overlapping
from milepost.scheduler.stats import SchedulerStats

SHARE_BESIDE_DECODES = 4
"""A step with decodes encodes no more than this part of its tokens, or one picture. So a large
picture delays the tokens of others once, and never do several together."""


class Encoders:
    """The encoder outputs on the device, and the encoder work of the step being planned.

    `capacity` is in tokens; `max_step_tokens` is the token budget of a step, for the tower's tokens
    too. Chunks end at multiples of `grid`.
    """

    def __init__(
        self, capacity: int, max_step_tokens: int, grid: int, stats: SchedulerStats
    ) -> None:
        self._capacity = capacity
        self._max_step_tokens = max_step_tokens
        self._grid = grid
        self._stats = stats
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        """Tokens by identity, the one used last at the end."""
        self._unsure: set[bytes] = set()
        """Pictures of `_kept` that may not have been encoded, since their step was cut short."""
        self._needed: dict[bytes, int] = {}
        """Pictures of `_kept` that the step being planned reads."""
        self._encodes: list[Picture] = []
        self._drops: dict[bytes, None] = {}
        self._left = 0

    def check(self, pictures: Sequence[Picture]) -> None:
        """Raises InvalidPromptError if a grid step of a prompt needs more outputs than are kept."""
        for picture in pictures:
            start = floor(picture.offset, self._grid)
            together = overlapping(pictures, start, start + self._grid)
            num_tokens = sum(each.num_tokens for each in together)
            if num_tokens > self._capacity:
                raise InvalidPromptError(
                    f"images of {num_tokens} tokens side by side, and encoder_cache_size="
                    f"{self._capacity}: send smaller images, or raise encoder_cache_size"
                )

    def begin(self, *, has_decodes: bool) -> None:
        """Begin a step."""
        self._needed.clear()
        share = SHARE_BESIDE_DECODES if has_decodes else 1
        self._left = self._max_step_tokens // share

    def reach(self, pictures: Sequence[Picture], start: int, end: int) -> int:
        """Returns how far a chunk from `start` to `end` may go: to its end, or to a picture that
        this step cannot encode. The first chunk of a step to reach a picture gets a grid step.
        """
        sure = start if self._encodes else floor(start, self._grid) + self._grid
        for picture in overlapping(pictures, start, end):
            if not self._provide(picture, is_urgent=picture.offset < sure):
                return max(picture.offset, start)
            self._stats.num_encoder_hits += picture.offset >= start and picture not in self._encodes
        return end

    def take(self) -> tuple[tuple[bytes, ...], tuple[Picture, ...]]:
        """Returns the identities to drop, and the pictures to encode, in the planned step."""
        drops, encodes = tuple(self._drops), tuple(self._encodes)
        self._drops.clear()
        self._encodes.clear()
        self._stats.num_encoded += len(encodes)
        self._stats.encoded_tokens += sum(each.num_tokens for each in encodes)
        return drops, encodes

    def roll_back(self, encodes: Sequence[Picture]) -> None:
        """Note that a step was cut short: nobody knows what it has encoded."""
        self._unsure.update(each.identity for each in encodes if each.identity in self._kept)

    def _provide(self, picture: Picture, *, is_urgent: bool) -> bool:
        """Have the step read a picture; False if it cannot. It is encoded unless it is kept."""
        identity, num_tokens = picture.identity, picture.num_tokens
        if identity in self._kept and identity not in self._unsure:
            self._kept.move_to_end(identity)
            self._needed[identity] = num_tokens
            return True
        if identity in self._drops or (num_tokens > self._left and not is_urgent):
            return False
        if sum(self._needed.values()) + num_tokens > self._capacity:
            return False
        self._unsure.discard(identity)
        self._kept[identity] = self._needed[identity] = num_tokens
        self._kept.move_to_end(identity)
        self._left -= num_tokens
        self._encodes.append(picture)
        self._make_room()
        return True

    def _make_room(self) -> None:
        """Drop what was not used for longest, and is not needed, until the rest fits."""
        over = sum(self._kept.values()) - self._capacity
        for identity in [each for each in self._kept if each not in self._needed]:
            if over <= 0:
                break
            over -= self._kept.pop(identity)
            self._unsure.discard(identity)
            self._drops[identity] = None
