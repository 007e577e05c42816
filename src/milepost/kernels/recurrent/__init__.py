"""Recurrent steps of Gated DeltaNet, KDA and Mamba2: one kernel, three rules.

portable.step      launches a step of decoding sequences, with or without drafts
portable.stream    rows of a sequence, and the short convolution over them
structures         the arguments of the kernels, grouped
rules              what differs: small weights, the change of a state, the output
hopper             what kernels in Gluon read and write of states and rows
mixer_rows         a step's work for the reference kernels
"""
