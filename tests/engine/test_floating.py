"""Images of Nemotron's multimodal models through the engine: the tokens of transformers' processor,
and hits that change no answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from milepost import LLM, SamplingParams
from milepost.errors import InvalidRequestError, UnsupportedModelError
from tests import floating
from tests.engine import image_chats
from tests.engine.image_chats import PARAMS, answer_of, chat, image
from tests.images.pictures import encoded, picture

OPTIONS = {**image_chats.OPTIONS, "num_slots": 24}
SIZE = 40, 40
"""Height and width in pixels: 24 tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return floating.save_chat(tmp_path_factory.mktemp("floating"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def cold(folder):
    with LLM(folder, enable_prefix_caching=False, **OPTIONS) as llm:
        yield llm


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


def test_videos_are_refused_by_name(llm):
    video = {
        "type": "video",
        "video": {"frames": [picture(16, 24, seed) for seed in (1, 2)], "fps": 1},
    }
    with pytest.raises(InvalidRequestError, match="1 video: this model is served without videos"):
        chat(llm, video)


def test_a_checkpoint_without_a_processor_of_its_own_is_refused(tmp_path):
    folder = floating.save_chat(tmp_path)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(UnsupportedModelError, match="needs an image processor of its own"):
        LLM(folder, **OPTIONS)
    with LLM(folder, language_model_only=True, **OPTIONS) as llm:
        assert chat(llm, "text")
