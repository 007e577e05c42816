"""What coding agents and agent libraries send is answered, turn after turn, on every endpoint.

The model's template is as strict as those that people meet: one system message, at the beginning.
"""

import json

import jsonschema_rs
import pytest

from tests.server import agents

RESPONSES, MESSAGES, CHAT = "/v1/responses", "/v1/messages", "/v1/chat/completions"
RECORDED = {
    "codex": (RESPONSES, agents.CODEX_TURNS),
    "claude": (MESSAGES, agents.CLAUDE_TURNS),
    "agents over responses": (RESPONSES, agents.AGENTS_RESPONSES_TURNS),
    "agents over chat": (CHAT, agents.AGENTS_CHAT_TURNS),
}
LIMIT = {RESPONSES: "max_output_tokens", MESSAGES: "max_tokens", CHAT: "max_completion_tokens"}
IGNORED = {
    "codex": {
        "tools[].web_search",
        "tools[].local_shell",
        "tools[].format.definition",
        "input[].arguments",
        "input[].web_search_call",
        "input[].phase",
        "reasoning.summary",
        "include[reasoning.encrypted_content]",
        "prompt_cache_key",
        "text.verbosity",
        "client_metadata",
    },
    "claude": {
        "tools[].web_search_20250305",
        "tools[].defer_loading",
        "system[].cache_control.ttl",
        "messages[].content[].redacted_thinking",
        "messages[].content[].is_error",
        "context_management",
    },
    "agents over responses": {"tools[].web_search"},
    "agents over chat": set(),
}
SAID = {
    "codex": [
        "You are Codex",
        "<permissions",
        "<skills_instructions",
        "multi_agent_v1__spawn_agent",
        "/work</cwd>",
        "say hello",
        "Looking.",
        '"cmd": "ls"',
        '"message": "watch"',
        "a.txt",
        "failed to parse",
        "+hello",
        "Success.",
        '"cat"',
        '{"output":"hello"}',
        '"query": "files"',
        "Files of the team.",
        "Done.",
        "and now?",
    ],
    "claude": [
        "You are Claude Code.",
        "engineering",
        "Today is a day.",
        "say hello",
        "agent types",
        "I look.",
        '"command": "ls"',
        "no such file",
        "a.txt",
        "b.txt",
        "WebFetch can be called",
        '"query": "hello"',
        "greetings",
        "Hello it is.",
        "and now?",
    ],
    "agents over responses": ["Be brief.", "weather?", "Bern", "Uster", "sunny", "cloudy"],
    "agents over chat": ["Be brief.", "weather?", "Bern", "Uster", "sunny", "cloudy"],
}
"""Words of the last turn, in order."""


def events(response):
    lines = response.text.splitlines()
    found = [line[6:] for line in lines if line.startswith("data: ")]
    return [json.loads(line) for line in found if line != "[DONE]"]


def usage_of(body):
    """(Prompt tokens, those from the cache)"""
    usage = body["usage"]
    if "cache_read_input_tokens" in usage:
        read = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + usage["cache_creation_input_tokens"] + read, read
    details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details")
    return usage.get("input_tokens", usage.get("prompt_tokens")), details["cached_tokens"]


@pytest.mark.parametrize("name", [*RECORDED])
def test_every_turn_is_answered_and_hits_the_one_before(http, name):
    path, turns = RECORDED[name]
    before, ignored = 0, set()
    for number, turn in enumerate(turns):
        asked = {**turn, LIMIT[path]: 4, "temperature": 0, "stream": False}
        whole = http.post(path, json=asked)
        assert whole.status_code == 200, whole.text
        ignored |= set(whole.headers.get("x-milepost-ignored", "").split(", ")) - {""}
        num_tokens, num_cached = usage_of(whole.json())
        if number and name != "agents over responses":  # a turn without reasoning is rendered anew
            assert num_cached >= before // 16 * 16 - 16, (number, before, num_cached)
        before = num_tokens
        streamed = http.post(path, json={**asked, "stream": True})
        assert streamed.status_code == 200, streamed.text
        assert "error" not in [event.get("type") for event in events(streamed)]
    assert ignored == IGNORED[name]


@pytest.mark.parametrize("name", [*RECORDED])
def test_the_model_reads_all_that_was_said(http, name):
    path, turns = RECORDED[name]
    last = {**turns[-1], LIMIT[path]: 4}
    if path == MESSAGES:
        count = {k: v for k, v in last.items() if k in COUNTED}
        counted = http.post(f"{path}/count_tokens", json=count)
        assert counted.status_code == 200, counted.text
        num_tokens, _ = usage_of(http.post(path, json={**last, "stream": False}).json())
        assert counted.json()["input_tokens"] == num_tokens
        return
    rendered = http.post(f"{path}/render", json=last)
    assert rendered.status_code == 200, rendered.text
    rendered = rendered.json()
    rendered = rendered[0] if isinstance(rendered, list) else rendered
    text = http.post("/detokenize", json={"tokens": rendered["token_ids"]}).json()["prompt"]
    assert_in_order(text, SAID[name])
    if path == RESPONSES:
        counted = http.post(f"{path}/input_tokens", json=last).json()
        assert counted["input_tokens"] == len(rendered["token_ids"])


COUNTED = {"model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"}


def assert_in_order(text, words):
    place = 0
    for word in words:
        place = text.find(word, 0 if "spawn_agent" in word else place)
        assert place >= 0, word


def test_claude_codes_conversation_is_read_in_order():
    from milepost.engine.text.chat import render
    from milepost.server.anthropic.convert import to_chat
    from milepost.server.anthropic.protocol import MessagesRequest
    from milepost.server.messages import for_template, tools_for_template
    from tests import chatmodel

    chat = to_chat(MessagesRequest.model_validate(agents.CLAUDE_TURNS[-1]))
    tools = tools_for_template(chat.tools)
    prompt = render(chatmodel.make_tokenizer(), for_template(chat.messages), tools=tools)
    assert_in_order(prompt.text, SAID["claude"])
    assert "billing" not in prompt.text
    names = [tool["function"]["name"] for tool in tools]
    assert names == ["Bash", "Read", "WebFetch", "ToolSearch"]


SUMMARY = {"type": "compaction", "content": "so far: hello", "signature": "x", "tool_changes": []}
FAILED = {"type": "compaction", "content": None, "encrypted_content": "x"}
NOTES = [{"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}}, FAILED]
CHANGES = [
    {"type": f"tool_{change}", "tool": {"type": "tool_reference", "name": "Bash"}}
    for change in ("addition", "removal")
]
TEXTS = [{"type": "text", "text": text} for text in ("before", "after")]


@pytest.mark.parametrize(
    ("content", "read"),
    [
        ([TEXTS[0], SUMMARY, TEXTS[1]], ["user: so far: hello", "assistant: after", "user: and?"]),
        ([SUMMARY, SUMMARY], ["user: so far: hello", "user: and?"]),
        ([*NOTES, TEXTS[1]], ["user: hi", "assistant: after", "user: and?"]),
    ],
)
def test_a_summary_stands_for_what_it_replaces(content, read):
    from milepost.server.anthropic.convert import to_chat
    from milepost.server.anthropic.protocol import MessagesRequest

    said = [("user", "hi"), ("assistant", content), ("user", "and?")]
    messages = [{"role": role, "content": text} for role, text in said]
    body = {"messages": messages, "max_tokens": 1}
    chat = to_chat(MessagesRequest.model_validate(body))
    assert [f"{message.role}: {text_of(message)}" for message in chat.messages] == read


@pytest.mark.parametrize("kind", ["compaction", "compaction_summary", "context_compaction"])
def test_the_model_is_told_of_a_summary_that_is_encrypted(http, kind):
    """Codex goes on with such a conversation when its user changes the model; nobody else would say
    that its beginning is missing."""
    from milepost.server.responses.convert import items_of, to_chat
    from milepost.server.responses.protocol import ResponsesRequest

    item = {"type": kind, "id": "cmp_1", "encrypted_content": "gAAAA", "created_by": "x"}
    said = {"type": "message", "role": "user", "content": "and?"}
    body = {"model": "tiny", "input": [said, item, said], "max_output_tokens": 1}
    request = ResponsesRequest.model_validate(body)
    chat = to_chat(request, items_of(request.input)).chat
    before, note, after = [text_of(message) for message in chat.messages]
    assert (before, after) == ("and?", "and?")
    assert "summary" in note
    assert "missing" in note
    for given in (body, {**body, "input": [item]}):
        found = http.post(RESPONSES, json=given)
        assert found.status_code == 200, found.text
        assert found.headers["x-milepost-ignored"] == f"input[].{kind}"


def text_of(message):
    parts = message.content
    return parts if isinstance(parts, str) else "".join(part.text for part in parts)


def test_notes_of_other_servers_are_left_out_by_name_and_changes_of_tools_are_told(http):
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [TEXTS[0], *NOTES]},
        {"role": "user", "content": [*CHANGES, TEXTS[1]]},
    ]
    body = {"model": "tiny", "messages": messages, "max_tokens": 1}
    found = http.post(MESSAGES, json=body)
    assert found.status_code == 200, found.text
    assert found.headers["x-milepost-ignored"] == "messages[].content[].fallback"


@pytest.mark.parametrize("name", ["agents over responses", "agents over chat"])
@pytest.mark.parametrize("seed", range(3))
def test_an_agent_gets_its_output_or_a_call(http, name, seed):
    """Both are left to the model, which is random here; either has its form."""
    path, turns = RECORDED[name]
    sampled = {"temperature": 1, "seed": seed, LIMIT[path]: 500}
    body = http.post(path, json={**turns[-1], **sampled}).json()
    if path == CHAT:
        message = body["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        text, is_cut = message["content"], body["choices"][0]["finish_reason"] == "length"
    else:
        calls = [item for item in body["output"] if item["type"] == "function_call"]
        said = [item for item in body["output"] if item["type"] == "message"]
        text = said[0]["content"][0]["text"] if said else None
        is_cut = body["status"] == "incomplete"
    if is_cut:
        calls, text = calls[:-1], None
    for call in calls:
        (own,) = [f for f in agents.AGENTS_FUNCTIONS if f["name"] == call["name"]]
        jsonschema_rs.validate(own["parameters"], json.loads(call["arguments"]))
    if text is not None:
        jsonschema_rs.validate(agents.OUTPUT, json.loads(text))


PLAIN = {"reasoning": {"effort": "none"}}


def required(http, name, **changes):
    """The events of Codex's first turn, which must call this tool."""
    choice = {"type": "custom" if name == "apply_patch" else "function", "name": name}
    body = {**agents.CODEX_TURNS[0], "tool_choice": choice, "temperature": 1, "seed": 3, **PLAIN}
    response = http.post(RESPONSES, json={**body, "max_output_tokens": 400, **changes})
    assert response.status_code == 200, response.text
    return events(response)


def test_a_custom_tool_is_called_with_text(http):
    found = required(http, "apply_patch")
    last = found[-1]["response"]
    (call,) = last["output"]
    assert (call["type"], call["name"]) == ("custom_tool_call", "apply_patch")
    pieces = [e for e in found if e["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(e["delta"] for e in pieces) == call["input"]
    assert len(pieces) > 1
    (done,) = [e for e in found if e["type"] == "response.custom_tool_call_input.done"]
    assert (done["input"], done["item_id"]) == (call["input"], call["id"])
    back = [*agents.CODEX_HEAD, call]
    back.append({"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"})
    again = http.post(RESPONSES, json={**agents.CODEX, "input": back, "max_output_tokens": 2})
    assert again.status_code == 200, again.text


@pytest.mark.parametrize(
    ("name", "namespace"), [("wait_agent", "multi_agent_v1"), ("lookup", "mcp__files__")]
)
def test_a_tool_of_a_namespace_is_called_by_its_own_name(http, name, namespace):
    found = required(http, name)
    (call,) = found[-1]["response"]["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", name, namespace)
    (added,) = [e["item"] for e in found if e["type"] == "response.output_item.added"]
    assert (added["name"], added["namespace"]) == (name, namespace)
    back = [*agents.CODEX_HEAD, call]
    back.append({"type": "function_call_output", "call_id": call["call_id"], "output": "ok"})
    again = http.post(RESPONSES, json={**agents.CODEX, "input": back, "max_output_tokens": 2})
    assert again.status_code == 200, again.text


@pytest.mark.parametrize("is_streamed", [False, True])
def test_items_of_an_answer_that_was_cut_are_incomplete(http, is_streamed):
    call = {"tool_choice": {"type": "function", "name": "exec_command"}, **PLAIN}
    patch = {"tool_choice": {"type": "custom", "name": "apply_patch"}, **PLAIN}
    for kind, changes in [
        ("reasoning", {"tools": []}),
        ("message", {"tools": [], **PLAIN}),
        ("function_call", call),
        ("custom_tool_call", patch),
    ]:
        body = {**agents.CODEX_TURNS[0], "temperature": 1, "seed": 3, "max_output_tokens": 40}
        response = http.post(RESPONSES, json={**body, **changes, "stream": is_streamed})
        found = events(response) if is_streamed else []
        whole = found[-1]["response"] if is_streamed else response.json()
        assert whole["status"] == "incomplete"
        (item,) = whole["output"]
        assert (item["type"], item["status"]) == (kind, "incomplete")
        done = [e["item"] for e in found if e["type"] == "response.output_item.done"]
        assert done == ([item] if is_streamed else [])


def test_a_custom_tool_of_a_chat(http):
    custom = {"name": "note", "description": "Keeps a note."}
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "custom", "custom": custom}, {"type": "web_search"}],
        "tool_choice": {"type": "custom", "custom": {"name": "note"}},
        "max_tokens": 400,
        "seed": 3,
    }
    response = http.post(CHAT, json=body)
    assert response.headers["x-milepost-ignored"] == "tools[].web_search"
    whole = response.json()["choices"][0]["message"]
    (call,) = whole["tool_calls"]
    assert (call["type"], call["custom"]["name"]) == ("custom", "note")
    chunks = events(http.post(CHAT, json={**body, "stream": True}))
    deltas = [c["delta"] for chunk in chunks for c in chunk["choices"]]
    pieces = [d["tool_calls"][0] for d in deltas if d.get("tool_calls")]
    assert "".join(piece["custom"]["input"] for piece in pieces) == call["custom"]["input"]
    back = [*body["messages"], whole, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
    again = http.post(CHAT, json={**body, "messages": back, "max_tokens": 2, "tool_choice": "auto"})
    assert again.status_code == 200, again.text
    tokens = http.post("/tokenize", json={"messages": back, "tools": body["tools"]}).json()
    text = http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
    assert json.dumps({"input": call["custom"]["input"]}, ensure_ascii=False) in text
