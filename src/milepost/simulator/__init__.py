"""Runs the engine's own scheduler and cache over a request trace, in virtual time, without a model.

Pure: no torch, no wall clock. See docs/simulator.md. Its modules:

    traffic         trace, made, seeds, clients
    engines         fleet, chain, cost, tiers
    comparisons     policies, vllm, search, results
"""

from milepost.simulator.trace import Trace, TraceRequest, read_trace

__all__ = ["Trace", "TraceRequest", "read_trace"]
