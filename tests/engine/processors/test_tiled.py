"""Images in tiles through the engine: the tokens of transformers' processor, and hits that change
no answer."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from milepost import LLM
from milepost.errors import InvalidRequestError
from tests import tiled
from tests.engine.processors import image_chats
from tests.engine.processors.image_chats import PARAMS, answer_of, chat, image
from tests.images.pictures import picture

OPTIONS = {**image_chats.OPTIONS, "num_slots": 4}
SMALL, LARGE = (16, 32), (64, 96)
"""Height and width in pixels: one tile, and two rows of three with a thumbnail."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiled.save_chat(tmp_path_factory.mktemp("tiled"))


def expected_text(rows, columns, num_each, num_whole):
    """The text of an image, as transformers makes it."""
    own = SimpleNamespace(
        image_token=tiled.TEXTS[0],
        image_start_token=tiled.TEXTS[1],
        image_end_token=tiled.TEXTS[2],
        image_thumbnail_token=tiled.TEXTS[3],
    )
    build = Lfm2VlProcessor._build_image_tokens
    return build(own, rows, columns, num_each, num_whole, True, True)


@pytest.mark.parametrize(
    ("size", "shape"), [(SMALL, (1, 1, 16, 8)), (LARGE, (2, 3, 16, 12)), ((96, 32), (3, 1, 16, 12))]
)
def test_tokens_are_those_of_the_reference(llm, size, shape):
    output = chat(llm, "look:", image(size), "!")
    shown = llm.get_tokenizer().decode(output.prompt_token_ids)
    assert expected_text(*shape) in shown
    assert output.cache_report.image_tokens == shown.count(tiled.TEXTS[0])


def test_an_image_is_the_same_in_a_chat_and_in_plain_prompts(llm):
    wanted = chat(llm, "see", image(LARGE), "now")
    tokenizer = llm.get_tokenizer()
    content = f"see\n{tiled.TEXTS[0]}\nnow"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    data = {"multi_modal_data": {"image": picture(*LARGE)}}
    ids = tokenizer.encode(text, add_special_tokens=False)
    for prompt in ({"prompt": text}, {"prompt_token_ids": ids}):
        (output,) = llm.generate({**prompt, **data}, PARAMS, use_tqdm=False)
        assert output.prompt_token_ids == wanted.prompt_token_ids
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
    with pytest.raises(InvalidRequestError, match=r"a place for 2 of token .*, and 1 came"):
        llm.generate({"prompt_token_ids": [*ids, *ids], **data}, PARAMS, use_tqdm=False)


def test_a_hit_changes_no_answer_wherever_it_ends(llm, cold):
    """Texts before an image move it over the boundaries of pages, where answers resume."""
    reused = set()
    for length in range(0, 64, 7):
        before = "a" * length
        for seed in (1, 2):
            parts = before, image(LARGE, seed), "b" * 40
            salt = {"cache_salt": f"at {length}"}
            assert chat(llm, *parts, **salt).outputs[0].token_ids == answer_of(cold, *parts)
        again = chat(llm, before, image(LARGE, 1), "c" * 40, **salt)
        wanted = answer_of(cold, before, image(LARGE, 1), "c" * 40)
        assert again.outputs[0].token_ids == wanted
        reused.add((again.cache_report.images_reused, again.cache_report.image_tokens_reused))
    assert len(reused) > 3, "it resumed at many places"
    assert max(reused)[0] >= 6


def test_another_image_another_shape_and_another_order_change_the_answer(cold):
    one, other = image(LARGE, 1), image(SMALL, 2)
    shown = [[one], [image(LARGE, 3)], [image((96, 64), 1)], [one, other], [other, one]]
    answers = {tuple(answer_of(cold, "a", *each, "b")) for each in shown}
    assert len(answers) == len(shown)


def test_an_image_counts_once_however_many_tiles_it_has(folder):
    with LLM(folder, limit_mm_per_prompt={"image": 1}, **OPTIONS) as llm:
        output = chat(llm, "a", image(LARGE))
        assert len(output.cache_report.images) == 7
        with pytest.raises(InvalidRequestError, match="2 images: use 1 or fewer"):
            chat(llm, image(SMALL), image(SMALL, 1))


def test_low_detail_and_own_limits_make_fewer_tokens(llm, folder):
    low = {"type": "image", "image": picture(*LARGE), "detail": "low"}
    assert chat(llm, "a", low).cache_report.image_tokens <= 16
    assert np.prod(LARGE) > 2 * 16 * 64
    with LLM(folder, mm_processor_kwargs={"max_pixels": 1024 * 64}, **OPTIONS) as whole:
        report = chat(whole, "a", image(LARGE)).cache_report
        assert (len(report.images), report.image_tokens) == (1, 96)


def test_without_a_tokenizer_images_are_refused(folder):
    prompt = {"prompt_token_ids": [1], "multi_modal_data": {"image": picture(*SMALL)}}
    with (
        LLM(folder, skip_tokenizer_init=True, **OPTIONS) as llm,
        pytest.raises(InvalidRequestError, match="an image of this model needs a tokenizer"),
    ):
        llm.generate(prompt, PARAMS)
