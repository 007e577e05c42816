"""Keeps pages and states that leave the device in host memory and on disk. The modules of the first
two rows are pure: they make the decisions, and know neither tensors nor files.

    what goes down, comes up   policy, stores, writes, loads, reach, page_graph
    what there is              holdings, tier, places, rates, names
    how it moves               transfers, device_copies, arena
    files                      disk, finding, files, file_format, threads
    several ranks              orders, rank_worker
"""
