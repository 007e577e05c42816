"""The rules: what a head's small weights are, how a token changes a state, and how its output is
normed and gated."""
