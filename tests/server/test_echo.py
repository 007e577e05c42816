"""A completion that begins with its prompt, and log-probabilities of prompts."""

import pytest

PROMPT = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 3, "temperature": 0}


def complete(http, **changes):
    response = http.post("/v1/completions", json={**PROMPT, **changes})
    assert response.status_code == 200, response.text
    return response.json()


def test_echo_begins_with_the_prompt(http):
    plain = complete(http, logprobs=2)["choices"][0]
    found = complete(http, logprobs=2, echo=True)["choices"][0]
    assert found["text"] == PROMPT["prompt"] + plain["text"]
    count = len(http.post("/tokenize", json={"prompt": PROMPT["prompt"]}).json()["tokens"])
    own = found["logprobs"]
    assert "".join(own["tokens"][:count]) == PROMPT["prompt"]
    assert own["token_logprobs"][0] is own["top_logprobs"][0] is None
    assert all(value < 0 for value in own["token_logprobs"][1:])
    assert own["tokens"][count:] == plain["logprobs"]["tokens"]
    scores = plain["logprobs"]["token_logprobs"]
    assert own["token_logprobs"][count:] == pytest.approx(scores, rel=1e-5), "up to rounding"
    shift = len(PROMPT["prompt"])
    offsets = plain["logprobs"]["text_offset"]
    assert own["text_offset"][count:] == [shift + offset for offset in offsets]


def test_a_prompt_alone(http):
    body = complete(http, echo=True, max_tokens=0, logprobs=1)
    usage, found = body["usage"], body["choices"][0]
    assert usage["completion_tokens"] == 0
    assert usage["total_tokens"] == usage["prompt_tokens"] > 0
    assert found["text"] == PROMPT["prompt"]
    assert "".join(found["logprobs"]["tokens"]) == PROMPT["prompt"]


def test_echo_of_several_prompts_and_answers(http):
    prompts = [[5, 6, 7, 8], [9, 10]]
    changes = {"prompt": prompts, "n": 2, "temperature": 1, "seed": 3, "logprobs": 0}
    choices = complete(http, echo=True, **changes)["choices"]
    plain = complete(http, **changes)["choices"]
    for index, (one, other) in enumerate(zip(choices, plain, strict=True)):
        assert one["text"].endswith(other["text"])
        assert len(one["logprobs"]["tokens"]) == len(prompts[index // 2]) + 3


def test_a_streamed_echo(client, http):
    whole = complete(http, echo=True)["choices"][0]["text"]
    stream = client.completions.create(**PROMPT, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole


def test_prompt_logprobs_hit_nothing_and_are_by_id(http):
    prompt = [7, 8, 9] * 60
    complete(http, prompt=prompt)
    found = complete(http, prompt=prompt, prompt_logprobs=1)
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    entries = found["choices"][0]["prompt_logprobs"]
    assert len(entries) == len(prompt)
    assert entries[0] is None
    for token_id, entry in zip(prompt[1:], entries[1:], strict=True):
        assert entry[str(token_id)]["logprob"] < 0
        assert min(one["rank"] for one in entry.values()) == 1
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    body = http.post("/v1/chat/completions", json={**chat, "prompt_logprobs": 0}).json()
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 0},
        {"stream": True, "prompt_logprobs": 1},
        {"stream": True, "echo": True, "logprobs": 1},
        {"prompt_logprobs": 21},
    ],
)
def test_refusals(http, changes):
    assert http.post("/v1/completions", json={**PROMPT, **changes}).status_code == 400
