"""The engine in a process of its own, its client, and the ranks beside it.
Its modules:

    the engine's process        engine, compiling
    messages                    wire, pixels
    the client                  client, starting, stream
    a further rank              rank
"""

from milepost.engine.outputs import Delta, Output, Report
from milepost.engine.processes.client import EngineClient
from milepost.engine.processes.starting import LoadedOnce, start_with_tokenizer
from milepost.engine.processes.stream import Stream

__all__ = [
    "Delta",
    "EngineClient",
    "LoadedOnce",
    "Output",
    "Report",
    "Stream",
    "start_with_tokenizer",
]
