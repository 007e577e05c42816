"""Steps with pictures: as planned, on the reference kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.images.pictures import pixels
from tests.mtp import add_head
from tests.numbers import relative_error
from tests.pictured import IMAGE, SETTINGS, Pictured, expected_logits, image, prompt, save
from tests.runner.pictured import give, open_runner, part, run
from torch import Tensor

from milepost.images.patches import from_frames
from milepost.models import Decoder, LoadOptions, load_model
from milepost.pictures import overlapping
from milepost.runner.pictures import EncodedPictures, PicturePixels
from milepost.runner.recording import Record
from milepost.runner.replay import digest, replay
from milepost.sampling_params import SamplingParams
from milepost.scheduler.plans import EncodePart, SamplingPlan, StepPlan, StepSampling

GIVEN = prompt(50, image(5, 7, 1), 20, image(6, 4, 2), 30)
PAIRS = (1, 2), (3, 3)
"""Seeds of the frames of two parts of a video."""
LENGTH = len(GIVEN.token_ids)
EDGES = [0, 64, 110, 128, LENGTH - 1, LENGTH]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictured")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Tensor:
    return expected_logits(save("qwen3_5", folder), GIVEN)


@pytest.fixture
def model(folder: Path, expected: Tensor) -> Decoder:
    return load_model(folder, LoadOptions(has_tower=True))[0]


def test_steps_answer_as_transformers_does(model: Decoder, expected: Tensor) -> None:
    """In chunks that cut a picture, and a decode behind them all."""
    runner = open_runner(model)
    give(runner, GIVEN)
    logits = run(runner, GIVEN, EDGES)
    assert relative_error(logits, expected[[end - 1 for end in EDGES[1:]]]) < 1e-4


def test_sequences_with_and_without_pictures_share_a_step(model: Decoder, expected: Tensor) -> None:
    runner = open_runner(model)
    give(runner, GIVEN)
    run(runner, GIVEN, EDGES[:-1], slot=1)
    run(runner, GIVEN, [0, 64], slot=2)
    text = prompt(40, seed=3)
    alone = run(open_runner(model), text, [0, 40])
    sequences = (
        part(GIVEN, LENGTH - 1, LENGTH, 1),
        part(GIVEN, 64, LENGTH, 2),
        part(text, 0, 40, 3),
    )
    logits = runner.launch(StepPlan(sequences=sequences)).logits
    assert relative_error(logits[:2], expected[[-1, -1]]) < 1e-4
    assert relative_error(logits[2:], alone) < 1e-5


def test_embeddings_are_kept_until_a_plan_drops_them(model: Decoder) -> None:
    runner, (first, second) = open_runner(model), GIVEN.pictures
    give(runner, GIVEN)
    pictures = runner.executor.pictures
    assert pictures is not None
    assert pictures.num_bytes == 0
    runner.copy(StepPlan(sequences=(), encodes=(first, second)))
    assert pictures.num_bytes == (first.num_tokens + second.num_tokens) * 48 * 4
    plan = StepPlan(sequences=(), drops=(first.identity,))
    assert plan.only_copies
    runner.copy(plan)
    assert pictures.num_bytes == second.num_tokens * 48 * 4
    with pytest.raises(AssertionError, match="I2"):
        runner.launch(StepPlan(sequences=(part(GIVEN, 0, 64, 1),)))
    with pytest.raises(AssertionError, match="I1"):
        runner.copy(StepPlan(sequences=(), encodes=(first,)))


def test_pixels_that_are_never_encoded_are_dropped(model: Decoder) -> None:
    runner, (first, _) = open_runner(model), GIVEN.pictures
    give(runner, GIVEN)
    runner.copy(StepPlan(sequences=(), drops=(first.identity,)))
    with pytest.raises(AssertionError, match="I1"):
        runner.copy(StepPlan(sequences=(), encodes=(first,)))


def test_the_same_picture_is_encoded_once(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []
    forward = type(model.tower).forward
    monkeypatch.setattr(
        type(model.tower), "forward", lambda *how, **own: encoded.append(1) or forward(*how, **own)
    )
    twice = prompt(9, image(3, 4, 7), 5, image(3, 4, 7), 5)
    runner = open_runner(model)
    for _ in range(2):
        give(runner, twice)
        runner.copy(StepPlan(sequences=(), encodes=tuple(twice.pictures)))
    assert len(encoded) == 1


def test_an_embedding_does_not_depend_on_what_is_encoded_with_it(model: Decoder) -> None:
    alone, together = open_runner(model), open_runner(model)
    for runner in (alone, together):
        give(runner, GIVEN)
    whole = GIVEN.pictures
    together.copy(StepPlan(sequences=(), encodes=tuple(whole)))
    for picture in whole:
        alone.copy(StepPlan(sequences=(), encodes=(picture,)))
    logits = [run(runner, GIVEN, [0, LENGTH]) for runner in (alone, together)]
    assert torch.equal(*logits)


def test_small_pictures_of_a_step_are_one_run_of_the_tower(model: Decoder) -> None:
    """With the bits that each has alone, whatever it stands beside, videos' frames too."""
    frames = [from_frames([pixels(24, 32, seed) for seed in pair], SETTINGS) for pair in PAIRS]
    given = prompt(3, image(2, 3, 1), 2, frames[0], image(4, 1, 2), frames[1], 4)
    alone, together = (EncodedPictures(model.tower, SETTINGS, joins=True) for _ in range(2))
    runs = []
    for pictures in (alone, together):
        for each in given.images:
            pictures.take(each.identity, PicturePixels(rows=each.rows, grid=each.grid))
    begin = model.tower.begin
    model.tower.begin = lambda *how, **own: runs.append(how) or begin(*how, **own)
    together.follow(StepPlan(sequences=(), encodes=tuple(given.pictures)))
    assert len(runs) == 1
    for each in given.pictures:
        alone.follow(StepPlan(sequences=(), encodes=(each,)))
    assert len(runs) == 1 + len(given.images)
    for each in given.pictures:
        assert torch.equal(*(own._embeddings[each.identity] for own in (alone, together)))


def test_a_picture_that_is_encoded_in_parts_is_the_same(model: Decoder) -> None:
    """Also if a step was taken back, and it is begun again or was encoded meanwhile."""
    whole, parts = open_runner(model), open_runner(model)
    give(whole, GIVEN)
    whole.copy(StepPlan(sequences=(), encodes=tuple(GIVEN.pictures)))

    def run_part(number: int, first: int, end: int) -> None:
        own = EncodePart(picture=GIVEN.pictures[number], first=first, end=end, num_parts=5)
        parts.copy(StepPlan(sequences=(), encode_part=own))

    give(parts, GIVEN)
    run_part(0, 0, 1)
    give(parts, GIVEN)
    for first, end in ((0, 1), (1, 2), (2, 5), (0, 1), (1, 5)):
        run_part(0, first, end)
    run_part(1, 0, 2)
    parts.copy(StepPlan(sequences=(), drops=(GIVEN.pictures[1].identity,)))
    give(parts, GIVEN)
    parts.copy(StepPlan(sequences=(), encodes=GIVEN.pictures[1:]))
    logits = [run(runner, GIVEN, [0, LENGTH]) for runner in (whole, parts)]
    assert torch.equal(*logits)


class Kept:
    """Records in memory."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        self.records.append(record)


def test_records_are_all_that_another_runner_needs(model: Decoder) -> None:
    log = Kept()
    runner, other = open_runner(model, logs=[log]), open_runner(model)
    give(runner, GIVEN)
    run(runner, GIVEN, EDGES)
    assert list(replay(log.records, other)) == []
    assert digest(other.pools) == digest(runner.pools)


def test_a_picture_of_one_token_is_as_its_embedding_were_a_words(tmp_path: Path) -> None:
    """Such a picture has the position of text. The head for drafts takes it in likewise."""
    given = prompt(20, image(1, 1), 20)
    save("qwen3_5", tmp_path)
    add_head(tmp_path)
    drafts = []
    for is_word in (False, True):
        model = load_model(tmp_path, LoadOptions(has_tower=True, head="mtp"))[0]
        runner = open_runner(model)
        give(runner, given)
        runner.copy(StepPlan(sequences=(), encodes=tuple(given.pictures)))
        if is_word:
            (embedding,) = runner.executor.pictures._embeddings.values()
            model.embedding.data[IMAGE] = embedding[0]
        own = Pictured(token_ids=given.token_ids, images=[], offsets=[]) if is_word else given
        edges = [0, 30, len(given.token_ids)]
        drafts.append((run(runner, own, edges), head_rows(runner, model)))
    for pictured, word in zip(*drafts, strict=True):
        assert torch.equal(pictured, word)


def test_drafts_after_a_picture_have_the_positions_of_their_tokens(tmp_path: Path) -> None:
    """The first pass writes the final KV of the sampled token: the step that computes this token
    writes the same."""
    save("qwen3_5", tmp_path)
    add_head(tmp_path)
    runner = open_runner(load_model(tmp_path, LoadOptions(has_tower=True, head="mtp"))[0])
    give(runner, GIVEN)
    plan = StepPlan(sequences=(part(GIVEN, 0, LENGTH, 1),), encodes=tuple(GIVEN.pictures))
    flight = runner.launch(plan)
    params = SamplingParams(temperature=0)
    row = SamplingPlan(number=1, params=params, seed=0, num_prompt_tokens=LENGTH, index=0)
    runner.sample(flight, StepSampling(rows=(row,), num_drafts=1))
    ((token,),) = runner.collect(flight).result.tokens.values()
    place = 10 + LENGTH // 64, slice(None), LENGTH % 64
    number = max(runner.pools.kv)
    drafted = runner.pools.kv[number][place].clone()
    longer = replace(GIVEN, token_ids=torch.cat((GIVEN.token_ids, torch.tensor([token]))))
    runner.launch(StepPlan(sequences=(part(longer, LENGTH, LENGTH + 1, 1),)))
    assert relative_error(drafted, runner.pools.kv[number][place]) < 1e-5


def head_rows(runner: object, model: Decoder) -> Tensor:
    """What the head's attention layer has written."""
    return runner.pools.kv[len(model.layer_specs) - 1][10].clone()


def test_a_plan_names_the_pictures_of_its_tokens() -> None:
    """The helper does what a planner does: pictures that end where a chunk begins are not in it."""
    first, second = GIVEN.pictures
    assert list(overlapping(GIVEN.pictures, first.end, second.offset)) == []
    assert part(GIVEN, first.end, LENGTH, 1).pictures == (second,)
    whole = part(GIVEN, 0, LENGTH, 1)
    assert whole.shift_after == part(GIVEN, LENGTH - 1, LENGTH, 1).shift == -(35 - 7) - (24 - 6)
