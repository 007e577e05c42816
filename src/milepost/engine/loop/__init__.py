"""The step loop: requests in, plans to the runner, tokens back to the answers.
Its modules:

    a step                      core, intake, requests, completions, pipeline, pace, failure
    outside the device          exchange, bell
    one thread for an engine    thread
    observers                   watch, survey, trace_recording
"""

from milepost.engine.loop.core import Engine
from milepost.engine.loop.exchange import reader_of
from milepost.engine.loop.requests import Completion, RequestGroup
from milepost.engine.loop.thread import EngineThread
from milepost.engine.loop.watch import Watch

__all__ = [
    "Completion",
    "Engine",
    "EngineThread",
    "RequestGroup",
    "Watch",
    "reader_of",
]
