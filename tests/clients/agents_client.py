"""openai-agents: an agent with a tool, over responses and over chat."""

import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

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


for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
    done = run(kind)
    assert done.raw_responses[0].usage.output_tokens > 0
