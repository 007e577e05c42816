"""`mm_processor_kwargs` of a request, over HTTP."""

from __future__ import annotations

import pytest

from tests import pictured_chat
from tests.pictured import SETTINGS
from tests.pictured_chat import data_url, image
from tests.server.conftest import serving

TOKEN, LIMIT = SETTINGS.unit**2, 16 * SETTINGS.max_pixels
URL = data_url(image(8, 8, 1))
PARTS = [
    {"type": "text", "text": "look "},
    {"type": "image_url", "image_url": {"url": URL}},
    {"type": "text", "text": "what is this, and why is it so small?"},
]
CHAT = {"messages": [{"role": "user", "content": PARTS}]}
INPUT = [
    {"type": "input_text", "text": "look "},
    {"type": "input_image", "image_url": URL},
    {"type": "input_text", "text": "what is this, and why is it so small?"},
]
SAY = {"input": [{"role": "user", "content": INPUT}]}
SMALL = {"size": {"longest_edge": 16 * TOKEN}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(pictured_chat.save(tmp_path_factory.mktemp("pictured_chat"))) as running:
        yield running


def posted(server, path, body):
    with server.http() as http:
        return http.post(path, json=body)


def test_a_size_is_what_it_costs_everywhere(server):
    own = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    texts, counts = {}, {}
    for name, kwargs in (("small", SMALL), ("whole", {})):
        body = {**CHAT, **own, "mm_processor_kwargs": kwargs}
        first = posted(server, "/v1/chat/completions", body)
        assert "x-milepost-ignored" not in first.headers
        again = posted(server, "/v1/chat/completions", body).json()
        usage = again["usage"]
        assert usage["prompt_tokens_details"]["images_reused"] == 1
        texts[name] = again["choices"][0]["message"]["content"]
        assert first.json()["choices"][0]["message"]["content"] == texts[name]
        counts[name] = usage["prompt_tokens"]
        assert usage["prompt_tokens_details"]["image_tokens"] == counts[name] - counts["small"] + 16
        asked = {**CHAT, "add_generation_prompt": True, "mm_processor_kwargs": kwargs}
        assert posted(server, "/tokenize", asked).json()["count"] == counts[name]
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/responses", SAY)):
            body = {**body, "mm_processor_kwargs": kwargs}
            rendered = posted(server, f"{path}/render", body).json()
            assert len(rendered["token_ids"]) == counts[name]
        said = {**SAY, "max_output_tokens": 6, "mm_processor_kwargs": kwargs}
        response = posted(server, "/v1/responses", said).json()
        assert response["usage"]["input_tokens"] == counts[name]
    assert counts["whole"] - counts["small"] == 64 - 16


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", SAY),
        ("/v1/chat/completions/render", CHAT),
        ("/tokenize", CHAT),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "no image"}]}),
    ],
)
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_pixels": LIMIT + 1}, f"max_pixels={LIMIT + 1}: the limit for images is {LIMIT} "),
        ({"do_resize": False}, "unknown field 'do_resize': use min_pixels, max_pixels, fps"),
    ],
)
def test_what_is_not_served_is_a_400_that_names_value_and_limit(
    server, path, body, kwargs, message
):
    found = posted(server, path, {**body, "mm_processor_kwargs": kwargs})
    assert found.status_code == 400
    error = found.json()["error"]
    assert message in error["message"]
    assert error["param"] == "mm_processor_kwargs"
