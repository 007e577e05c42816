"""Chips, launches of kernels, and arithmetic shared by operations.

device      capabilities of a GPU, present or not, and which kernels run on it
launches    Triton launches that are cheap to repeat, and that overlap with the one before
pretending  a GPU that is not there, and what tensors on it would take
tables      a row for each kernel and the choice among them; operations with one each (`fused`)
gluon       differences between Triton's versions, and FP8 in Gluon
numerics    functions of activations, norms and FP8 in Triton
tensors     number types, strides, slots of pools and rounded quotients, without Triton
"""
