"""Parses an answer's text as it streams: reasoning, content, tool calls.

A parser is fed pieces of text and returns events; `finish` returns what it still held. No event is
ever retracted, and the events, joined, do not depend on where the text was cut. A call is announced
once it is known to be one, and its arguments are a JSON object, unless the answer was cut off. The
work is linear in the text, however small the pieces. No I/O, no tokenizer.

All formats read values alike: `literals` turns what stands there, JSON or Python, into JSON, and
`values` says what it means to a parameter's schema.

A *format* describes how models write calls (`JsonCalls`, `TaggedCalls`) or reasoning
(`ThinkTags`). It is data: tags, keys, layout. Both the parser and the grammar for required calls
come from this one description, so what the grammar accepts is what the parser reads.

To add a family of models, add one file to `families/`, with either or both of

    TOOL_CALLS = {"name": JsonCalls(open=..., close=..., signs=(...))}
    REASONING = {"name": ThinkTags(open=..., close=..., signs=(...))}
    CALLS_OF = {"model_type": "name"}

The names become values of --tool-call-parser and --reasoning-parser (use vLLM's names); `signs` are
what a chat template of the family contains, by which `auto` finds the format; `CALLS_OF` applies
where a template accepts tools but shows no format. A layout that neither class describes gets a
class of its own in that file, with the two methods of `formats.ToolCalls`.
"""
