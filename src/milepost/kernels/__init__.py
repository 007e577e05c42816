"""A folder for each operation: `reference.py` defines it, `triton*.py` is fast, and `__init__.py`
chooses between them. Which modules beside the folders do what:

    what is known of a step   batch, chunks, chunk_rows, decode_layout, verify_layout, mixer_rows
    what is known of a chip   device, chips, tiles, strides, precision
    states                    slots, states_gluon, stream_gluon, triton_chunks
    what kernels hand on      emit
    numbers                   activations, float8, float8_gluon, triton_float8
    launches                  launches, overlap, overlap_gluon
    Gluon                     gluon, gemm_gluon
"""
