"""Prompts with images through the engine: a hit never changes an answer, whatever it resumes in."""

from __future__ import annotations

import pytest
from PIL import Image

from milepost import SamplingParams
from milepost.errors import InvalidRequestError
from milepost.runner.pictures import EncodedPictures
from milepost.runner.recording import read_records
from milepost.scheduler.plans import StepPlan
from tests.pictured import SETTINGS
from tests.pictured_prompts import GREEDY, answer, asked, image, open_llm, save_folder


def test_another_image_changes_the_answer(cold):
    """Else nothing below would show anything."""
    answers = {tuple(answer(cold, asked(20, image(8, 8, seed), 30))[0]) for seed in range(3)}
    answers |= {tuple(answer(cold, asked(20, image(4, 16), 30))[0])}
    assert len(answers) == 4


@pytest.mark.parametrize("before", [0, 1, 38, 61, 62, 63, 64, 100])
def test_the_same_image_hits_and_another_does_not(llm, cold, before):
    one, other = image(8, 8, 1), image(8, 8, 2)
    answer(llm, asked(before, one, 40))
    for last in ([5] * 30, [6] * 30):
        ids, report = answer(llm, asked(before, one, last))
        assert ids == answer(cold, asked(before, one, last))[0]
        assert report.images_reused == 1
        assert report.image_tokens_reused == 64
    ids, report = answer(llm, asked(before, other, [5] * 30))
    assert ids == answer(cold, asked(before, other, [5] * 30))[0]
    assert report.image_tokens_reused == 0
    assert report.reused <= before + 1


def test_equal_pixels_of_another_shape_and_swapped_images_do_not_hit(llm, cold):
    """Rows of patches of a grey image are the same bytes whichever way it lies."""
    unit = SETTINGS.unit
    lying, standing = (Image.new("RGB", (unit * w, unit * h), "grey") for h, w in ((4, 6), (6, 4)))
    one, other = image(8, 8, 1), image(8, 8, 2)
    for first, second in ((lying, standing), (one, other)):
        turned = answer(cold, asked(30, second, first, [5] * 20))[0]
        assert answer(cold, asked(30, first, second, [5] * 20))[0] != turned
        for shown in ((first, second), (second, first)):
            ids, report = answer(llm, asked(30, *shown, [5] * 20))
            assert ids == answer(cold, asked(30, *shown, [5] * 20))[0]
            assert (report.images_reused, report.image_tokens_reused) == (0, 0)


def test_a_resume_anywhere_around_and_inside_an_image_equals_a_cold_run(llm, cold):
    """Marks would move out of the image: states there come from preemptions and chunks' ends, here
    from prompts that are shared by a loan of their beginning."""
    before, one, other = 30, image(8, 12, 1), image(6, 4, 2)
    whole = asked(before, one, 10, other, 50)
    expected = answer(cold, whole)[0]
    cache = llm.llm_engine.scheduler.cache
    found = set()
    for position in range(before - 2, before + 96 + 10 + 24 + 8, 3):
        place = cache._running._place
        cache._running._place = lambda _facts, start, end, p=position: (
            {p: "mark"} if start < p <= end else {}
        )
        try:
            answer(llm, {**whole, "cache_salt": f"at {position}"})
        finally:
            cache._running._place = place
        ids, report = answer(llm, {**whole, "cache_salt": f"at {position}"})
        assert ids == expected
        found.add(report.state_length)
    assert len(found) > 30, "it resumed at many places"


def test_each_turn_of_an_agent_encodes_one_image(llm, cold):
    parts, num_turns = [90], 6
    for turn in range(num_turns):
        parts += [image(8, 8, turn), [turn + 1] * 20]
        ids, report = answer(llm, asked(*parts))
        assert ids == answer(cold, asked(*parts))[0]
        assert report.images_reused == turn
        parts += [ids, [7] * 15]
    stats = llm.llm_engine.scheduler.stats
    assert stats.num_encoded == num_turns


def test_encoder_outputs_are_bounded_and_encoded_again_where_they_are_needed(folder, cold):
    images = [image(8, 8, seed) for seed in range(3)]
    with open_llm(folder, encoder_cache_size=128, enable_prefix_caching=False) as llm:
        for each in (*images, *images):
            assert answer(llm, asked(10, each, 9))[0] == answer(cold, asked(10, each, 9))[0]
            executor = llm.llm_engine.runner.executor
            assert len(executor.pictures._embeddings) <= 2
        assert llm.llm_engine.scheduler.stats.num_encoded == 6
        answer(llm, asked(12, images[2], 9))
        assert llm.llm_engine.scheduler.stats.num_encoder_hits == 1
        assert not llm.llm_engine._pixels._holders, "no pixels of requests that are over"
    with (
        open_llm(folder, encoder_cache_size=100) as small,
        pytest.raises(InvalidRequestError, match="images of 128 tokens side by side"),
    ):
        answer(small, asked(10, *images[:2], 9))


def test_sixty_four_images_at_once_fit_the_memory_for_a_few(folder, cold, monkeypatch):
    kept, follow = [], EncodedPictures.follow

    def noted(self, plan):
        follow(self, plan)
        kept.append(sum(map(len, self._embeddings.values())))
        assert len(self._under_way) <= 1

    monkeypatch.setattr(EncodedPictures, "follow", noted)
    prompts = [asked(5, image(4, 6, seed), [9] * (1 + seed % 7)) for seed in range(64)]
    options = {"encoder_cache_size": 72, "max_num_seqs": 64, "num_pages": 200, "num_slots": 140}
    with open_llm(folder, **options) as llm:
        found = llm.generate(prompts, GREEDY, use_tqdm=False)
        stats = llm.llm_engine.scheduler.stats
        assert (stats.num_encoded, stats.num_preemptions) == (64, 0)
        assert not llm.llm_engine._pixels._holders
    assert 48 <= max(kept) <= 72, "tokens of three images"
    for prompt, output in zip(prompts[::8], found[::8], strict=True):
        assert output.outputs[0].token_ids == answer(cold, prompt)[0]


def test_what_is_no_prompt_with_images_is_refused(llm, folder):
    one = image(8, 8)
    for prompt, message in (
        ({"prompt_token_ids": [1, 2], "multi_modal_data": {"image": one}}, "a place for 0 images"),
        ({**asked(3, one, 4), "multi_modal_data": {"audio": one}}, "multi_modal_data with"),
        ({**asked(3, 4), "multi_modal_data": {"video": one}}, "a video of type Image: use a URL"),
        ({**asked(3, 4), "multi_modal_data": {"video": {"frames": one}}}, "no list of 1 to 768"),
        ({**asked(3, one, 4), "multi_modal_data": {"image": "ftp://a/b"}}, "use a data: URL"),
        ({**asked(3, one, 4), "multi_modal_data": {"image": b"GIF"}}, "supported are PNG"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            llm.generate(prompt, GREEDY)
    with (
        open_llm(folder, limit_mm_per_prompt={"image": 1}) as few,
        pytest.raises(InvalidRequestError, match="2 images: use 1 or fewer"),
    ):
        few.generate(asked(3, one, one, 4), GREEDY)
    with (
        open_llm(folder, language_model_only=True) as text,
        pytest.raises(InvalidRequestError, match="1 image: this model is served for text only"),
    ):
        text.generate(asked(3, one, 4), GREEDY)


def test_a_restart_with_a_cache_on_disk_hits_the_same_image_alone(folder, cold, tmp_path):
    one, other = image(8, 8, 1), image(8, 8, 2)
    options = {"cache_dir": str(tmp_path), "cache_host_gib": 0.05}
    with open_llm(folder, **options) as first:
        answer(first, asked(30, one, 150))
    with open_llm(folder, **options) as second:
        ids, report = answer(second, asked(30, other, 150))
        assert ids == answer(cold, asked(30, other, 150))[0]
        assert report.image_tokens_reused == 0
        ids, report = answer(second, asked(30, one, 150, [5] * 9))
        assert ids == answer(cold, asked(30, one, 150, [5] * 9))[0]
        assert (report.images_reused, sum(report.loaded.values())) == (1, report.reused)
        assert second.llm_engine.scheduler.stats.num_encoded == 1, "the other's"


def test_requests_that_are_preempted_go_on_with_the_same_positions(folder, cold):
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    prompts = [asked(20 + k, image(8, 8, k), 40, image(2, 32, k), 9) for k in range(3)]
    with open_llm(folder, num_pages=12, num_slots=6) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
        assert llm.llm_engine.scheduler.stats.num_preemptions
    for prompt, output in zip(prompts, found, strict=True):
        assert output.outputs[0].token_ids == answer(cold, prompt, params)[0]


def test_drafts_behind_images_change_no_answer(folder, cold):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    parts = (30, image(8, 8, 1), [5, 6, 7] * 20, image(4, 16, 2), [5, 6, 7] * 3)
    drafting = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    with open_llm(folder, speculative_config=drafting) as llm:
        for _ in range(2):
            ids, _ = answer(llm, asked(*parts), params)
            assert ids == answer(cold, asked(*parts), params)[0]
        assert llm.llm_engine.scheduler.stats.num_drafts


@pytest.mark.parametrize("options", [{}, {"num_pages": 11, "num_slots": 7}], ids=["", "preempted"])
def test_the_models_own_drafts_change_no_answer(options, tmp_path):
    """Of prompts that share images and begin, end and resume at them; with room for all, and where
    they preempt each other."""
    save_folder(tmp_path, has_head=True)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    one, other = image(8, 8, 1), image(4, 16, 2)
    prompts = [
        asked(one, [5, 6, 7] * 9),
        asked(30, one, [5, 6, 7] * 20, other, 3),
        asked(30, one, [5, 6, 7] * 20, other, [8] * 30, one, 1),
        asked(61, other, 2),
    ]
    drafting = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    with (
        open_llm(tmp_path, enable_prefix_caching=False) as cold,
        open_llm(tmp_path, speculative_config=drafting, **options) as llm,
    ):
        expected = [answer(cold, prompt, params)[0] for prompt in prompts]
        for _ in range(2):
            found = llm.generate(prompts, params, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in found] == expected
        stats = llm.llm_engine.scheduler.stats
        assert stats.num_draft_tokens
        assert bool(stats.num_preemptions) == bool(options)
        for prompt, tokens in zip(prompts, expected, strict=True):
            ids, report = answer(llm, prompt, params)
            assert ids == tokens
            assert options or report.images_reused


def test_large_images_are_encoded_over_several_steps_while_others_are_answered(
    folder, cold, tmp_path
):
    """Nothing changes but when: the answers are those of each prompt alone, and steps with decodes
    encode a part of an image each."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (60, 8, 8, 9)]
    one, other = image(8, 8, 1), image(7, 9, 2)
    prompts = [asked(40), asked(10, one, 90), asked(200, other, 3, one, 9), asked(10, one, 5)]
    plans = tmp_path / "plans"
    with open_llm(folder, record_plans=str(plans)) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
        assert llm.llm_engine.scheduler.stats.num_encoded == 2
        assert not llm.llm_engine.runner.executor.pictures._under_way
    for prompt, own, output in zip(prompts, params, found, strict=True):
        assert output.outputs[0].token_ids == answer(cold, prompt, own)[0]
    steps = [record for record in read_records(plans) if isinstance(record, StepPlan)]
    parts = [step for step in steps if step.encode_part is not None]
    assert len(parts) >= 3, "as many as the tower has layers"
    assert all(step.num_decodes for step in parts if not step.encode_part.is_last)
