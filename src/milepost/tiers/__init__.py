"""What leaves the device lives on in host memory and on disk. Which modules do what; the first two
rows are pure: they decide, and know neither tensors nor files:

    what goes down, comes up   policy, stores, writes, loads, reach
    what there is              holdings, tier, rates, names
    how it moves               copier, mover, arena
    files                      disk, files, threads
    several ranks              orders, porter
"""
