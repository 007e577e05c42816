"""The rules: what a head's small weights are, how a token changes a state, and how its output is
normed and gated.

gated_delta   one decay and one beta per value head
kda           one beta per head, one decay per key channel
mamba2        a time step per head
"""
