"""The building blocks that models are assembled from, by module. Weights in quantised forms are in
the folder `quantised`:

    assembly           parts, context, parameters
    mixers             attention, indexer, mla, recurrent, gated_delta, kda, mamba2, short_conv
    feed-forwards      mlp, moe
    between them       embedding, ngrams, norm, residual, rotary, positions, mtp
    pictures           tower, tower_parts, grid_tower, mergers
    weights            weights, experts, linear, weight_slots, kv_scales
"""
