"""KV and states that engines lend each other. One thread talks to other engines, and the engine's
own never waits for it. Its modules:

    between scheduler and thread   connector, outcomes, params
    the thread                     links, door, peers, messages
    what is lent                   leases, lender
    what is borrowed               borrowed, pulls
    how bytes get there            transport, nixl, sockets, memory, access
    several ranks                  all_ranks, orders, part_reader
"""
