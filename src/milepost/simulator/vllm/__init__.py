"""vLLM's memory for hybrid models, under Milepost's scheduler.

Its modules:

    pool      the memory that the scheduler runs requests in
    blocks    equal blocks with one eviction queue, and those of one running request
"""

from milepost.simulator.vllm.pool import OnePool

__all__ = ["OnePool"]
