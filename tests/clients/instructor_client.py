"""instructor: answers as pydantic objects, by tool and by schema, on chat and on messages."""

import sys

import anthropic
import instructor
import openai
from pydantic import BaseModel, ConfigDict

URL = sys.argv[1]
HELLO = [{"role": "user", "content": "hello"}]


class Flag(BaseModel):
    """Whether it is so."""

    model_config = ConfigDict(extra="forbid")
    is_set: bool


def client():
    return openai.OpenAI(base_url=f"{URL}/v1", api_key="none")


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    found = instructor.from_openai(client(), mode=mode).chat.completions.create(
        model="tiny", messages=HELLO, response_model=Flag, max_tokens=200, temperature=0
    )
    assert isinstance(found, Flag), (mode, found)

messages = instructor.from_anthropic(anthropic.Anthropic(base_url=URL, api_key="none"))
found = messages.messages.create(model="tiny", messages=HELLO, response_model=Flag, max_tokens=200)
assert isinstance(found, Flag), found
