"""Which pictures a step encodes, what it drops, and how far its chunks go."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from milepost.cache import Cache
from milepost.errors import InvalidPromptError
from milepost.pictures import Picture
from milepost.scheduler.budget import Budget
from milepost.scheduler.encoders import SHARE_BESIDE_DECODES, Encoders, TowerCost
from milepost.scheduler.plans import StepPlan
from milepost.scheduler.scheduler import Scheduler
from milepost.scheduler.stats import SchedulerStats
from tests.fakes import FakeRunner, make_request

GRID = 64


def picture(name: str, offset: int, num_tokens: int = 100) -> Picture:
    return Picture(
        identity=name.encode() * 16,
        offset=offset,
        num_tokens=num_tokens,
        grid=(1, 2, 2 * num_tokens),
        num_positions=num_tokens,
    )


def encoders(capacity: int = 1000, max_step_tokens: int = 400) -> Encoders:
    return Encoders(capacity, max_step_tokens, GRID, SchedulerStats())


def names(pictures) -> str:
    return "".join(chr(each.identity[0]) for each in pictures)


def step(made: Encoders, *chunks, has_decodes: bool = False):
    """The ends of the chunks, the pictures that are dropped, and those that are encoded."""
    made.begin(has_decodes=has_decodes)
    ends = [made.reach(*chunk) for chunk in chunks]
    drops, encodes, _ = made.take()
    return ends, "".join(chr(each[0]) for each in drops), names(encodes)


def test_a_chunk_encodes_what_it_reaches_and_nothing_else():
    made, prompt = encoders(), (picture("a", 100), picture("b", 300), picture("c", 500))
    assert step(made, (prompt, 0, 100)) == ([100], "", "")
    assert step(made, (prompt, 100, 301)) == ([301], "", "ab")
    assert step(made, (prompt, 301, 350)) == ([350], "", "")
    assert step(made, (prompt, 400, 500)) == ([500], "", "")


def test_a_step_ends_chunks_at_what_it_has_no_share_for():
    made, prompt = encoders(), tuple(picture(name, 200 * k) for k, name in enumerate("abcdef"))
    assert step(made, (prompt, 0, 1000)) == ([800], "", "abcd")
    made = encoders()
    most = 400 // SHARE_BESIDE_DECODES
    assert step(made, (prompt, 0, 1000), has_decodes=True) == ([200], "", "a"[: most // 100])
    assert step(made, (prompt, 192, 1000), has_decodes=True) == ([400], "", "b")


def test_a_picture_larger_than_a_step_is_encoded_alone_when_nobody_waits():
    made, large, small = encoders(), (picture("a", 10, 900),), (picture("b", 10),)
    assert step(made, (large, 0, 500), (small, 0, 500)) == ([500, 10], "", "a")
    assert step(made, (small, 0, 500)) == ([500], "", "b")


def test_the_first_chunk_always_gets_a_grid_step():
    """However many pictures are in it: a chunk that is not the last ends on the grid."""
    made = encoders(max_step_tokens=8)
    many = tuple(picture(name, 10 * k, 8) for k, name in enumerate("abcdefghij"))
    (end,), _, encoded = step(made, (many, 0, 100))
    assert (end, encoded) == (70, "abcdefg")
    made.begin(has_decodes=False)
    assert made.reach(many, 64, 100) == 100


def test_beside_decodes_each_step_encodes_a_share_and_in_the_end_all_that_a_chunk_reads():
    """Without decodes a chunk would wait for nothing but its own pictures."""
    made = encoders(max_step_tokens=64)
    many = tuple(picture(name, 10 * k, 8) for k, name in enumerate("abcdefghij"))
    ends = [step(made, (many, 0, 100), has_decodes=True)[0][0] for _ in range(5)]
    assert ends == [20, 40, 60, 80, 100]
    made = encoders(max_step_tokens=16)
    ends = [parts(made, (many[:2], 0, 64))[0][0] for _ in range(5)]
    assert ends == [0, 10, 10, 64, 64]


def test_outputs_that_were_not_used_for_longest_are_dropped():
    made = encoders(capacity=250)
    for name in "ab":
        step(made, ((picture(name, 0),), 0, 64))
    assert step(made, ((picture("a", 40),), 0, 64)) == ([64], "", "")
    assert step(made, ((picture("c", 0),), 0, 64)) == ([64], "b", "c")
    assert step(made, ((picture("a", 0),), 0, 64), ((picture("b", 0),), 0, 64)) == (
        [64, 64],
        "c",
        "b",
    )


def test_what_a_step_reads_is_not_dropped_and_nothing_is_dropped_and_encoded_at_once():
    made = encoders(capacity=250)
    chunks = [((picture(name, 0),), 0, 64) for name in "abc"]
    assert step(made, *chunks) == ([64, 64, 0], "", "ab")
    step(made, chunks[1])
    made.begin(has_decodes=False)
    assert made.reach(*chunks[2]) == 64
    assert made.reach(*chunks[0]) == 0, "it was dropped for c"


def test_what_a_step_that_was_cut_short_encoded_is_encoded_again():
    made, chunk = encoders(capacity=250), ((picture("a", 0),), 0, 64)
    made.begin(has_decodes=False)
    made.reach(*chunk)
    made.roll_back(StepPlan(sequences=(), encodes=made.take().encodes))
    assert step(made, chunk) == ([64], "", "a")
    assert step(made, chunk) == ([64], "", "")


def test_pictures_that_could_never_be_read_together_are_refused():
    made = encoders(capacity=150)
    made.check((picture("a", 0), picture("b", 200)))
    with pytest.raises(InvalidPromptError, match="200 tokens side by side"):
        made.check((picture("a", 0), picture("b", 101)))
    with pytest.raises(InvalidPromptError, match="151 tokens side by side"):
        made.check((picture("a", 0, 151),))


def parts(made: Encoders, *chunks, has_decodes: bool = True):
    """The ends of the chunks, the parts of a large picture, and the pictures encoded whole."""
    made.begin(has_decodes=has_decodes)
    ends = [made.reach(*chunk) for chunk in chunks]
    _, encodes, part = made.take()
    own = None
    if part is not None:
        own = names([part.picture]), part.first, part.end, part.num_parts
    return ends, own, names(encodes)


def test_a_picture_that_is_more_than_a_share_is_encoded_over_several_steps():
    """Whoever asked for it, and in the order of those that ask; chunks end before it meanwhile."""
    made, large = encoders(), ((picture("a", 10, 350),), 0, 400)
    small, text = ((picture("b", 70),), 64, 200), ((), 0, 50)
    assert parts(made, large, small, text) == ([10, 70, 50], ("a", 0, 1, 4), "")
    assert parts(made, small, large) == ([70, 10], ("a", 1, 2, 4), "")
    assert parts(made) == ([], ("a", 2, 3, 4), "")
    assert made._stats.num_encoded == 0
    assert parts(made, large, large) == ([400, 400], ("a", 3, 4, 4), "")
    assert (made._stats.num_encoded, made._stats.num_encoder_hits) == (1, 1)
    assert parts(made, large, small) == ([400, 200], None, "b")


def test_beside_decodes_a_step_leaves_tokens_out_for_its_pictures():
    """Work on pictures and text together are no more than a step of text."""
    made, large = encoders(), ((picture("a", 10, 350),), 0, 400)
    made.begin(has_decodes=True)
    assert made.charge() == 0
    made.reach(*large)
    assert (made.charge(), made.charge()) == (87, 0), "a quarter of 350"
    made.take()
    made.begin(has_decodes=True)
    assert made.charge() == 87, "of what is under way"
    made.take()
    made.begin(has_decodes=False)
    assert made.charge() == 0, "nobody waits"
    budget = Budget(400, GRID, made)
    made.begin(has_decodes=True)
    made.reach((picture("b", 10, 100),), 0, 400)
    budget.charge_encoders()
    assert budget.left == 300
    budget.left = 70
    made._uncharged = 390.0
    budget.charge_encoders()
    assert budget.left == GRID, "a grid step is left"


def test_no_step_beside_decodes_is_more_work_than_a_step_of_text():
    """Or of a grid step more, with large pictures, small ones and text, whatever comes first."""
    cost = TowerCost(linear=0.5, quadratic=0.01, depth=30)
    for seed in range(6):
        random_ = random.Random(seed)
        cache = Cache(num_pages=400, num_slots=24, page_size=16)
        scheduler = Scheduler(
            cache,
            max_num_seqs=12,
            max_num_batched_tokens=512,
            encoder_cache_size=4000,
            tower_cost=cost,
        )
        runner = FakeRunner(scheduler, page_size=16)
        for number in range(3):
            scheduler.add(make_request(cache, f"d{number}", [number] * 20, max_tokens=400))
        for _ in range(3):
            plan = scheduler.schedule()
            scheduler.update(plan, runner.run(plan))
        for number in range(6):
            shown = [picture(f"{number}", 5, random_.choice([40, 100, 600]))]
            tokens = [random_.randrange(4) for _ in range(640 + 100 * number)]
            request = make_request(cache, f"p{number}", tokens, max_tokens=1, pictures=shown)
            scheduler.add(request)
        while len(scheduler.running) > 3 or scheduler.waiting:
            plan = scheduler.schedule()
            num_tokens = sum(each.num_tokens for each in plan.sequences)
            assert num_tokens + cost.of_step(plan) <= 512 + GRID
            scheduler.update(plan, runner.run(plan))


def test_a_picture_is_encoded_however_many_decodes_there_are():
    """They leave less than a share, for which it is cut into more parts."""
    cache = Cache(num_pages=400, num_slots=100, page_size=16)
    scheduler = Scheduler(
        cache, max_num_seqs=100, max_num_batched_tokens=128, encoder_cache_size=400
    )
    runner = FakeRunner(scheduler, page_size=16)
    for number in range(90):
        scheduler.add(make_request(cache, f"d{number}", [number, 1], max_tokens=60))
    while len(scheduler.running) < 90:
        plan = scheduler.schedule()
        scheduler.update(plan, runner.run(plan))
    shown = make_request(cache, "p", [1] * 90, max_tokens=1, pictures=[picture("a", 5, 30)])
    scheduler.add(shown)
    for _ in range(50):
        plan = scheduler.schedule()
        scheduler.update(plan, runner.run(plan))
    assert shown.finish_reason is not None


def test_what_is_left_of_a_picture_is_encoded_at_once_when_nobody_waits():
    made, large = encoders(), ((picture("a", 10, 350),), 0, 400)
    assert parts(made, large) == ([10], ("a", 0, 1, 4), "")
    assert parts(made, large, has_decodes=False) == ([400], ("a", 1, 4, 4), "")
    made = encoders()
    assert parts(made, large, has_decodes=False) == ([400], None, "a")


def test_a_picture_under_way_is_neither_dropped_nor_read():
    made, large = encoders(capacity=400), ((picture("a", 10, 350),), 0, 400)
    parts(made, large)
    assert parts(made, ((picture("b", 5),), 0, 64)) == ([5], ("a", 1, 2, 4), "")
    made.roll_back(StepPlan(sequences=()))
    assert parts(made, large) == ([10], ("a", 0, 1, 4), ""), "nobody knows how far it came"


def test_a_tower_costs_by_patches_and_by_pairs_of_a_frame():
    still, frames = picture("a", 0, 100), replace(picture("b", 0, 100), grid=(4, 2, 50))
    cost = TowerCost(linear=2.0, quadratic=0.1)
    assert cost.of(still) == 100 * 2 + 100 * 100 * 0.1
    assert cost.of(frames) == 100 * 2 + 4 * 25 * 25 * 0.1
    made = Encoders(1000, 400, GRID, SchedulerStats(), cost)
    assert parts(made, ((still,), 0, 200)) == ([0], ("a", 0, 1, 12), "")
    shallow = TowerCost(linear=2.0, quadratic=0.1, depth=3)
    made = Encoders(1000, 400, GRID, SchedulerStats(), shallow)
    assert parts(made, ((still,), 0, 200)) == ([0], ("a", 0, 1, 3), ""), "a layer each"
