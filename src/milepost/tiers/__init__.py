"""Keeps pages and states that are evicted from the device in host memory and on disk. The modules
of the first two rows are pure: they make the decisions, and know neither tensors nor files.

    decisions                   policy, stores, writes, loads, reach, page_graph
    contents                    holdings, tier
    copies                      transfers, device_copies, arena
    files                       disk, finding, files, file_format, threads
    several ranks               commands, rank_worker
"""
