"""Turns requests into steps and steps into answers, in the caller's process or in one of its own.
Its modules:

    Python API                  llm, thread, prompts, outputs, vllm_names
    a step                      core, intake, requests, flights, pace, fate
    answers and their text      answers, detokenizer, token_texts
    conversations and tokens    chat, roles, special, tokenizer, lengths, generation_config
    what an answer keeps to     guide, guidance, restrictions, grammars, compiling
    what an engine is made of   setup, auto, rank, sizing, drafting, tiering, exchange, facts
    several ranks               team, rank_process
    the process of an engine    process, tasks, wire, bell, heap
    the other end of it         client, stream
    small processes             child, parent, grammar_process, text_process, conversations
    what can be seen            metrics, watch, survey, trace_recording
"""
