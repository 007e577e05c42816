"""LiteLLM: chat, a stream, a tool's round trip with echoed messages, and Anthropic's shape."""

import sys

import litellm

URL = sys.argv[1]
OPTIONS = {"model": "openai/tiny", "api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 8}
HELLO = [{"role": "user", "content": "the quick brown fox"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Bern", "Uster"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

said = litellm.completion(messages=HELLO, temperature=0, **OPTIONS)
assert said.choices[0].message.content
assert said.usage.prompt_tokens > 0
stream = litellm.completion(messages=HELLO, temperature=0, stream=True, **OPTIONS)
text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
assert text == said.choices[0].message.content, (text, said)

options = {**OPTIONS, "max_tokens": 200, "tools": [TOOL]}
called = litellm.completion(messages=HELLO, tool_choice="required", temperature=0, **options)
message = called.choices[0].message
assert message.tool_calls[0].function.name == "get_weather"
result = {
    "role": "tool",
    "tool_call_id": message.tool_calls[0].id,
    "name": "get_weather",
    "content": "sunny",
}
echoed = [*HELLO, message, result]
again = litellm.completion(messages=echoed, metadata={"a": "b"}, user="me", **options)
assert again.choices[0].message.role == "assistant"
dumped = [*HELLO, message.model_dump(), result]
assert litellm.completion(messages=dumped, reasoning_effort="none", **options).choices

anthropic = {**OPTIONS, "model": "anthropic/tiny", "api_base": URL}
assert litellm.completion(messages=HELLO, **anthropic).choices[0].message.content
response = litellm.responses(
    input="hello", model="openai/tiny", api_base=f"{URL}/v1", api_key="none", max_output_tokens=8
)
assert response.output
