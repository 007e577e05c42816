"""What models are put together from. Which modules do what, besides the folder `quantised`, which
has weights in other forms:

    putting together   parts, context, parameters
    mixers             attention, mla, gated_delta, kda, mamba2, short_conv
    feed-forwards      mlp, moe
    around them        embedding, norm, rotary, mtp
    weights            weights, linear, placements, kv_scales
"""
