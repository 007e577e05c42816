"""The answers to one HTTP request, as they come from the engine."""

from __future__ import annotations

import asyncio

from milepost.engine.processes import Output, Stream, StreamBell


class Submission:
    """The streams of one HTTP request; `close` it, whatever happens."""

    def __init__(self, streams: list[Stream], bell: StreamBell, timer: asyncio.TimerHandle) -> None:
        self._streams = streams
        self._num_open = len(streams)
        self._bell = bell
        self._timer = timer

    async def arrived(self) -> list[tuple[int, Output]]:
        """(Number of the prompt, what its answers gained) of what has come, at most one of each
        prompt: at least one in all, or none after the last. Raises as `Stream.take`.
        """
        found: list[tuple[int, Output]] = []
        while self._num_open and not found:
            await self._bell.wait()
            for number, stream in enumerate(self._streams):
                output = stream.take()
                if output is not None:
                    found.append((number, output))
                    self._num_open -= output.finished
        return found

    async def begun(self) -> None:
        """Wait until something has arrived, and leave it. Raises what `arrived` would."""
        await self._bell.wait()
        self._bell.ring()
        for stream in self._streams:
            stream.check()

    def close(self) -> None:
        """Give up what is not over."""
        self._timer.cancel()
        for stream in self._streams:
            stream.close()
