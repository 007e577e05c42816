"""A picture in the size that a request asks for: another size is another picture, whose hits equal
cold runs, and one that resizes to the same pixels is the same picture."""

from __future__ import annotations

import asyncio

import pytest

from milepost import LLM, AsyncLLM, SamplingParams
from milepost.errors import InvalidRequestError
from tests import pictured_chat
from tests.pictured import SETTINGS
from tests.pictured_chat import animation
from tests.pictured_prompts import answer, asked, image

TOKEN = SETTINGS.unit**2
SMALL, LARGE = {"max_pixels": 16 * TOKEN}, {"size": {"longest_edge": 64 * TOKEN}}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SHOWN = image(8, 8, 1)


def sized(kwargs, last, before=38):
    return asked(before, SHOWN, last, mm_processor_kwargs=kwargs)


def test_hits_of_two_sizes_of_a_picture_equal_cold_runs(llm, cold):
    found = {}
    for name, kwargs, count in (("small", SMALL, 16), ("large", LARGE, 64)):
        answer(llm, sized(kwargs, 40))
        for last in ([5] * 30, [6] * 30):
            ids, report = answer(llm, sized(kwargs, last))
            assert ids == answer(cold, sized(kwargs, last))[0]
            assert (report.images_reused, report.image_tokens_reused) == (1, count)
        found[name] = ids
    assert found["small"] != found["large"]
    assert llm.llm_engine.scheduler.stats.num_encoded == 2


def test_a_limit_above_its_own_size_leaves_a_picture_as_it_is(llm):
    answer(llm, asked(38, SHOWN, 40))
    for kwargs in (LARGE, {"images_kwargs": LARGE}, {"max_pixels": SETTINGS.max_pixels}, {}):
        assert answer(llm, sized(kwargs, 40))[1].images_reused == 1
    small = asked(38, image(4, 4), 40)
    sizes = [
        len(
            llm.generate(small, GREEDY, use_tqdm=False, mm_processor_kwargs=kwargs)[
                0
            ].prompt_token_ids
        )
        for kwargs in ({}, {"min_pixels": 36 * TOKEN})
    ]
    assert sizes[1] - sizes[0] == 36 - 16


def test_sizes_of_a_call_are_for_prompts_that_have_none(llm):
    prompts = [asked(9, SHOWN, 9), sized(LARGE, 9, 9), [1, 2, 3]]
    found = llm.generate(prompts, GREEDY, use_tqdm=False, mm_processor_kwargs=SMALL)
    assert [len(each.prompt_token_ids) for each in found] == [9 + 18 + 9, 9 + 66 + 9, 3]
    with pytest.raises(InvalidRequestError, match="prompt 1: mm_processor_kwargs: unknown field"):
        llm.generate([[1], {"prompt_token_ids": [1], "mm_processor_kwargs": {"a": 1}}], GREEDY)
    message = f"max_pixels={SETTINGS.max_pixels + 1}: the limit for images is {SETTINGS.max_pixels}"
    with pytest.raises(InvalidRequestError, match=message):
        answer(llm, sized({"max_pixels": SETTINGS.max_pixels + 1}, 9))


def test_conversations_and_programs_with_an_event_loop(tmp_path):
    folder = pictured_chat.save(tmp_path / "chat")
    options = {"num_pages": 100, "num_slots": 40, "dtype": "float64"}
    frames = [image(4, 6, seed) for seed in range(12)]
    film = {"type": "video_url", "video_url": animation(frames, 250)}
    shown = {"type": "image", "image": SHOWN}

    def told(part):
        return [{"role": "user", "content": [{"type": "text", "text": "see "}, part]}]

    def pictures(found):
        return [end - first for first, end in found.cache_report.images]

    async def sent(part, kwargs):
        async with AsyncLLM(folder, **options) as llm:
            async for output in llm.chat(told(part), GREEDY, mm_processor_kwargs=kwargs):
                found = output
            text = found.prompt_token_ids
            wrong = llm.generate({"prompt": "a", "mm_processor_kwargs": {"a": 1}}, GREEDY)
            with pytest.raises(InvalidRequestError, match="unknown field 'a'"):
                await anext(wrong)
            return text, found.outputs[0].token_ids

    with LLM(folder, **options) as llm:
        wanted = (
            (shown, SMALL, [16]),
            (shown, None, [64]),
            (film, None, [24] * 3),
            (film, {"fps": 4}, [24] * 6),
            (film, {"num_frames": 4}, [24] * 2),
            (film, {"videos_kwargs": {"max_pixels": 6 * 6 * TOKEN}}, [6] * 3),
        )
        for part, kwargs, tokens in wanted:
            (found,) = llm.chat(told(part), GREEDY, use_tqdm=False, mm_processor_kwargs=kwargs)
            assert pictures(found) == tokens
        (found,) = llm.chat(told(film), GREEDY, use_tqdm=False, mm_processor_kwargs={"fps": 4})
        assert found.cache_report.images_reused == 6
    assert asyncio.run(sent(film, {"fps": 4})) == (
        found.prompt_token_ids,
        found.outputs[0].token_ids,
    )
