"""Pixels of the images of live requests, by identity: handed to the runner with each plan that
encodes them. Requests with the same image share it.
"""

from __future__ import annotations

from milepost.engine.loop.group import RequestGroup
from milepost.runner.recording import PictureRecord
from milepost.runner.runner import Runner
from milepost.scheduler.plans import StepPlan


class PixelStore:
    """Keeps pixels from `hold` to `let_go`, so that an image can be encoded more than once: after a
    preemption, or if its encoder output has been dropped.
    """

    def __init__(self) -> None:
        self._holders: dict[bytes, dict[int, PictureRecord]] = {}

    def hold(self, group: RequestGroup) -> None:
        """Keeps the pixels of a group's prompt."""
        for record in group.prompt.pixels:
            self._holders.setdefault(record.identity, {})[group.number] = record

    def let_go(self, group: RequestGroup) -> None:
        """Forgets a group's pixels, except those of images that other groups have too. A second
        call does nothing."""
        for record in group.prompt.pixels:
            holders = self._holders.get(record.identity, {})
            holders.pop(group.number, None)
            if not holders:
                self._holders.pop(record.identity, None)

    def hand_over(self, plan: StepPlan, runner: Runner) -> None:
        """Gives the runner the pixels of the images that a plan encodes, before it is launched."""
        begun = (
            [plan.encode_part.picture] if plan.encode_part and not plan.encode_part.first else []
        )
        for picture in (*plan.encodes, *begun):
            holders = self._holders[picture.identity]
            runner.take_pixels(next(iter(holders.values())))

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all pixels, with each image counted once."""
        return sum(len(next(iter(each.values())).rows) for each in self._holders.values())
