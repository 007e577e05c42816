"""Turns requests into steps and steps into answers, in the caller's process or in one of its own.

Six packages, each used through its `__init__`. A package uses only those before it: `text/`,
`media/`, `constraints/`, `assembly/`, `loop/`, `processes/`. The modules beside them are used by
all:

    Python API                  llm, async_llm, reader, options, vllm_names
    prompts and outputs         prompts, validation, outputs, bit_checks
    observation                 metrics, facts
    protocols of annexes        off_device
    helpers of processes        child, ending, heap
"""
