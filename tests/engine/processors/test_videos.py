"""Videos in prompts: the tokens of transformers, the frames as pictures of the cache."""

from __future__ import annotations

import asyncio
import base64
from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from milepost import LLM, AsyncLLM, SamplingParams
from milepost.errors import InvalidRequestError
from tests import pictured_chat
from tests.pictured import SETTINGS
from tests.pictured_chat import MARKS, VIDEO_MARK, animation, image

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS = {"num_pages": 100, "num_slots": 12, "dtype": "float64"}
FRAMES = [image(4, 6, seed) for seed in range(5)]
MARK = MARKS[0] + VIDEO_MARK + MARKS[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return pictured_chat.save(tmp_path_factory.mktemp("pictured_chat"))


def chat(*parts):
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return [{"role": "user", "content": content}]


def url(data):
    encoded = base64.b64encode(data).decode()
    return {"type": "video_url", "video_url": {"url": f"data:image/png;base64,{encoded}"}}


def video(frames=FRAMES, **own):
    return {"type": "video", "video": {"frames": list(frames), **(own or {"fps": 2})}}


def text_of(llm, content):
    """What the chat template writes for a message."""
    written, own = [{"role": "user", "content": content}], {"add_generation_prompt": True}
    return llm.get_tokenizer().apply_chat_template(written, tokenize=False, **own)


def expected_tokens(llm, text, times_s, num_rows, num_columns):
    """The tokens of a text with a video, as transformers makes them."""
    own = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token=MARKS[0],
        vision_end_token=MARKS[2],
        video_token=VIDEO_MARK,
        _calculate_timestamps=lambda *how: Qwen3VLProcessor._calculate_timestamps(None, *how),
    )
    indices = [round(1000 * each) for each in times_s]
    indices += indices[-1:] * (len(indices) % 2)
    grid = torch.tensor([[len(indices) // 2, 2 * num_rows, 2 * num_columns]])
    metadata = SimpleNamespace(fps=1000, frames_indices=indices)
    inputs = {"video_grid_thw": grid, "video_metadata": [metadata]}
    shown = Qwen3VLProcessor.replace_video_token(own, inputs, 0)
    whole = text_of(llm, text.replace("VIDEO", shown))
    return llm.get_tokenizer().encode(whole, add_special_tokens=False)


@pytest.mark.parametrize("num_frames", [2, 5])
def test_tokens_are_those_of_the_reference(llm, num_frames):
    """With the times after the text before them, where a tokenizer may join them."""
    (output,) = llm.chat(chat("look:", video(FRAMES[:num_frames]), "!"), PARAMS, use_tqdm=False)
    times = [index / 2 for index in range(num_frames)]
    assert output.prompt_token_ids == expected_tokens(llm, "look:\nVIDEO\n!", times, 4, 6)
    assert output.cache_report.image_tokens == -(-num_frames // 2) * 24


def test_a_video_is_the_same_in_any_form(llm):
    """As frames, as animations of several formats, in a conversation and in plain prompts."""
    files = [animation(FRAMES, 500, kind) for kind in ("PNG", "WEBP")]
    forms = [video(), video(times=[0, 0.5, 1, 1.5, 2]), *map(url, files)]
    forms.append({"type": "video", "video": files[0]})
    found = [llm.chat(chat("see", form), PARAMS, use_tqdm=False)[0] for form in forms]
    text, encode = text_of(llm, f"see\n{MARK}"), llm.get_tokenizer().encode
    ids = [
        encode(each, add_special_tokens=False) for each in (text, text.replace(MARK, VIDEO_MARK))
    ]
    data = {"multi_modal_data": {"video": [files[0]]}}
    for prompt in ({"prompt": text}, *({"prompt_token_ids": each} for each in ids)):
        found += llm.generate({**prompt, **data}, PARAMS, use_tqdm=False)
    assert len({tuple(each.prompt_token_ids) for each in found[: len(forms) + 1]}) == 1
    assert len({tuple(each.outputs[0].token_ids) for each in found[: len(forms) + 1]}) == 1
    # Around token ids the text before a time is tokenized by itself.
    texts = {llm.get_tokenizer().decode(each.prompt_token_ids) for each in found}
    assert len(texts) == 1
    assert [each.cache_report.images_reused for each in found[1:6]] == [3] * 5


def test_frames_that_are_shared_hit_and_another_order_does_not(llm):
    first = llm.chat(chat("a", video(FRAMES[:4])), PARAMS, use_tqdm=False)[0]
    longer = llm.chat(chat("a", video(FRAMES)), PARAMS, use_tqdm=False)[0]
    turned = llm.chat(chat("a", video(FRAMES[3::-1])), PARAMS, use_tqdm=False)[0]
    assert longer.cache_report.images_reused == 2
    assert turned.cache_report.images_reused == 0
    assert turned.outputs[0].token_ids != first.outputs[0].token_ids
    mixed = chat("a", {"type": "image", "image": FRAMES[0]}, video(FRAMES[:2]), "b", video())
    (output,) = llm.chat(mixed, PARAMS, use_tqdm=False)
    assert len(output.cache_report.images) == 1 + 1 + 3


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (video(FRAMES[:1]), "has 1 frames: use 2 to 768"),
        (video(times=[0.0]), "5 frames and 1 times"),
        (video(times=["a"] * 5), "use one time for each, in seconds"),
        (video(fps=0), "fps=0"),
        (video([*FRAMES, image(5, 5)]), "use one size"),
        (url(b"GIF89a"), "GIF image of 6 bytes cannot be decoded"),
        ({"type": "video_url", "video_url": {"url": "http://a/b.mp4"}}, "allowed-media-domains"),
        ({"type": "video_url"}, "has no video"),
    ],
)
def test_what_is_no_video_is_refused(llm, part, message):
    with pytest.raises(InvalidRequestError, match=message):
        llm.chat(chat("a", part), PARAMS)


def test_limits(folder):
    with (
        LLM(folder, limit_mm_per_prompt={"video": 1}, **OPTIONS) as one,
        pytest.raises(InvalidRequestError, match="2 videos: use 1 or fewer"),
    ):
        one.chat(chat(video(), video()), PARAMS)
    with (
        LLM(folder, limit_mm_per_prompt={"video": 0}, **OPTIONS) as none,
        pytest.raises(InvalidRequestError, match="1 video: this model is served without videos"),
    ):
        none.chat(chat(video()), PARAMS)


def test_programs_with_an_event_loop(folder, llm):
    (expected,) = llm.chat(chat("see", video()), PARAMS, use_tqdm=False)
    data = {"multi_modal_data": {"video": animation(FRAMES, 500)}}
    prompt = {"prompt": text_of(llm, f"see\n{MARK}"), **data}

    async def both():
        async with AsyncLLM(folder, **OPTIONS) as own:
            asked = own.chat(chat("see", video()), PARAMS), own.generate(prompt, PARAMS)
            return [[output async for output in each][-1] for each in asked]

    for output in asyncio.run(both()):
        assert output.prompt_token_ids == expected.prompt_token_ids
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_settings_are_those_of_videos(llm):
    facts = llm.llm_engine.images.video
    assert (facts.settings.patch_size, facts.sampling.max_frames) == (SETTINGS.patch_size, 12)
