"""Keeps in host memory and on disk what leaves the device. Its modules; those of the first two rows
are pure: they decide, and know neither tensors nor files:

    what goes down, comes up   policy, stores, writes, loads, reach
    what there is              holdings, tier, rates, names
    how it moves               copier, mover, arena
    files                      disk, files, threads
    several ranks              orders, porter
"""
