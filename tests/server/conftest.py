"""A real server in a process of its own, with a tiny model, for all tests that want one."""

from __future__ import annotations

import contextlib
import functools
import os
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import pytest

from tests import chatmodel, forked

FLAGS = {
    "--port": "0",
    "--cpu-cache-gib": "0.05",
    "--max-num-seqs": "8",
    "--served-model-name": "tiny",
}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
"""A model this small gains nothing from more threads."""
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Servers here speak plain HTTP: each client would read all certificates, for 20 ms."""
get = functools.partial(httpx.get, verify=NO_TLS)
post = functools.partial(httpx.post, verify=NO_TLS)


@dataclass(slots=True)
class Server:
    """A running `milepost serve`."""

    process: subprocess.Popen[str] | forked.Program
    url: str
    log: list[str] = field(default_factory=list)
    pid_file: Path | None = None

    def client(self, key: str = "none") -> openai.OpenAI:
        http = httpx.Client(verify=NO_TLS, timeout=60)
        options = {"api_key": key, "max_retries": 0, "http_client": http}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, verify=NO_TLS, timeout=60)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = get(f"{self.url}/metrics").text.splitlines()
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.partition("{")[0].partition(" ")[0] == f"milepost:{name}"
        ]
        assert values, f"no metric {name}"
        return sum(values)

    @property
    def engine_pid(self) -> int:
        """The process that holds the engine: the child that is no resource tracker."""
        if self.pid_file is not None:
            return int(self.pid_file.read_text())
        (pid,) = self.children(b"spawn_main")
        return pid

    def children(self, word: bytes) -> list[int]:
        """The server's child processes that have this in their command line."""
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        pids = [pid for thread in threads for pid in _content(thread / "children").split()]
        return [int(pid) for pid in pids if word in _content(Path(f"/proc/{int(pid)}/cmdline"))]


def _content(path: Path) -> bytes:
    """Nothing of a thread or a process that has ended meanwhile."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@contextlib.contextmanager
def serving(folder: Path | None, *flags: str, forks: bool = True) -> Iterator[Server]:
    """A server that takes requests, until the end of the block; without a folder, of our model.

    Unless it `forks` (`tests.forked`), it is started as users start it.
    """
    arguments = ["serve", *([str(folder)] if folder else []), *flags]
    for flag, value in FLAGS.items():
        arguments += [flag, value] if flag not in flags else []
    with tempfile.TemporaryDirectory() as own:
        pid_file = Path(own) / "pid"
        process = forked.Program(arguments, ENVIRONMENT, pid_file) if forks else _program(arguments)
        server = Server(process, "", pid_file=pid_file if forks else None)
        reading = threading.Thread(target=_read, args=(process.stderr, server.log))
        reading.start()
        try:
            line = process.stdout.readline()
            assert line.startswith("Milepost listens on "), (line, server.log)
            server.url = line.split()[-1]
            yield server
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            reading.join()
            process.stdout.close()
            process.stderr.close()


def _program(arguments: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "milepost", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=ENVIRONMENT, text=True, **pipes)


def _read(stream, lines: list[str]) -> None:
    for line in stream:
        lines.append(line.rstrip("\n"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return chatmodel.save(tmp_path_factory.mktemp("chatmodel"))


@pytest.fixture(scope="session")
def server(folder) -> Iterator[Server]:
    """As users start it."""
    with serving(folder, forks=False) as server:
        yield server


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture
def http(server) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client
