"""Whether an engine can continue. A failed step leaves unknown states, so it ends the engine; with
several ranks it ends all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from milepost.engine.assembly import Team
from milepost.errors import EngineDeadError


class FailureLatch:
    """Remembers the first failure of one engine, and ends the other ranks."""

    def __init__(self, team: Team | None) -> None:
        self._team = team
        self._death: BaseException | None = None

    @property
    def is_alive(self) -> bool:
        return self._death is None

    def check(self) -> None:
        """Raises EngineDeadError if something has failed before."""
        if self._death is not None:
            raise EngineDeadError(
                f"the step loop failed earlier ({self._death!r}): make a new engine"
            ) from self._death

    @contextmanager
    def fatal(self, kind: type[BaseException]) -> Iterator[None]:
        """Ends the engine if this kind of exception is raised inside."""
        try:
            yield
        except kind as error:
            lost = self._team.failure() if self._team and self._team.has_lost_one else None
            self.end(error)
            if not isinstance(error, Exception) or isinstance(error, EngineDeadError):
                raise
            # What becomes of a step that misses a rank says less than what became of the rank.
            raise lost or EngineDeadError(f"the step loop failed: {error!r}") from error

    def end(self, error: BaseException) -> None:
        """Ends the engine, and the other ranks with it."""
        self._death = error
        if self._team is not None:
            self._team.close()
