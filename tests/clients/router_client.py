"""Chat, completions, streams and responses through vllm-router."""

import sys

import openai

URL = sys.argv[1]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
assert [model.id for model in client.models.list()] == ["tiny"]
options = {"model": "tiny", "max_tokens": 4, "temperature": 0}
hello = [{"role": "user", "content": "hello"}]
texts = set()
for _ in range(4):
    said = client.chat.completions.create(messages=hello, **options)
    texts.add(said.choices[0].message.content)
assert len(texts) == 1, texts
assert client.completions.create(prompt="the quick", **options).usage.completion_tokens == 4
stream = client.chat.completions.create(messages=hello, stream=True, **options)
assert {"".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)} == texts
made = client.responses.create(model="tiny", input="hello", max_output_tokens=4, temperature=0)
assert {made.output_text} == texts
