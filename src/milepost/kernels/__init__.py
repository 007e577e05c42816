"""Operations on tensors: what each computes, and the kernels that compute it on a GPU.

Imports go up this list only:

    what a chip can do, launches, numbers         platform
    what is known of a step's rows                layout
    products, routed experts                      products
    norms                                         norm
    token mixers                                  recurrent, gated_delta, kda, mamba2
    short convolutions                            conv, short_conv
    attention                                     attention, mla
    drafts, samples, single rows                  mtp, sampling, rows
    sums over ranks                               all_reduce

In an operation's folder `reference.py` is the definition in plain torch, and `__init__.py` the door
that chooses between it and the kernels.
"""
