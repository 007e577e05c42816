"""langchain-openai: invoke, stream, tools and structured output, on chat and on responses."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict

URL = sys.argv[1]
OPTIONS = {"model": "tiny", "base_url": f"{URL}/v1", "api_key": "none", "temperature": 0}


class Flag(BaseModel):
    """Whether it is so."""

    model_config = ConfigDict(extra="forbid")
    is_set: bool


def weather(city: bool) -> str:
    """What the weather is like."""
    return f"sunny: {city}"


chat = ChatOpenAI(max_tokens=8, **OPTIONS)
said = chat.invoke("the quick brown fox")
assert said.content
assert said.usage_metadata["output_tokens"] == 8
assert "".join(chunk.content for chunk in chat.stream("the quick brown fox")) == said.content
assert OpenAI(max_tokens=4, **OPTIONS).invoke("the quick")

chat = ChatOpenAI(max_tokens=120, **OPTIONS)
for method in ("json_schema", "function_calling"):
    found = chat.with_structured_output(Flag, method=method).invoke("hello")
    assert isinstance(found, Flag), (method, found)

bound = chat.bind_tools([weather], tool_choice="required", strict=True)
question = HumanMessage("hello")
called = bound.invoke([question])
assert called.tool_calls[0]["name"] == "weather"
result = ToolMessage("sunny", tool_call_id=called.tool_calls[0]["id"])
assert chat.bind_tools([weather]).invoke([question, called, result]).usage_metadata

responses = ChatOpenAI(max_tokens=8, use_responses_api=True, **OPTIONS)
first = responses.invoke([question])
assert first.content
assert responses.invoke([question, first, HumanMessage("and?")]).content
assert list(responses.stream("hello"))
