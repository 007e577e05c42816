"""Long prompts through vllm-router, in front of servers that prefill and servers that decode."""

import sys

import openai

URL = sys.argv[1]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
options = {"model": "tiny", "temperature": 0}
TEXT = "the quick brown fox jumps over the lazy dog " * 12
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}


def said(number):
    return [{"role": "user", "content": f"{number} {TEXT}"}]


for number in range(4):
    whole = client.chat.completions.create(messages=said(number), max_tokens=6, **options)
    assert whole.usage.completion_tokens == 6
    stream = client.chat.completions.create(
        messages=said(number), max_tokens=6, stream=True, **options
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content
scored = client.chat.completions.create(
    messages=said("l"), max_tokens=3, logprobs=True, top_logprobs=2, **options
)
assert len(scored.choices[0].logprobs.content) == 3
called = client.chat.completions.create(
    messages=said("t"), max_tokens=60, tools=[TOOL], tool_choice="required", **options
)
assert called.choices[0].message.tool_calls[0].function.name == "look"
try:
    client.chat.completions.create(messages=said("e"), model="nobody", max_tokens=3)
    message = ""
except openai.NotFoundError as error:
    message = str(error)
assert "nobody" in message, message
