"""Engines lend each other KV and states. One thread talks to other engines, and the engine's thread
never waits for it. The modules:

    what the engine calls          access, exchange
    between scheduler and thread   connector, outcomes
    the thread                     links, door, peers, messages
    what is lent                   leases, lender
    what is borrowed               borrowed, pulls
    how bytes get there            transport, nixl, sockets, socket_reading, registered_pools
    several ranks                  all_ranks, orders, part_reader
"""
