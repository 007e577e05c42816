"""Steps that decode or verify, of Gated DeltaNet, KDA and Mamba2: one kernel, three rules.

step           launches a step of decoding sequences, with or without drafts
structures     the arguments of its kernels, grouped
stream         rows of a sequence, and the short convolution over them
gated_delta, kda, mamba2
               the rules: what a head's small weights are, how a token changes a state, how its
               output is normed and gated
"""
