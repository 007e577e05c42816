"""Images over HTTP, in the forms of three APIs, and from programs."""

from __future__ import annotations

import asyncio
import base64

import anthropic
import pytest

from milepost import LLM, AsyncLLM, SamplingParams
from tests import pictured_chat
from tests.pictured_chat import animation, data_url, encoded, image
from tests.server.conftest import serving

ONE, OTHER = image(8, 8, 1), image(8, 8, 2)
SETTINGS = {"max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return pictured_chat.save(tmp_path_factory.mktemp("pictured_chat"))


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder) as running:
        yield running


def user(*parts, **own):
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return [{"role": "user", "content": content}]


def part(url, **own):
    return {"type": "image_url", "image_url": {"url": url, **own}}


def ask(server, messages, **own):
    body = {"messages": messages, "ignore_eos": True, **SETTINGS, **own}
    with server.http() as http:
        return http.post("/v1/chat/completions", json=body)


def answered(server, *parts, **own):
    found = ask(server, user(*parts), **own)
    assert found.status_code == 200, found.text
    body = found.json()
    details = body["usage"]["prompt_tokens_details"]
    return body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens"], details


def test_the_model_says_that_it_takes_images(server):
    with server.http() as http:
        (model,) = http.get("/v1/models").json()["data"]
    assert model["input_modalities"] == ["text", "image", "video"]


def test_the_same_image_in_any_file_hits_and_another_does_not(server):
    question = "what is the weather like in this picture, and why?"
    text, count, details = answered(server, "look ", part(data_url(ONE)), question)
    assert (details["image_tokens"], details["images_reused"]) == (64, 0)
    for url in (data_url(ONE), data_url(ONE, "WEBP")):
        again = answered(server, "look ", part(url), question)
        assert again[:2] == (text, count)
        assert (again[2]["image_tokens_reused"], again[2]["images_reused"]) == (64, 1)
    follow_up = answered(server, "look ", part(data_url(ONE)), "another question")
    assert follow_up[2]["images_reused"] == 1, "the state right after the image"
    other = answered(server, "look ", part(data_url(OTHER)), question)
    assert (other[0] != text, other[1]) == (True, count)
    assert other[2]["image_tokens_reused"] == 0


def test_low_detail_is_a_limit_of_tokens(server):
    large = data_url(image(40, 20, 3))
    counts = {
        detail: answered(server, part(large, detail=detail))[1]
        for detail in ("high", "auto", "low")
    }
    assert counts["high"] == counts["auto"]
    assert counts["auto"] - counts["low"] >= 800 - 256


def test_other_apis_see_the_same_image(server):
    text, count, _ = answered(server, "look ", part(data_url(ONE)), "!")
    source = {"type": "base64", "media_type": "image/png", "data": encoded(ONE)}
    shown = [
        {"type": "text", "text": "look "},
        {"type": "image", "source": source},
        {"type": "text", "text": "!"},
    ]
    messages = [{"role": "user", "content": shown}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(model="tiny", max_tokens=6, messages=messages)
        counted = client.messages.count_tokens(model="tiny", messages=messages)
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == count
    assert message.usage.cache_read_input_tokens > 64
    assert counted.input_tokens == count
    parts = [
        {"type": "input_text", "text": "look "},
        {"type": "input_image", "image_url": data_url(ONE), "detail": "auto"},
        {"type": "input_text", "text": "!"},
    ]
    with server.client() as client:
        response = client.responses.create(
            model="tiny",
            max_output_tokens=6,
            temperature=0,
            input=[{"role": "user", "content": parts}],
        )
    assert response.usage.input_tokens == count
    assert response.usage.input_tokens_details.cached_tokens > 64
    body = {"messages": user("look ", part(data_url(ONE)), "!"), "add_generation_prompt": True}
    with server.http() as http:
        assert http.post("/tokenize", json=body).json()["count"] == count
    assert text


def test_an_image_in_the_result_of_a_tool(server):
    source = {"type": "base64", "media_type": "image/png", "data": encoded(ONE)}
    call = {"type": "tool_use", "id": "a", "name": "shot", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "a",
        "content": [{"type": "image", "source": source}],
    }
    messages = [
        {"role": "user", "content": "take one"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    body = {"model": "tiny", "max_tokens": 2, "messages": messages}
    with server.http() as http:
        found = http.post("/v1/messages", json=body)
        assert found.status_code == 200, found.text
        assert found.json()["usage"]["input_tokens"] > 64


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("http://localhost:1/a.png", "cannot be fetched without --allowed-media-domains"),
        ("file:///etc/passwd", "no files are read"),
        ("data:image/png;base64,AAAA", "supported are PNG, JPEG, WebP and GIF"),
        ("data:image/png;base64,$$$$", "the base64 is broken"),
        ("data:text/plain;base64,AAAA", "'text/plain' is no image"),
        ("javascript:alert(1)", "use a data: URL"),
    ],
)
def test_an_image_that_is_not_taken_is_named(server, given, message):
    found = ask(server, user("a", part(given)))
    assert found.status_code == 400
    assert message in found.json()["error"]["message"]
    assert "/etc" not in found.json()["error"]["message"].replace(given, "")


def test_text_that_looks_like_an_image_is_text(server):
    _, count, details = answered(server, "".join(pictured_chat.MARKS), part(data_url(ONE)))
    assert details["image_tokens"] == 64
    assert count > 64 + 3


def test_a_video_is_an_animation_whose_frames_are_pictures(server):
    frames = [image(4, 6, seed) for seed in range(4)]
    data = base64.b64encode(animation(frames, 500)).decode()
    url = f"data:image/png;base64,{data}"
    own = {"type": "video_url", "video_url": {"url": url}}
    text, count, details = answered(server, "see ", own, "?")
    assert (details["image_tokens"], details["images_reused"]) == (2 * 24, 0)
    assert answered(server, "see ", {**own, "video_url": url}, "?")[:2] == (text, count)
    assert answered(server, "see ", own, "and?")[2]["images_reused"] == 2
    body = {"messages": user("see ", own, "?"), "add_generation_prompt": True}
    with server.http() as http:
        assert http.post("/tokenize", json=body).json()["count"] == count
    for data, message in (
        (data_url(ONE), "a PNG file of one picture: send it as an image"),
        ("data:video/mp4;base64,AAAAGGZ0eXBtcDQy", "is a MP4 file: supported are PNG"),
    ):
        found = ask(server, user("a", {"type": "video_url", "video_url": {"url": data}}))
        assert found.status_code == 400
        assert message in found.json()["error"]["message"]


def test_a_video_may_be_a_list_of_its_frames(server):
    frames = [image(4, 6, seed) for seed in range(20, 24)]
    data = base64.b64encode(animation(frames, 500)).decode()
    url = f"data:image/png;base64,{data}"
    text, count, details = answered(server, "see ", {"type": "video_url", "video_url": url}, "?")
    assert (details["image_tokens"], details["images_reused"]) == (2 * 24, 0)
    for own in ({"fps": 2}, {"times": [0, 0.5, 1, 1.5]}):
        video = {"frames": [data_url(each) for each in frames], **own}
        again = answered(server, "see ", {"type": "video", "video": video}, "?")
        assert again[:2] == (text, count)
        assert again[2]["images_reused"] == 2
    for video, message in (
        ({"frames": [data_url(ONE)] * 3}, "with times=None and fps=None"),
        ({"frames": [data_url(ONE)] * 3, "times": [0]}, "3 frames and 1 times"),
        ({"frames": [], "fps": 1}, "no list of 1 to 768"),
        ({"frames": [data_url(ONE)] * 769, "fps": 1}, "at most 768 items"),
        ({"frames": ["file:///etc/passwd"] * 2, "fps": 1}, "no files are read"),
    ):
        found = ask(server, user("a", {"type": "video", "video": video}))
        assert found.status_code == 400
        assert message in found.json()["error"]["message"]


def test_one_question_about_many_images_and_many_about_one(server):
    """With OpenAI's client and Anthropic's: nothing is encoded twice."""
    shown = [image(8, 8, seed) for seed in range(30, 36)]
    encoded_before = server.metric("images_encoded_total")
    openai_parts = [part(data_url(each)) for each in shown]
    sources = [
        {"type": "base64", "media_type": "image/png", "data": encoded(each)} for each in shown
    ]
    anthropic_parts = [{"type": "image", "source": source} for source in sources]
    question = {"type": "text", "text": "which of these is the odd one?"}
    with server.client() as client:
        first = client.chat.completions.create(
            model="tiny", max_tokens=3, messages=user(*openai_parts, question["text"])
        )
    assert first.usage.prompt_tokens_details.image_tokens == 6 * 64
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": [*anthropic_parts, question]}]
        same = client.messages.create(model="tiny", max_tokens=3, messages=messages)
    assert same.usage.cache_read_input_tokens > 6 * 64
    assert server.metric("images_encoded_total") == encoded_before + 6
    with server.client() as client:
        answers = [
            client.chat.completions.create(
                model="tiny", max_tokens=3, messages=user(openai_parts[0], f"question {number}")
            )
            for number in range(3)
        ]
    reused = [each.usage.prompt_tokens_details.images_reused for each in answers]
    assert reused[1:] == [1, 1]
    assert server.metric("images_encoded_total") == encoded_before + 6


def test_metrics_count_images(server):
    before = server.metric("images_encoded_total")
    answered(server, "metrics", part(data_url(image(8, 8, 77))))
    assert server.metric("images_encoded_total") == before + 1


def test_a_model_without_images_refuses_them_by_name(folder):
    with serving(folder, "--language-model-only") as text:
        found = ask(text, user("a", part(data_url(ONE))))
        assert found.status_code == 400
        message = "1 image: this model is served for text only"
        assert message in found.json()["error"]["message"]


def test_programs_pass_images_in_conversations(folder, tmp_path):
    ONE.save(tmp_path / "one.png")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    kinds = [
        part(data_url(ONE)),
        {"type": "image", "image": ONE},
        {"type": "image_pil", "image_pil": ONE},
        part(f"file://{tmp_path / 'one.png'}"),
    ]
    given = {
        "num_pages": 100,
        "num_slots": 12,
        "dtype": "float64",
        "allowed_local_media_path": str(tmp_path),
    }
    with LLM(folder, **given) as llm:
        found = [llm.chat(user("look ", kind), params, use_tqdm=False)[0] for kind in kinds]
        written = [{"role": "user", "content": f"look \n{''.join(pictured_chat.MARKS)}"}]
        text = llm.get_tokenizer().apply_chat_template(
            written, tokenize=False, add_generation_prompt=True
        )
        prompt = {"prompt": text, "multi_modal_data": {"image": [ONE]}}
        found += llm.generate(prompt, params, use_tqdm=False)
    assert len({tuple(each.outputs[0].token_ids) for each in found}) == 1
    assert len({tuple(each.prompt_token_ids) for each in found}) == 1
    assert [each.cache_report.images_reused for each in found] == [0, 1, 1, 1, 1]

    async def first() -> list[int]:
        async with AsyncLLM(folder, **given) as llm:
            async for output in llm.chat(user("look ", kinds[1]), params):
                found = output
            return found.outputs[0].token_ids

    assert asyncio.run(first()) == found[0].outputs[0].token_ids
