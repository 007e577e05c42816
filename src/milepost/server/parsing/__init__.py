"""Parses an answer's text as it streams: reasoning, content, tool calls.

A parser is fed pieces of text and returns events; `finish` returns what it still held. No event is
ever retracted, and the events, joined, do not depend on where the text was cut. A call is announced
once it is known to be one, and its arguments are a JSON object, unless the answer was cut off. The
work is linear in the text, however small the pieces. No I/O, no tokenizer.

All formats read values alike: `literals` turns JSON and Python literals into JSON, and `values`
interprets them by the parameter's schema.

A *format* (`formats`) describes how models write calls (`JsonCalls`, `TaggedCalls`) or reasoning
(`ThinkTags`). It is data: tags, keys, layout. The parser and the grammar for required calls both
come from this one description, so the parser reads whatever the grammar accepts.
"""
