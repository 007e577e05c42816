"""The engine in a process of its own, its client, and the ranks beside it.
Its modules:

    the engine's process        engine, tasks, compiling
    messages                    wire
    the client                  client, stream
    a further rank              rank
"""

from milepost.engine.processes.client import EngineClient
from milepost.engine.processes.stream import Stream, StreamBell
from milepost.engine.processes.wire import Delta, Output, Report

__all__ = [
    "Delta",
    "EngineClient",
    "Output",
    "Report",
    "Stream",
    "StreamBell",
]
