"""Runs the engine's own scheduler and cache over a request trace, in virtual time, without a model.

Pure: no torch, no wall clock. See docs/simulator.md. Its modules:

    traffic         trace, made, seeds, clients
    one engine      loop, chain, cost, tiers
    comparisons     policies, vllm, search, results
    many engines    fleet
"""

from milepost.simulator.trace import Trace, TraceRequest, read_trace

__all__ = ["Trace", "TraceRequest", "read_trace"]
