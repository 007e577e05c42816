"""OpenAI's official client on the Responses API of a real server."""

import openai
import pytest
from pydantic import BaseModel

from milepost.server.responses.protocol import MessageItem
from milepost.server.responses.store import ResponseStore, StoredResponse

GREEDY = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
TOOL = {
    "type": "function",
    "name": "get_weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Bern", "Uster"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
TRIGGER = {"type": "compaction_trigger"}


def test_a_response_is_what_chat_says(client):
    said = client.responses.create(input="the quick brown", instructions="be brief", **GREEDY)
    chat = client.chat.completions.create(
        model="tiny",
        temperature=0,
        max_tokens=12,
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "the quick brown"},
        ],
    )
    assert said.output_text == chat.choices[0].message.content
    assert (said.status, said.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert said.usage.input_tokens == chat.usage.prompt_tokens
    assert said.usage.output_tokens == 12


def test_streamed_in_the_official_order(client):
    whole = client.responses.create(input="the quick brown", **GREEDY)
    events = list(client.responses.create(input="the quick brown", stream=True, **GREEDY))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:-1] == ["output_text.done", "content_part.done", "output_item.done"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-1] == "incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type.endswith("text.delta"))
    assert text == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == 12


def test_reasoning_is_an_item_of_its_own(client):
    whole = client.responses.create(input="the quick", extra_body=THINKING, **GREEDY)
    (item,) = whole.output
    assert (item.type, item.content[0].type) == ("reasoning", "reasoning_text")
    assert whole.usage.output_tokens_details.reasoning_tokens == 12
    events = list(
        client.responses.create(input="the quick", stream=True, extra_body=THINKING, **GREEDY)
    )
    pieces = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(pieces) == item.content[0].text
    assert (
        client.responses.create(input="the quick", reasoning={"effort": "none"}, **GREEDY)
        .output[0]
        .type
        == "message"
    )


def called(client):
    options = {**GREEDY, "max_output_tokens": 120, "tools": [TOOL], "tool_choice": "required"}
    with client.responses.stream(input="hello", **options) as stream:
        kinds = [event.type for event in stream]
        return kinds, stream.get_final_response()


def test_a_function_is_called_and_its_output_taken(client):
    kinds, response = called(client)
    assert "response.function_call_arguments.delta" in kinds
    assert response.status == "completed"
    (call,) = response.output
    assert call.parsed_arguments["city"] in ("Bern", "Uster")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    asked = {"role": "user", "content": "hello"}
    echoed = call.model_dump(exclude={"parsed_arguments"})
    stateless = client.responses.create(input=[asked, echoed, result], tools=[TOOL], **GREEDY)
    stored = client.responses.create(
        input=[result], previous_response_id=response.id, tools=[TOOL], **GREEDY
    )
    assert stored.output_text == stateless.output_text
    assert stored.usage.input_tokens == stateless.usage.input_tokens


def test_a_conversation_goes_on_where_it_was_stored(client):
    first = client.responses.create(input="the quick", instructions="be brief", **GREEDY)
    second = client.responses.create(input="and?", previous_response_id=first.id, **GREEDY)
    turns = [
        {"role": "user", "content": "the quick"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and?"},
    ]
    alone = client.responses.create(input=turns, store=False, **GREEDY)
    assert second.output_text == alone.output_text
    assert second.usage.input_tokens == alone.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    (item,) = client.responses.input_items.list(second.id)
    assert item.content == "and?"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(alone.id)


def test_items_of_stored_answers_are_given_by_reference(server, client):
    """As agents do that leave a conversation with the server, without naming a response."""
    first = client.responses.create(input="the quick", extra_body=THINKING, **GREEDY)
    second = client.responses.create(input="and?", previous_response_id=first.id, **GREEDY)
    given = [
        {"role": "user", "content": "the quick"},
        *({"type": "item_reference", "id": item.id} for item in first.output),
        {"role": "user", "content": "and?"},
    ]
    again = client.responses.create(input=given, **GREEDY)
    assert again.output_text == second.output_text
    assert again.usage.input_tokens == second.usage.input_tokens
    third = client.responses.create(input="so?", previous_response_id=again.id, **GREEDY)
    assert third.usage.input_tokens > again.usage.input_tokens
    with server.client(key="another") as other, pytest.raises(openai.NotFoundError):
        other.responses.create(input=given, **GREEDY)
    with pytest.raises(openai.BadRequestError, match="name each item once"):
        client.responses.create(input=[*given, given[1]], **GREEDY)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no such item"):
        client.responses.create(input=given, **GREEDY)


def test_a_prompt_that_fits_may_be_truncated(http):
    body = {"input": "hello", "truncation": "auto", "max_output_tokens": 1}
    response = http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-milepost-ignored"] == "truncation"
    long = {**body, "input": "hello " * 5000}
    assert http.post("/v1/responses", json=long).json()["error"]["code"] == (
        "context_length_exceeded"
    )


def test_tokens_are_counted_before_they_are_sent(client):
    asked = {"input": "the quick brown", "instructions": "be brief", "tools": [TOOL]}
    said = client.responses.create(**asked, **GREEDY)
    counted = client.responses.input_tokens.count(model="tiny", **asked)
    assert (counted.object, counted.input_tokens) == (
        "response.input_tokens",
        said.usage.input_tokens,
    )
    more = {"input": "and then", "previous_response_id": said.id}
    counted = client.responses.input_tokens.count(model="tiny", **more)
    assert counted.input_tokens == client.responses.create(**more, **GREEDY).usage.input_tokens


def test_deleted_is_gone(client):
    made = client.responses.create(input="the quick", **GREEDY)
    client.responses.delete(made.id)
    for ask in (
        lambda: client.responses.retrieve(made.id),
        lambda: client.responses.delete(made.id),
        lambda: client.responses.create(input="a", previous_response_id=made.id, **GREEDY),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()


def test_nobody_else_finds_what_is_stored(server, client):
    made = client.responses.create(input="the quick", **GREEDY)
    with server.client(key="another") as other, pytest.raises(openai.NotFoundError):
        other.responses.retrieve(made.id)


class Flag(BaseModel):
    is_set: bool


def test_a_form_is_kept_to_and_parsed(client):
    options = {**GREEDY, "max_output_tokens": 60}
    parsed = client.responses.parse(input="hello", text_format=Flag, **options).output_parsed
    assert parsed.is_set in (True, False)


def test_logprobs_are_included(client):
    made = client.responses.create(
        input="hello", include=["message.output_text.logprobs"], top_logprobs=2, **GREEDY
    )
    tokens = made.output[0].content[0].logprobs
    assert len(tokens) == 12
    assert all(len(token.top_logprobs) == 2 for token in tokens)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": ""}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None),
        (
            {
                "input": [
                    {"type": "reasoning", "content": [{"type": "input_image", "image_url": ""}]}
                ]
            },
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "user", "content": "a"}, TRIGGER]}, "input[1].type"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "all"}, "truncation"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_refusals_name_the_field(client, changes, param):
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**{**GREEDY, "input": "a", **changes})
    if param is not None:
        assert raised.value.body["param"] == param


def stored(num_bytes):
    said = (MessageItem(id=f"msg_{num_bytes}", role="assistant", content="a"),)
    return StoredResponse(
        body={"output": [{}]},
        input_items=(),
        conversation=said,
        conversation_bytes=num_bytes,
        num_bytes=num_bytes,
    )


def test_the_store_is_bounded_by_number_and_bytes():
    store = ResponseStore(max_responses=3, max_bytes=100)
    for number in range(5):
        store.put("me", str(number), stored(10))
    assert [store.get("me", str(n)) is not None for n in range(5)] == [False] * 2 + [True] * 3
    store.put("me", "large", stored(85))
    assert (len(store), store.num_bytes) == (2, 95)
    store.put("me", "larger", stored(101))
    assert (len(store), store.num_bytes) == (0, 0)
    assert store.get("you", "large") is None
    assert not store.items


def test_a_part_of_a_response_may_be_marked(http):
    def marks(own):
        part = {"type": "input_text", "text": "be brief", **own}
        items = [{"role": "user", "content": [part]}, {"role": "user", "content": "hello"}]
        return http.post("/v1/responses/render", json={"input": items}).json()["cache_marks"]

    marked = marks({"prompt_cache_breakpoint": {"mode": "explicit"}})
    assert marked != marks({})
    assert marked == marks({"cache_control": {"type": "ephemeral"}})


def test_a_conversation_of_nothing_that_is_served_is_named(client):
    item = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(input=[item], **GREEDY)
    assert error.value.param == "input"
    assert "left out" in error.value.message
