"""The rules of mixers: a head's small weights, how a token changes a state, and how its output is
normed and gated.

gated_delta   the delta rule, with one decay per value head, or one per key channel (KDA)
mamba2        a time step per head
"""
