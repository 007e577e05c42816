"""Decides what each step computes, over the prefix cache. Pure: no torch, no I/O.

Its modules:

    the loop                scheduler, stats
    requests                request, queue, lifecycle, canonical
    which of them begin     admission, admission_round, sharing, memory, outside, backlog
    what a step computes    planner, budget, encoders, sequences
    what others see of it   plans, routing
"""
