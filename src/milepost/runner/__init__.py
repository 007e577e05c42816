"""Executes plans on a model: the only part that knows both plans and tensors.

Its modules:

    a step                  runner, in_flight, plain, device, graphs
    its arrays              arrays, staging, tables, histories
    its pictures            pictures, positions, tower_graphs
    sampling                sampling, sampler, choice
    drafts                  device_drafting
    memory                  pool_shape, pools, shared, pool_sizes
    before the first step   compiling, measuring
    recorded steps          recording, replay
"""
