"""Processes whose parent is killed end with it, whatever they are doing."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from milepost.config import EngineConfig
from milepost.engine.ending import without_interrupts
from milepost.engine.processes import engine as process
from milepost.errors import ConfigError
from tests.waiting import until

PARENT = """
import socket, subprocess, sys
ours, theirs = socket.socketpair()
command = [sys.executable, "-c", sys.argv[1], str(theirs.fileno())]
subprocess.run(command, pass_fds=[theirs.fileno()])
"""
CHILD = """
import ctypes, os, sys
from milepost.engine.ending import end_with_parent
end_with_parent(int(sys.argv[1]))
{first}
print(os.getpid(), flush=True)
{work}
"""
HOLDING_THE_INTERPRETER = CHILD.format(first="", work="ctypes.PyDLL(None).sleep(600)")
WITHOUT_THE_KERNEL = CHILD.format(
    first="ctypes.CDLL(None).prctl(1, 0)", work="ctypes.CDLL(None).sleep(600)"
)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a child with its parent")
@pytest.mark.parametrize("child", [HOLDING_THE_INTERPRETER, WITHOUT_THE_KERNEL])
def test_a_process_ends_with_its_killed_parent(child):
    command = [sys.executable, "-c", PARENT, child]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.send_signal(signal.SIGKILL)
        until(lambda: not is_running(pid))


def is_running(pid):
    """A process that nobody has asked for its status yet is listed too, as a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


def test_an_engine_is_bound_to_its_parent_before_it_loads(monkeypatch):
    done = []
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(process, "end_with_parent", done.append)

    def make_engine(_):
        done.append("loaded")
        raise ConfigError("no")

    ours, theirs = socket.socketpair()
    number = theirs.fileno()
    with ours, pytest.raises(SystemExit):
        process.main(EngineConfig(), theirs, make_engine)
    assert done == [number, "loaded"]


ASK = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"


def test_what_is_started_without_interrupts_hears_none():
    def heard():
        return subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True).stdout

    with without_interrupts():
        assert heard() == "True\n"
    assert heard() == "False\n"
