"""Starts `milepost serve` for a benchmark, and reads what it says about itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Server:
    process: subprocess.Popen[str]
    url: str

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels; 0 if there is none of that name yet."""
        with urllib.request.urlopen(f"{self.url}/metrics") as response:
            lines = response.read().decode().splitlines()
        found = [line for line in lines if line.replace("{", " ").split(" ")[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def reset_cache(self) -> None:
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", method="POST")
        with urllib.request.urlopen(request) as response:
            response.read()

    def pids(self) -> dict[str, int]:
        """The HTTP process and the engine's."""
        return {"http": self.process.pid, "engine": self._engine()}

    def _engine(self) -> int:
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            for pid in (thread / "children").read_text().split():
                if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
        raise RuntimeError("the server has no engine process")


def rss_mib(pid: int) -> float:
    """Resident memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def num_fds(pid: int) -> int:
    """Open file descriptors."""
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextlib.contextmanager
def serving(flags: Sequence[str], source: Path | None = None) -> Iterator[Server]:
    """A server on a free port, until the end of the block; of another `source` tree, perhaps."""
    environment = dict(os.environ)
    if source is not None:  # before what else is there: dependencies may come that way
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(source.resolve()), known)))
    command = [sys.executable, "-m", "milepost", "serve", "--port", "0", "--no-access-log", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.startswith("Milepost listens on "):
            raise RuntimeError("the server did not start; its standard error says why")
        yield Server(process, line.split()[-1])
    finally:
        process.terminate()
        process.wait(60)
