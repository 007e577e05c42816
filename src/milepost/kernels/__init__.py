"""Operations on tensors: what each computes, and the kernels that compute it on a GPU.

Imports go up this list only:

    chips, launches, numbers                      platform
    where a step's tokens and states lie          layout
    norms, residual streams                       norm, residual
    products, routed experts                      products
    short convolutions                            conv, short_conv
    token mixers                                  recurrent
    attention, latent attention                   attention
    vision towers                                 vision
    drafts, samples, single rows                  mtp, sampling, rows
    n-gram tables                                 ngrams
    sums over ranks                               comm

In an operation's folder `reference.py` is the definition in plain torch, and `__init__.py` the door
that chooses between it and the kernels, or the definition too where that is short.
"""
