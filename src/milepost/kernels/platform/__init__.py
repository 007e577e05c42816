"""The chip that kernels run on, the ways to launch them, and the numbers they compute with.

device, chips               capabilities of a GPU, and of one that is not there
launches                    launches like an earlier one in a fraction of the time
overlap, overlap_gluon      launches that start before the one ahead has ended
gluon                       differences between Triton's versions
tiles, strides, precision   sizes of programs, layouts that kernels take, types of sums
activations, float8, float8_gluon, float8_triton
                            functions and number types, on the device and in torch
"""
