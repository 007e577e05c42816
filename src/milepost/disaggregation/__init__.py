"""Engines lend each other KV and states. One thread talks to other engines, and the engine's thread
never waits for it. The modules:

    called by the engine           exchange
    between scheduler and thread   connector
    the thread                     links, zap, peers, messages
    lending                        leases, lender, finds
    borrowing                      pulls
    transfer of bytes              transport, nixl, sockets, socket_reading, registered_pools
    several ranks                  all_ranks, commands, part_reader
"""
