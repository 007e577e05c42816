"""Sends a command's logs to standard error, as plain lines."""

from __future__ import annotations

import logging
import sys

_FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_ALWAYS_LOGGED = {"milepost.access": "%(message)s", "milepost.stats": _FORM}
"""Logs with switches of their own, and their formats. Only servers write to them."""


def log_to_stderr(is_detailed: bool) -> None:
    """Log warnings and errors, and with `is_detailed` the engine's actions too."""
    logging.basicConfig(
        level=logging.INFO if is_detailed else logging.WARNING,
        format=_FORM,
        stream=sys.stderr,
    )
    for name, form in _ALWAYS_LOGGED.items():
        own = logging.getLogger(name)
        own.setLevel(logging.INFO)
        own.propagate = False
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(form))
        own.handlers = [handler]
