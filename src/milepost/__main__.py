"""The command `milepost`, also as `python -m milepost`."""

import os
import signal
import sys


def run() -> int:
    """The command line, with its exit status. What it imports takes seconds, in which Ctrl-C ends
    the process at once and without a word.
    """
    open_streams()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from milepost.cli.main import main

    signal.signal(signal.SIGINT, before)
    return main()


def open_streams() -> None:
    """Opens those of the standard streams that are closed, as some services have them, on nothing:
    a socket would get the number of one, and what is printed would go into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8")
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run())
