"""vLLM's memory for hybrid models, under Milepost's scheduler.

Its modules:

    pool      the memory that the scheduler runs requests in
    hold      one running request's blocks, and where its states are saved
    blocks    equal blocks with one eviction queue
"""

from milepost.simulator.vllm.pool import OnePool

__all__ = ["OnePool"]
