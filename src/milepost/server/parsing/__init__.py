"""Takes an answer's text apart while it comes: reasoning, content, tool calls.

A parser is fed pieces of text and gives events; `finish` gives what it still held. Nothing that was
given is ever taken back. No I/O, no tokenizer.
"""
