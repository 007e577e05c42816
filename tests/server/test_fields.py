"""What clients send beside the question: taken, ignored aloud, or refused by name."""

import json
import re
from dataclasses import replace
from itertools import accumulate
from typing import get_type_hints

import pytest
from openai.types.chat.chat_completion_content_part_image_param import ImageURL
from openai.types.responses import ResponseInputImageContentParam, ResponseInputImageParam
from tokenizers.processors import TemplateProcessing

from milepost.engine.media.given import images_of
from milepost.server.config import ServerConfig
from milepost.server.messages import for_template
from milepost.server.parts import ImageUrl
from milepost.server.protocol import ChatRequest
from milepost.server.responses.protocol import InputImage
from tests import chatmodel
from tests.server import inprocess
from tests.server.inprocess import answered

HELLO = [{"role": "user", "content": "the quick brown fox"}]
CHAT = {"model": "tiny", "messages": HELLO, "max_tokens": 4, "temperature": 0}
PROMPT = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 4, "temperature": 0}


def chat(http, **changes):
    return http.post("/v1/chat/completions", json={**CHAT, **changes})


def complete(http, **changes):
    return http.post("/v1/completions", json={**PROMPT, **changes})


def text_of(response):
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


ECHOED = {
    "role": "assistant",
    "content": None,
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "provider_specific_fields": {"refusal": None},
    "thinking_blocks": [{"type": "thinking", "thinking": "hm"}],
    "images": [],
    "tool_calls": [
        {"id": "c1", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}
    ],
}
CONVERSATION = [*HELLO, ECHOED, {"role": "tool", "name": "f", "tool_call_id": "c1", "content": "1"}]


def test_unknown_fields_are_ignored_and_named(http):
    plain = chat(http)
    response = chat(http, tag={"a": 1}, other=2, messages=[{**HELLO[0], "weight": 1}])
    assert text_of(response) == text_of(plain)
    assert response.headers["x-milepost-ignored"] == "tag, other, messages[].weight"
    assert "x-milepost-ignored" not in plain.headers


def test_unknown_fields_are_logged_once(server, http):
    for _ in range(3):
        text_of(complete(http, once_only=1))
    lines = [line for line in server.log if line.endswith("--strict refuses such fields")]
    assert sum("once_only" in line for line in lines) == 1


def test_a_header_holds_no_more_than_names(http):
    odd = {f"x{i}": 1 for i in range(100)} | {"a\r\nset-cookie: b": 1, "ü": 1, "y" * 100: 1}
    response = complete(http, **odd)
    assert response.status_code == 200
    assert "set-cookie" not in response.headers
    assert len(response.headers["x-milepost-ignored"].split(", ")) == 16
    assert complete(http, ü=1).headers["x-milepost-ignored"] == "?"


def test_streams_name_them_too(http):
    with http.stream("POST", "/v1/completions", json={**PROMPT, "stream": True, "tag": 1}) as got:
        assert got.headers["x-milepost-ignored"] == "tag"
        assert b"[DONE]" in got.read()


def test_no_unknown_field_reaches_the_template(http):
    def rendered(message):
        return http.post("/tokenize", json={"messages": [message]}).json()["tokens"]

    assert rendered({**HELLO[0], "reasoning_contents": "x"}) == rendered(HELLO[0])
    tool = {"type": "function", "function": {"name": "f", "extra": 1}, "defer": True}
    known = {"type": "function", "function": {"name": "f"}}
    counts = [
        http.post("/tokenize", json={"messages": HELLO, "tools": [t]}).json()["count"]
        for t in (tool, known)
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"store": True, "metadata": {"a": "b"}, "user": "me", "safety_identifier": "s"},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "service_tier": "flex"},
        {"parallel_tool_calls": True, "tools": [], "tool_choice": "auto"},
        {"stream_options": None, "n": 1, "logit_bias": {}, "audio": None, "modalities": ["text"]},
        {"messages": CONVERSATION},
        {"messages": [*CONVERSATION, {"role": "tool", "tool_call_id": "c1", "content": None}]},
        {"logprobs": False, "top_logprobs": 0},
        {"seed": -1, "spaces_between_special_tokens": False, "documents": []},
    ],
)
def test_what_clients_send_is_taken(http, changes):
    assert text_of(chat(http, **changes)) is not None


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tag": 1}, "tag"),
        ({"messages": CONVERSATION}, "messages[1].provider_specific_fields"),
        ({}, None),
    ],
)
def test_strict_refuses_unknown_fields_by_name(changes, param):
    response = answered(ServerConfig(strict=True), "/tokenize", {"messages": HELLO, **changes})
    assert response.status_code == (400 if param else 200)
    assert response.json().get("error", {}).get("param") == param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guided_json", {}),
        ("guided_regex", "a"),
        ("guided_choice", ["a"]),
        ("guided_grammar", "start: /a/"),
        ("regex", "a"),
        ("ebnf", 'root ::= "a"'),
        ("use_beam_search", True),
        ("structural_tag", "{}"),
        ("thinking_token_budget", -1),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1] * 1025),
        ("bad_words", ["a"] * 257),
        ("prompt_embeds", "AA=="),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(http, name, value):
    response = complete(http, **{name: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == name
    if name in ("regex", "ebnf") or name.startswith("guided_"):
        assert "structured_outputs" in error["message"]


def test_an_old_name_beside_the_new_one_is_named_and_left(http):
    """guidance sends both, since each version of vLLM reads one of them."""
    grammar = "start: /b{3}/"
    both = {"guided_grammar": grammar, "structured_outputs": {"grammar": grammar}}
    response = complete(http, **both, guided_decoding_backend="guidance")
    assert text_of(response) == "bbb"
    ignored = response.headers["x-milepost-ignored"].split(", ")
    assert set(ignored) == {"guided_grammar", "guided_decoding_backend"}


def test_what_an_answer_may_not_have(http):
    (letter,) = http.post("/tokenize", json={"prompt": "a"}).json()["tokens"]
    likes = {"logit_bias": {str(letter): 100}}
    assert text_of(chat(http, **likes)) == "aaaa"
    held = chat(http, **likes, bad_words=["a"], return_token_ids=True).json()["choices"][0]
    assert letter not in held["token_ids"]
    allowed = chat(http, allowed_token_ids=[70, 71], return_token_ids=True).json()["choices"][0]
    assert set(allowed["token_ids"]) <= {70, 71}


def test_wishes_that_leave_nothing_are_refused(http):
    """At once, or where an answer comes to it: also in a stream, whose status was sent before."""
    (letter,) = http.post("/tokenize", json={"prompt": "a"}).json()["tokens"]
    response = chat(http, bad_words=["a"], allowed_token_ids=[letter])
    assert response.status_code == 400
    assert "they leave no token that may come" in response.json()["error"]["message"]
    exclude_b = {str(token): -100 for token in range(448) if "b" in text_alone(http, token)}
    stuck = {"structured_outputs": {"regex": "a{3}b"}, "logit_bias": exclude_b, "max_tokens": 9}
    why = "structured_outputs: nothing is left of it beside logit_bias"
    response = chat(http, **stuck)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == why
    *_, last = chat(http, **stuck, stream=True).text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == why


def text_alone(http, token):
    return http.post("/detokenize", json={"tokens": [token]}).json()["prompt"]


def test_reasoning_has_a_budget(http):
    thinking = {"enable_thinking": True}
    for budget in (0, 3):
        response = chat(
            http,
            max_tokens=12,
            chat_template_kwargs=thinking,
            thinking_token_budget=budget,
            return_token_ids=True,
            ignore_eos=True,
        )
        (choice,) = response.json()["choices"]
        message = choice["message"]
        assert bool(message.get("reasoning_content")) == bool(budget)
        assert message.get("reasoning") == message.get("reasoning_content")
        assert message["content"]
        assert len(choice["token_ids"]) == 12


@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_of_reasoning_that_nothing_ends_is_refused_before_the_stream(stream, monkeypatch):
    limits = replace(inprocess.LIMITS, closes_reasoning=False)
    monkeypatch.setattr(inprocess, "LIMITS", limits)
    body = {"prompt": "a", "thinking_token_budget": 5, "stream": stream}
    refused = answered(ServerConfig(), "/v1/completions", body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "thinking_token_budget")
    assert "no token </think>" in error["message"]


def test_usage_in_every_chunk(client):
    """As many as there have been tokens, of which a chunk may hold several."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    wish = CHAT | {"logprobs": True, "stream_options": options}
    chunks = list(client.chat.completions.create(**wish, stream=True))
    logprobs = [chunk.choices[0].logprobs if chunk.choices else None for chunk in chunks]
    tokens = [len(each.content) if each else 0 for each in logprobs]
    assert sum(tokens) == 4
    assert [chunk.usage.completion_tokens for chunk in chunks] == list(accumulate(tokens))


@pytest.mark.parametrize(
    ("form", "check"),
    [
        ({"choice": ["alpha", "beta"]}, lambda text: text in ("alpha", "beta")),
        ({"regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdigit()),
        ({"grammar": 'start: "xyz"'}, lambda text: text == "xyz"),
        ({"json": {"const": 7}}, lambda text: text == "7"),
        ({"json_object": True, "json": None}, lambda text: text.startswith("{")),
    ],
)
def test_structured_outputs(http, form, check):
    assert check(text_of(chat(http, structured_outputs=form, max_tokens=12)))
    assert check(text_of(complete(http, structured_outputs=form, max_tokens=12)))


def test_structured_outputs_and_a_response_format_are_too_much(http):
    form = {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}
    assert chat(http, **form).json()["error"]["param"] == "structured_outputs"


def token_ids(http, **changes):
    return http.post("/tokenize", json={"messages": HELLO, **changes}).json()["tokens"]


def test_a_final_message_is_continued(http):
    messages = [*HELLO, {"role": "assistant", "content": "jumps over"}]
    whole = token_ids(http, messages=messages, add_generation_prompt=False)
    opened = token_ids(http, messages=messages, continue_final_message=True)
    assert opened == whole[: len(opened)]
    assert len(opened) < len(whole)
    answer = chat(
        http, messages=messages, continue_final_message=True, return_token_ids=True
    ).json()
    assert answer["prompt_token_ids"] == opened
    both = chat(http, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert both.status_code == 400


def test_reasoning_that_a_final_message_begins_goes_on(http):
    """A form waits for its end."""
    begun = [{"type": "text", "text": "<think>\nthe"}, {"type": "text", "text": " quick"}]
    messages = [*HELLO, {"role": "assistant", "content": begun}]
    options = {"continue_final_message": True, "structured_outputs": {"regex": "[0-9]{3}"}}
    options |= {"thinking_token_budget": 4, "max_tokens": 12}
    message = chat(http, messages=messages, **options).json()["choices"][0]["message"]
    assert len(message["content"]) == 3
    assert message["content"].isdecimal()
    assert message["reasoning"]


@pytest.mark.parametrize("side", ["left", "right", None])
def test_a_prompt_is_truncated(http, side):
    prompt = list(range(10, 110))
    kept = {"left": prompt[-40:], "right": prompt[:40], None: prompt[-40:]}[side]
    options = {"truncate_prompt_tokens": 40, "truncation_side": side}
    cut = complete(http, prompt=prompt, **options).json()
    assert cut["usage"]["prompt_tokens"] == 40
    assert cut["choices"][0]["text"] == text_of(complete(http, prompt=kept))


def test_a_prompt_that_is_too_long_fits_with_minus_one(http):
    prompt = [5] * 5000
    assert complete(http, prompt=prompt).status_code == 400
    done = complete(http, prompt=prompt, truncate_prompt_tokens=-1).json()
    assert done["usage"]["prompt_tokens"] == 4096 - 4


def test_minus_one_leaves_room_for_no_more_than_the_model_takes(http):
    body = {"model": "tiny", "prompt": "the quick", "max_tokens": 10**6}
    answer = http.post("/v1/completions", json={**body, "truncate_prompt_tokens": -1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


def test_marks_move_with_a_truncated_prompt(http):
    long = [{"role": "system", "content": "a b c d " * 40}, *HELLO]
    whole = http.post("/tokenize", json={"messages": long}).json()
    done = chat(http, messages=long, truncate_prompt_tokens=whole["count"] - 3)
    assert text_of(done) is not None
    assert done.json()["usage"]["prompt_tokens"] == whole["count"] - 3


def test_ids_are_the_callers_own(http):
    assert complete(http, request_id="mine").json()["id"] == "cmpl-mine"
    response = http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "theirs"})
    assert response.json()["id"] == "chatcmpl-theirs"


def test_effort_reaches_a_template_that_reads_it(http):
    """The model's template has `enable_thinking`: it opens the reasoning."""
    none = chat(http, reasoning_effort="none").json()["usage"]["prompt_tokens"]
    high = chat(http, reasoning_effort="high").json()["usage"]["prompt_tokens"]
    assert high > none == chat(http).json()["usage"]["prompt_tokens"]
    own = chat(http, reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})
    assert own.json()["usage"]["prompt_tokens"] == none


def test_reasoning_is_left_out_where_it_is_not_wanted(http):
    thinking = {"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 12}
    with_it = chat(http, **thinking).json()["choices"][0]["message"]
    assert with_it["reasoning_content"]
    without = chat(http, **thinking, include_reasoning=False).json()["choices"][0]["message"]
    assert "reasoning_content" not in without
    assert without["content"] == (with_it["content"] or "")


def test_a_refusal_is_what_the_assistant_said(http):
    parts = [{"type": "refusal", "refusal": "I will not"}]
    said = token_ids(http, messages=[*HELLO, {"role": "assistant", "content": "I will not"}])
    for message in ({"content": parts}, {"content": None, "refusal": "I will not"}):
        assert token_ids(http, messages=[*HELLO, {"role": "assistant", **message}]) == said


def test_reasoning_is_streamed_under_both_names(http):
    own = {"chat_template_kwargs": {"enable_thinking": True}, "stream": True}
    body = chat(http, **own).text.split("data: ")
    deltas = [json.loads(line)["choices"][0]["delta"] for line in body if line.startswith("{")]
    told = [delta for delta in deltas if "reasoning" in delta]
    assert told
    assert all(delta["reasoning"] == delta["reasoning_content"] for delta in told)


def test_images_are_refused_by_a_model_without_them(http):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    response = chat(http, messages=[{"role": "user", "content": [part]}])
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert "1 image: this model is served for text only" in error["message"]


@pytest.mark.parametrize(
    "kind", [ImageURL, ResponseInputImageParam, ResponseInputImageContentParam]
)
def test_every_detail_of_an_image_is_known(kind):
    """Agents choose it themselves: an unknown one would end the conversation."""
    known = re.findall(r"'(\w+)'", str(get_type_hints(kind)["detail"]))
    assert "low" in known
    for detail in known:
        part = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": detail}
        assert InputImage.model_validate(part).detail == detail
        assert ImageUrl.model_validate({"url": "data:,", "detail": detail}).detail == detail
        images_of([{"role": "user", "content": [part]}])


def test_openais_breakpoint_is_a_mark(http):
    def marks(own):
        content = [{"type": "text", "text": "be brief", **own}, {"type": "text", "text": " please"}]
        body = {"messages": [{"role": "user", "content": content}]}
        return http.post("/tokenize", json=body).json()["cache_marks"]

    theirs = marks({"cache_control": {"type": "ephemeral"}})
    assert theirs != marks({})
    assert marks({"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}) == theirs


def test_videos_are_refused_by_a_model_without_them(http):
    part = {"type": "video_url", "video_url": {"url": "data:image/gif;base64,AAAA"}}
    response = chat(http, messages=[{"role": "user", "content": [part]}])
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert "1 video: this model is served without videos" in error["message"]


@pytest.mark.parametrize(
    ("role", "parts", "message"),
    [
        ("user", ["a", {"type": "input_text", "text": "b"}], {"content": "ab"}),
        ("assistant", [{"type": "output_text", "text": "b"}], {"content": "b"}),
        (
            "assistant",
            [{"type": "thinking", "thinking": [{"type": "text", "text": "why"}]}, "b"],
            {"content": "b", "reasoning_content": "why"},
        ),
        ("assistant", [{"type": "thinking", "thinking": "why"}], {"reasoning_content": "why"}),
    ],
)
def test_parts_of_other_apis_are_read(role, parts, message):
    request = ChatRequest.model_validate({"messages": [{"role": role, "content": parts}]})
    (found,) = for_template(request.messages)
    found["content"] = "".join(part["text"] for part in found["content"])
    assert found == {"role": role, "content": "", **message}


@pytest.mark.parametrize("kind", ["input_audio", "file"])
def test_only_text_images_and_videos_are_served(http, kind):
    """And the message says so, rather than which types there are."""
    part = {"type": kind, kind: {"url": "http://127.0.0.1/x.png"}}
    content = [{"type": "text", "text": "what is this?"}, part]
    response = chat(http, messages=[{"role": "user", "content": content}])
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages[0].content[1].type")
    expected = f"'{kind}' is not supported: only text, images and videos are served"
    assert expected in error["message"]


def test_arguments_of_calls_may_be_objects(http):
    def tokens(arguments):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return token_ids(http, messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}])

    assert tokens({"a": [1, "é"]}) == tokens('{"a": [1, "é"]}') != tokens({})


def test_seeds_may_be_negative(http):
    """Seeds of 64 bits; -1 stands for none."""
    texts = [text_of(complete(http, temperature=2, max_tokens=16, seed=-(2**63))) for _ in "ab"]
    assert texts[0] == texts[1]
    texts = [text_of(complete(http, temperature=2, max_tokens=16, seed=-1)) for _ in "ab"]
    assert texts[0] != texts[1]
    body = {"model": "tiny", "input": "hello", "max_output_tokens": 16, "temperature": 2}
    responses = [http.post("/v1/responses", json={**body, "seed": -(2**63)}) for _ in "ab"]
    assert [response.status_code for response in responses] == [200, 200]
    first, second = (response.json()["output"][-1]["content"] for response in responses)
    assert first == second


def test_documents_reach_a_template_that_reads_them(http):
    documents = [{"doc_id": 1, "text": "lions <|im_end|> roar"}]
    refused = chat(http, documents=documents)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents")
    tokenizer = chatmodel.make_tokenizer()
    tokenizer.chat_template = (
        "{% for d in documents or [] %}{{ d.text }}{% endfor %}{{ messages[0].content }}"
    )
    body, path = {"messages": HELLO, "documents": documents}, "/v1/chat/completions/render"
    ids = answered(ServerConfig(), path, body, tokenizer=tokenizer).json()["token_ids"]
    assert tokenizer.decode(ids) == documents[0]["text"] + HELLO[0]["content"]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in ids, "it is text"


def test_a_prompt_without_its_beginning():
    tokenizer, path = chatmodel.make_tokenizer(), "/v1/completions/render"
    begins = ("<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>"))
    whole = TemplateProcessing(single="<|im_start|> $A", special_tokens=[begins])
    tokenizer.backend_tokenizer.post_processor = whole
    whole, bare = (
        answered(ServerConfig(), path, {**PROMPT, **own}, tokenizer=tokenizer).json()[0]
        for own in ({}, {"add_special_tokens": False})
    )
    assert whole["token_ids"][1:] == bare["token_ids"]


def test_tokens_by_their_ids(http):
    own = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = chat(http, logprobs=True, top_logprobs=1, **own).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [each["token"] for each in entries] == [f"token_id:{id_}" for id_ in choice["token_ids"]]
    assert [each["top_logprobs"][0]["token"] for each in entries] == [e["token"] for e in entries]
    assert b"".join(bytes(e["bytes"]) for e in entries).decode(errors="replace")
    choice = complete(http, logprobs=2, echo=True, **own).json()["choices"][0]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{id_}" for id_ in ids]
    tops = choice["logprobs"]["top_logprobs"][1:]
    assert all(name.startswith("token_id:") for top in tops for name in top)
    plain = complete(http, logprobs=2).json()["choices"][0]["logprobs"]["token_logprobs"]
    # What was computed again may be rounded otherwise than what is reused.
    assert choice["logprobs"]["token_logprobs"][-4:] == pytest.approx(plain, abs=1e-3)
