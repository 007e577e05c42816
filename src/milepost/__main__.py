"""The command `milepost`, also as `python -m milepost`."""

import signal
import sys


def run() -> int:
    """The command line, with its exit status. What it imports takes seconds, in which Ctrl-C ends
    the process at once and without a word.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from milepost.cli.main import main

    signal.signal(signal.SIGINT, before)
    return main()


if __name__ == "__main__":
    sys.exit(run())
