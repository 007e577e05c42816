"""The step loop: requests in, plans to the runner, tokens back to the answers.
Its modules:

    a step                      core, completions, pipeline, failure
    a request                   group, completion, pixels
    outside the device          tiering
    one thread for an engine    thread
    an observer                 trace_recording
"""

from milepost.engine.loop.completion import Completion
from milepost.engine.loop.core import Engine
from milepost.engine.loop.group import RequestGroup
from milepost.engine.loop.thread import EngineThread

__all__ = [
    "Completion",
    "Engine",
    "EngineThread",
    "RequestGroup",
]
