"""Turns requests into steps and steps into answers, in the caller's process or in one of its own.

Six rooms, each used through its `__init__`; a room uses only those above it: `text/`, `media/`,
`constraints/`, `assembly/`, `loop/`, `processes/`. Beside them stands what all of them use:

    Python API                  llm, async_llm, reader, options, vllm_names
    prompts and outputs         prompts, validation, outputs, bit_checks
    what can be seen            metrics, facts
    what annexes bring          off_device, watcher
    any process of ours         child, ending, heap
"""
