"""A helper process that answers one message after the other, and can be killed if one takes too
long.

`Child` is the side that starts it, in an event loop. The process runs a package's `process.main`,
which reads messages from its standard input and writes its answers to standard output, as frames.
It ends when its input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from milepost.engine.ending import end_with_parent
from milepost.frames import LENGTH, framed, read_frames
from milepost.logs import LogSetup, current, set_up

Answer = bytes | bytearray
_PIECE_BYTES = 2**18


async def start_process(package: str, words: Sequence[str]) -> asyncio.subprocess.Process:
    """Starts Python with a package's `process.main`, and these words as its arguments."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        f"from {package}.process import main; main()",
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is the server's to handle
    )


class Child:
    """A process that runs `main` of a package's module `process`; `start` before `ask`, `close` at
    the end. Once it has ended or was killed, it can be started again."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._process: asyncio.subprocess.Process | None = None
        self._killed: asyncio.subprocess.Process | None = None
        """A process that was killed and may not have ended yet."""

    @property
    def pid(self) -> int | None:
        """The process id; None while there is no process."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Starts the process, after the one before it has ended."""
        await self.close()
        self._process = await start_process(self._package, self._log_words())

    def _log_words(self) -> list[str]:
        setup, name = current(), self._package.rpartition(".")[2]
        return [] if setup is None else replace(setup, process=name).words()

    async def ask(
        self, message: bytes, timeout_s: float | None = None
    ) -> tuple[Answer | None, int]:
        """Returns the answer, or None and the exit status if the process ends first. Raises
        TimeoutError. Ask one question at a time. The process is killed if nobody waits for its
        answer any more: the next question would get it."""
        process = self._process
        if process is None:  # closed while its caller did something else
            return None, 0
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        try:
            async with asyncio.timeout(timeout_s):
                await _write(process.stdin, message)
                (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                return await _read(process.stdout, length), 0
        except (ConnectionError, asyncio.IncompleteReadError):
            self._process = None
            return None, await process.wait()
        except BaseException:
            self._kill()
            raise

    def _kill(self) -> None:
        """Kills the process, and does not wait until it has ended."""
        if self._process is None:
            return
        self._killed, self._process = self._process, None
        if self._killed.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._killed.kill()

    async def close(self) -> None:
        """Ends the process, and waits for that."""
        self._kill()
        killed, self._killed = self._killed, None
        if killed is not None:
            await killed.wait()


async def _write(stream: asyncio.StreamWriter, message: bytes) -> None:
    """Writes a frame, a piece at a time: the event loop does not wait for megabytes."""
    stream.write(LENGTH.pack(len(message)))
    whole = memoryview(message)
    for start in range(0, len(message), _PIECE_BYTES):
        stream.write(whole[start : start + _PIECE_BYTES])
        await stream.drain()


async def _read(stream: asyncio.StreamReader, length: int) -> Answer:
    if length <= _PIECE_BYTES:
        return await stream.readexactly(length)
    found = bytearray(length)
    done = 0
    while done < length:
        piece = await stream.read(min(length - done, _PIECE_BYTES))
        if not piece:
            raise asyncio.IncompleteReadError(b"", length)
        found[done : done + len(piece)] = piece
        done += len(piece)
    return found


# --- inside the process ---------------------------------------------------------------------------


def messages() -> Iterator[bytes]:
    """Yields the messages on standard input, until its end."""
    setup = LogSetup.of_words(sys.argv[1:])
    if setup is not None:
        set_up(setup)
    source = sys.stdin.buffer
    end_with_parent(source.fileno())
    yield from read_frames(source.read)


def answer(message: bytes) -> None:
    """Writes a message to standard output."""
    sys.stdout.buffer.write(framed(message))
    sys.stdout.buffer.flush()


def bound_memory(num_bytes: int) -> None:
    """Limits the memory that this process may still allocate. Beyond that, allocations fail instead
    of exhausting the machine."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + num_bytes
    resource.setrlimit(
        resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )
