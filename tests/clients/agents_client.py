"""openai-agents: an agent with a tool, over responses and over chat."""

import sys

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    WebSearchTool,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

URL = sys.argv[1]
set_tracing_disabled(True)
asked = []


@function_tool
def flip(up: bool) -> str:
    """Flip it."""
    asked.append(up)
    return "flipped"


def run(kind):
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    agent = Agent(
        name="tester",
        instructions="be brief",
        tools=[flip],
        model=kind(model="tiny", openai_client=client),
        model_settings=ModelSettings(
            tool_choice="required", temperature=0, max_tokens=120, parallel_tool_calls=False
        ),
    )
    before = len(asked)
    result = Runner.run_sync(agent, "hello", max_turns=4)
    assert len(asked) == before + 1, asked
    assert result.final_output is not None
    return result


class Out(BaseModel):
    ok: bool


def run_with_output(kind):
    """Whether the model calls, hands over or answers is left to it, and it is random; what it
    answers is an object of this class, and nothing is refused."""
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    model = kind(model="tiny", openai_client=client)
    settings = ModelSettings(temperature=0, max_tokens=400, parallel_tool_calls=False)
    other = Agent(name="other", instructions="be kind", model=model, model_settings=settings)
    agent = Agent(
        name="tester",
        instructions="be brief",
        tools=[flip, *([WebSearchTool()] if kind is OpenAIResponsesModel else [])],
        handoffs=[other],
        output_type=Out,
        model=model,
        model_settings=settings,
    )
    try:
        result = Runner.run_sync(agent, "hello", max_turns=3)
    except MaxTurnsExceeded:
        return
    assert isinstance(result.final_output, Out) or result.last_agent is other


for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
    done = run(kind)
    assert done.raw_responses[0].usage.output_tokens > 0
    run_with_output(kind)
