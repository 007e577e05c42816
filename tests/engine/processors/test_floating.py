"""Images of Nemotron's multimodal models through the engine: the tokens of transformers' processor,
and hits that change no answer."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from milepost import LLM, SamplingParams
from milepost.errors import InvalidRequestError, UnsupportedModelError
from tests import floating
from tests.engine.processors import image_chats
from tests.engine.processors.image_chats import PARAMS, answer_of, chat, image
from tests.images.pictures import encoded, picture

OPTIONS = {**image_chats.OPTIONS, "num_slots": 24}
SIZE = 40, 40
"""Height and width in pixels: 24 tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return floating.save_chat(tmp_path_factory.mktemp("floating"))


@pytest.mark.parametrize("size", [SIZE, (16, 24), (31, 17), (300, 90)])
def test_tokens_are_those_of_the_reference(llm, size):
    """The processor writes texts around an image's tokens that no template does."""
    name = "transformers.models.nemotron_h_omni.processing_nemotron_h_omni"
    processor = pytest.importorskip(name).NemotronH_Omni_Reasoning_V3Processor
    own = SimpleNamespace(
        image_processor=SimpleNamespace(downsample_ratio=0.5),
        image_token=floating.TEXTS[0],
        image_start_token=floating.TEXTS[1],
        image_end_token=floating.TEXTS[2],
    )
    grids = torch.tensor([floating.prepared(*size).grid[1:]])
    wanted = processor.replace_image_token(own, {"image_grid_hw": grids}, 0)
    output = chat(llm, "look:", image(size), "!")
    shown = llm.get_tokenizer().decode(output.prompt_token_ids)
    assert f"look:\n{wanted}\n!" in shown or f"look:{wanted}!" in shown
    assert output.cache_report.image_tokens == wanted.count(floating.TEXTS[0])


def test_an_image_is_the_same_in_a_chat_and_in_a_plain_prompt(llm):
    wanted = chat(llm, "see", image(SIZE), "now")
    text = llm.get_tokenizer().decode(wanted.prompt_token_ids)
    start, _, rest = text.partition(floating.TEXTS[1])
    prompt = start + floating.TEXTS[0] + rest.partition(floating.TEXTS[2])[2]
    data = {"multi_modal_data": {"image": encoded(picture(*SIZE))}}
    (output,) = llm.generate({"prompt": prompt, **data}, PARAMS, use_tqdm=False)
    assert output.prompt_token_ids == wanted.prompt_token_ids
    assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert output.cache_report.images_reused == 1, "the same pixels, as a file"


def test_a_hit_changes_no_answer_wherever_it_ends(llm, cold):
    """Texts before an image move it over the boundaries of pages, where answers resume."""
    reused = set()
    for length in range(0, 64, 7):
        before = "a" * length
        salt = {"cache_salt": f"at {length}"}
        for seed in (1, 2):
            parts = before, image(SIZE, seed), "b" * 70
            assert chat(llm, *parts, **salt).outputs[0].token_ids == answer_of(cold, *parts)
        for after in ("b" * 70 + "c", "b" * 40 + "d" * 40, "e" * 30):
            again = chat(llm, before, image(SIZE, 1), after, **salt)
            wanted = answer_of(cold, before, image(SIZE, 1), after)
            assert again.outputs[0].token_ids == wanted
            reused.add((again.cache_report.images_reused, again.num_cached_tokens))
    assert len(reused) > 5, "it resumed at many places"
    assert {images for images, _ in reused} == {0, 1}


def test_another_image_another_shape_and_another_order_change_the_answer(cold):
    one, other = image(SIZE, 1), image((16, 24), 2)
    shown = [[one], [image(SIZE, 3)], [image((48, 32), 1)], [one, other], [other, one]]
    options = {"temperature": 0, "max_tokens": 1, "logprobs": 1}
    found = set()
    for each in shown:
        content = [{"type": "text", "text": "a"}, *each]
        messages = [{"role": "user", "content": content}]
        (output,) = cold.chat(messages, SamplingParams(**options), use_tqdm=False)
        (first,) = output.outputs[0].logprobs
        found.add(round(max(token.logprob for token in first.values()), 6))
    assert len(found) == len(shown)


def test_low_detail_and_own_limits_make_fewer_tokens(llm, folder):
    assert chat(llm, "a", image((300, 90))).cache_report.image_tokens == 18
    with LLM(folder, mm_processor_kwargs={"max_pixels": 40 * 16}, **OPTIONS) as small:
        assert chat(small, "a", image((300, 90))).cache_report.image_tokens <= 10
    low = {"type": "image", "image": picture(300, 90), "detail": "low"}
    assert chat(llm, "a", low).cache_report.image_tokens <= 256


def video(shown, fps=2):
    return {"type": "video", "video": {"frames": list(shown), "fps": fps}}


def test_a_video_is_pairs_of_frames_with_their_times(llm, cold):
    shown = floating.frames(6)
    output = chat(llm, "see", video(shown[:5]), "now")
    text = llm.get_tokenizer().decode(output.prompt_token_ids)
    mark, start, end = floating.TEXTS
    tokens = start + mark * 6 + end
    wanted = (
        f"Frame 1 sampled at 0.00 seconds and frame 2 sampled at 0.50 seconds: {tokens}\n"
        f"Frame 3 sampled at 1.00 seconds and frame 4 sampled at 1.50 seconds: {tokens}\n"
        f"Frame 5 sampled at 2.00 seconds: {tokens}"
    )
    assert wanted in text
    assert output.cache_report.image_tokens == 3 * 6
    longer = chat(llm, "see", video(shown), "now")
    assert longer.cache_report.images_reused
    turned = chat(llm, "see", video(shown[4::-1]), "now")
    assert turned.cache_report.images_reused == 0
    for parts, found in (((shown[:5],), output), ((shown,), longer), ((shown[4::-1],), turned)):
        assert found.outputs[0].token_ids == answer_of(cold, "see", video(*parts), "now")
    assert output.outputs[0].token_ids != turned.outputs[0].token_ids


def test_hits_beside_images_and_videos_equal_cold_runs(llm, cold):
    """A still image and a pair of frames have the same token."""
    shown = floating.frames(4)
    for parts in (
        (image(SIZE), "then", video(shown)),
        (video(shown), "then", image(SIZE)),
        (image(SIZE), "then", video(shown), "and", image(SIZE, 1), video(shown[2:])),
    ):
        for last in ("a question", "another one"):
            found = chat(llm, *parts, last)
            assert found.outputs[0].token_ids == answer_of(cold, *parts, last)
        assert found.cache_report.images_reused == len(found.cache_report.images)


def test_videos_that_are_not_taken_are_refused_by_name(llm, folder, tmp_path):
    shown = video(floating.frames(2))
    prompt = {"prompt": floating.TEXTS[0], "multi_modal_data": {"video": shown["video"]}}
    with pytest.raises(
        InvalidRequestError, match="a plain prompt has no place for a video of this"
    ):
        llm.generate(prompt, PARAMS)
    message = r"videos_kwargs.max_pixels=4096: frames of this model's videos have one size"
    with pytest.raises(InvalidRequestError, match=message):
        chat(llm, shown, mm_processor_kwargs={"videos_kwargs": {"max_pixels": 4096}})
    shutil.copytree(folder, tmp_path / "pruned")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "pruned/config.json").write_text(json.dumps({**config, "video_pruning_rate": 0.5}))
    with (
        LLM(tmp_path / "pruned", **OPTIONS) as pruned,
        pytest.raises(InvalidRequestError, match="1 video: this model is served without videos"),
    ):
        chat(pruned, shown)


def test_a_checkpoint_without_a_processor_of_its_own_is_refused(tmp_path):
    folder = floating.save_chat(tmp_path)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(UnsupportedModelError, match="needs an image processor of its own"):
        LLM(folder, **OPTIONS)
    with LLM(folder, language_model_only=True, **OPTIONS) as llm:
        assert chat(llm, "text")
