"""The official client against a real server."""

import json

import openai
import pytest

from tests import chatmodel
from tests.server.conftest import serving

MESSAGES = [
    {"role": "system", "content": "you are a helpful assistant. " * 30},
    {"role": "user", "content": "what is the weather like in Zürich today?"},
]
GREEDY = {"model": "tiny", "temperature": 0}


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "milepost"


def test_completion(client):
    alone = {"cache_salt": "test_completion"}  # other tests ask the same server
    done = client.completions.create(
        prompt="the quick brown", max_tokens=5, extra_body=alone, **GREEDY
    )
    assert done.choices[0].finish_reason == "length"
    assert done.usage.completion_tokens == 5
    assert done.usage.total_tokens == done.usage.prompt_tokens + 5
    assert done.usage.prompt_tokens_details.cached_tokens == 0


def test_completion_streamed_is_the_same(client):
    options = {**GREEDY, "prompt": "the quick brown fox", "max_tokens": 12, "logprobs": 2}
    whole = client.completions.create(**options)
    chunks = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    tokens = [t for c in chunks if c.choices for t in c.choices[0].logprobs.tokens]
    assert tokens == whole.choices[0].logprobs.tokens
    offsets = [t for c in chunks if c.choices for t in c.choices[0].logprobs.text_offset]
    assert offsets == whole.choices[0].logprobs.text_offset


def test_batch_of_prompts_and_answers(client):
    done = client.completions.create(
        model="tiny", prompt=["one", "two", "three"], n=2, seed=5, max_tokens=4
    )
    assert [choice.index for choice in done.choices] == list(range(6))
    alone = client.completions.create(model="tiny", prompt="two", n=2, seed=5, max_tokens=4)
    assert [c.text for c in done.choices[2:4]] == [c.text for c in alone.choices]
    assert done.usage.completion_tokens == sum(4 for _ in done.choices)


def test_batch_streamed(client):
    options = {"model": "tiny", "prompt": [[5, 6, 7], [8, 9, 10]], "n": 2, "seed": 1}
    whole = client.completions.create(**options, max_tokens=6)
    texts = ["", "", "", ""]
    for chunk in client.completions.create(**options, max_tokens=6, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_chat_hits_on_the_second_turn(client):
    salt = {"cache_salt": "second turn"}
    first = client.chat.completions.create(
        messages=MESSAGES, max_tokens=4, extra_body=salt, **GREEDY
    )
    assert first.choices[0].message.role == "assistant"
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    again = client.chat.completions.create(
        messages=MESSAGES, max_tokens=4, extra_body=salt, **GREEDY
    )
    assert again.choices[0].message.content == first.choices[0].message.content
    details = again.usage.prompt_tokens_details
    assert details.cached_tokens >= 192
    assert details.cached_tokens + sum(details.lost_tokens.values()) == again.usage.prompt_tokens


def test_chat_streamed_is_the_same(client):
    options = {**GREEDY, "messages": MESSAGES, "max_completion_tokens": 16, "logprobs": True}
    whole = client.chat.completions.create(**options, top_logprobs=3)
    stream = client.chat.completions.create(
        **options, top_logprobs=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    tokens = [
        token.token
        for chunk in chunks
        if chunk.choices and chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert tokens == [token.token for token in whole.choices[0].logprobs.content]
    assert all(len(token.top_logprobs) == 3 for token in whole.choices[0].logprobs.content)
    octets = bytes(byte for token in whole.choices[0].logprobs.content for byte in token.bytes)
    assert octets.decode(errors="replace") == text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 16


def test_logit_bias_decides(client):
    done = client.completions.create(
        prompt="the",
        max_tokens=3,
        logit_bias={"300": 100},
        **GREEDY,
        extra_body={"return_token_ids": True},
    )
    assert done.choices[0].token_ids == [300, 300, 300]


def test_seed_repeats_and_differs(client):
    def sample(seed):
        done = client.completions.create(model="tiny", prompt="the", max_tokens=16, seed=seed)
        return done.choices[0].text

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_stop_string_ends_the_answer(client):
    options = {**GREEDY, "prompt": "the quick brown fox", "max_tokens": 20}
    text = client.completions.create(**options).choices[0].text
    stop = text[4:6]
    cut = client.completions.create(**options, stop=[stop])
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].stop_reason == stop
    streamed = client.completions.create(**options, stop=stop, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == cut.choices[0].text


def test_stop_token_ends_the_answer(client):
    done = client.completions.create(
        prompt="the",
        max_tokens=9,
        logit_bias={"300": 100},
        **GREEDY,
        extra_body={"stop_token_ids": [300], "min_tokens": 2},
    )
    assert done.choices[0].finish_reason == "stop"
    assert done.usage.completion_tokens >= 3


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"n": 0}, 400, "n"),
        ({"n": 2}, 400, "n"),
        ({"n": 10**12, "temperature": 1}, 400, "n"),
        ({"max_tokens": 100_000}, 400, "max_tokens"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [1, 448]}, 400, "prompt"),
        ({"prompt": "word " * 9000}, 400, "prompt"),
        ({"prompt": {"text": "a"}}, 400, "prompt"),
        ({"logprobs": 21}, 400, "logprobs"),
        ({"logit_bias": {"9999": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"stop": [""]}, 400, "stop[0]"),
        ({"best_of": 3}, 400, "best_of"),
        ({"suffix": "end"}, 400, "suffix"),
        ({"seed": -(2**63) - 1}, 400, "seed"),
        ({"extra_body": {"top_k": 2**63}}, 400, "top_k"),
        ({"extra_body": {"use_beam_search": True}}, 400, "use_beam_search"),
        ({"extra_body": {"cache_marks": [99999]}}, 400, "prompt"),
        ({"model": "gpt-9"}, 404, "model"),
    ],
)
def test_refusals_name_the_field(client, changes, status, param):
    options = {**GREEDY, "prompt": "the", "max_tokens": 2, **changes}
    with pytest.raises(openai.APIStatusError) as raised:
        client.completions.create(**options)
    assert raised.value.status_code == status
    assert raised.value.body["param"] == param
    assert param.partition("[")[0] in raised.value.body["message"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url.url",
        ),
        ({"top_logprobs": 2}, None),
        ({"tool_choice": "required"}, None),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"extra_body": {"guided_json": {}}}, "guided_json"),
        ({"extra_body": {"bad_words": [""]}}, "bad_words[0]"),
        ({"extra_body": {"chat_template": "{{ x }}"}}, "chat_template"),
        (
            {"extra_body": {"chat_template_kwargs": {"chat_template": "{{ x }}"}}},
            "chat_template_kwargs.chat_template",
        ),
        (
            {"extra_body": {"chat_template_kwargs": {"tokenize": True}}},
            "chat_template_kwargs.tokenize",
        ),
        (
            {"extra_body": {"chat_template_kwargs": {"enable_thinkin": True}}},
            "chat_template_kwargs.enable_thinkin",
        ),
    ],
)
def test_chat_refusals_name_the_field(client, changes, param):
    options = {**GREEDY, "messages": MESSAGES, "max_tokens": 2, **changes}
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**options)
    assert raised.value.body["param"] == param
    assert (param or next(iter(changes))) in raised.value.body["message"]


def test_async_client_and_early_close(server):
    with server.client() as client:
        stream = client.completions.create(
            model="tiny",
            prompt="the",
            max_tokens=3000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        stream.close()
    for _ in range(200):
        if server.metric("num_requests_running") == 0:
            break
    assert server.metric("num_requests_running") == 0
    assert server.metric("kv_cache_usage_perc") == 0


def test_tokenize_and_back(http):
    text = "naïve café 🙂"
    done = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert done["count"] == len(done["tokens"]) == len(done["token_strs"])
    assert http.post("/detokenize", json={"tokens": done["tokens"]}).json() == {"prompt": text}
    chat = http.post("/tokenize", json={"messages": MESSAGES}).json()
    assert len(chat["cache_marks"]) == 2


def test_operations(http):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/version").json() == {"version": "0.1.0"}
    assert http.post("/reset_prefix_cache").json() == {"reset": True}
    reset = http.post("/reset_prefix_cache", params={"reset_external": "true"})
    assert reset.json() == {"reset": True}
    assert http.post("/reset_prefix_cache?reset_external=2").status_code == 400
    assert http.get("/docs").status_code == 200
    text = http.get("/metrics").text
    for name in ("prefix_cache_queries_total", "prefix_cache_lost_tokens_total"):
        assert f"milepost:{name}" in text


def test_access_log_has_the_cache_report(server, client):
    done = client.completions.create(prompt="log me", max_tokens=2, user="of the log", **GREEDY)
    for _ in range(100):
        lines = [json.loads(line) for line in server.log if line.startswith("{")]
        mine = [line for line in lines if line.get("user") == "of the log"]
        if mine:
            break
        client.models.list()
    assert (mine[0]["status"], mine[0]["id"]) == (200, done.id)
    assert mine[0]["completion_tokens"] == 2
    assert (
        mine[0]["cached_tokens"] + sum(mine[0]["lost_tokens"].values())
        == (mine[0]["prompt_tokens"])
    )


def test_the_checkpoints_sampling_holds_where_a_request_names_none(tmp_path):
    folder = chatmodel.save(tmp_path)
    (folder / "generation_config.json").write_text('{"top_k": 1, "temperature": 0.7}')
    options = {"model": "tiny", "prompt": "the quick", "max_tokens": 12}
    chat = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12}
    with serving(folder) as server, server.client() as client:
        best = client.completions.create(**options, temperature=0).choices[0].text
        assert client.completions.create(**options, seed=1).choices[0].text == best
        free = client.completions.create(**options, seed=1, extra_body={"top_k": 0})
        assert free.choices[0].text != best
        talked = [client.chat.completions.create(**chat, seed=i).choices[0] for i in (1, 2)]
        assert talked[0].message.content == talked[1].message.content
