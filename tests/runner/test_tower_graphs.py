"""Which runs of a vision tower are captured, and that a captured one does what the tower does.

Without a GPU a record repeats its launches, over the same buffers as a graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.images.pictures import pixels
from tests.pictured import SETTINGS, image, prompt, save

from milepost.images.patches import from_frames
from milepost.models import Decoder, LoadOptions, load_model
from milepost.runner.pictures import EncodedPictures, PicturePixels
from milepost.runner.tower_graphs import MOST_GRAPHS, RecentGraphs
from milepost.scheduler.plans import StepPlan

GIB = 2**30


def meet(graphs: RecentGraphs[str, str], *keys: str) -> str:
    """Runs each key, and says how: r(eplayed), c(aptured) or l(aunched)."""
    how = ""
    for key in keys:
        if graphs.find(key) is not None:
            how += "r"
        elif graphs.deserves(key):
            graphs.keep(key, key)
            how += "c"
        else:
            how += "l"
    return how


def test_what_comes_again_is_captured():
    graphs: RecentGraphs[str, str] = RecentGraphs()
    assert meet(graphs, *"aabaab") == "lclrrc"


def test_the_least_recently_used_graph_makes_room():
    graphs: RecentGraphs[str, str] = RecentGraphs(most=2, least_between=0)
    assert meet(graphs, *"aabb") == "lclc"
    assert meet(graphs, *"acc") == "rlc"  # b goes
    assert list(graphs) == ["a", "c"]
    assert meet(graphs, *"acb") == "rrl"  # b has to come again as if it were new
    assert meet(graphs, "b", "c", "a") == "crl"


def test_only_so_many_runs_are_remembered():
    graphs: RecentGraphs[str, str] = RecentGraphs(most_seen=3)
    assert meet(graphs, *"abcd") == "llll"
    assert meet(graphs, *"bcda") == "cccl"


def test_sizes_that_take_turns_are_not_captured_each_time():
    """One more size than graphs: each would be dropped before it comes again."""
    graphs: RecentGraphs[str, str] = RecentGraphs(most=4, least_between=10)
    how = meet(graphs, *"abcde" * 20)
    assert how[5:10] == "ccccl"
    assert how[10:].count("c") <= len(how) // 10
    assert how[10:].count("r") > len(how) // 2


class Repeats:
    """Repeats launches, and counts."""

    def __init__(self, bytes_each: int = 0) -> None:
        self.num_bytes, self._bytes_each = 0, bytes_each
        self.num_records = self.num_replays = self.num_clears = 0

    def record(self, launches: Callable[[], object]) -> Callable[[], object]:
        self.num_records += 1
        self.num_bytes += self._bytes_each

        def replay() -> None:
            self.num_replays += 1
            launches()

        return replay

    def clear(self) -> None:
        self.num_bytes = 0
        self.num_clears += 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("pictured")
    save("qwen3_5", folder)
    return load_model(folder, LoadOptions(has_tower=True))[0]


def encode(pictures: EncodedPictures, given: object) -> list[torch.Tensor]:
    """Encodes the prompt's pictures anew, one by one."""
    for each in given.images:
        pictures.take(each.identity, PicturePixels(rows=each.rows, grid=each.grid))
    for each in given.pictures:
        pictures.follow(StepPlan(sequences=(), encodes=(each,)))
    made = [pictures._embeddings[each.identity] for each in given.pictures]
    pictures.follow(StepPlan(sequences=(), drops=tuple(each.identity for each in given.pictures)))
    return made


def test_a_captured_run_returns_the_bits_of_the_tower(model: Decoder) -> None:
    """Whatever ran before it over the same buffers, and with other pixels than it was captured
    with; a video's frames have longer rows and a graph of their own."""
    frames = from_frames([pixels(24, 32, seed) for seed in (5, 6)], SETTINGS)
    first = prompt(3, image(5, 7, 1), image(4, 3, 2), image(7, 5, 3), frames, 2)
    second = prompt(3, image(5, 7, 4), image(4, 3, 5), image(7, 5, 6), frames, 2)
    plain, graphed = (EncodedPictures(model.tower, SETTINGS) for _ in range(2))
    repeats = Repeats()
    graphed.capture(GIB, repeats)
    assert repeats.num_records == 1  # the largest
    for given in (first, second, first):
        for own, expected in zip(encode(graphed, given), encode(plain, given), strict=True):
            assert torch.equal(own, expected)
    assert repeats.num_records == 1 + 4
    assert repeats.num_replays == 2 * 4


def test_embeddings_of_one_run_outlive_the_next(model: Decoder) -> None:
    given, other = prompt(1, image(5, 7, 1)), prompt(1, image(5, 7, 2))
    pictures = EncodedPictures(model.tower, SETTINGS)
    pictures.capture(GIB, Repeats())
    encode(pictures, given)
    (own,) = encode(pictures, given)
    kept = own.clone()
    encode(pictures, other)
    assert torch.equal(own, kept)


def test_graphs_beyond_their_memory_are_dropped_together(model: Decoder) -> None:
    given = prompt(1, image(5, 7, 1))
    pictures, repeats = EncodedPictures(model.tower, SETTINGS), Repeats(GIB)
    pictures.capture(2 * GIB, repeats)  # the largest and its buffers
    expected = encode(pictures, given)
    assert repeats.num_clears == 0
    for _ in range(3):  # captured and dropped, launched, captured
        assert torch.equal(*encode(pictures, given), *expected)
    assert (repeats.num_records, repeats.num_clears) == (3, 1)
    assert repeats.num_bytes == GIB


def test_pictures_of_ever_new_sizes_take_a_bounded_number_of_graphs(model: Decoder) -> None:
    pictures, repeats = EncodedPictures(model.tower, SETTINGS), Repeats()
    pictures.capture(GIB, repeats)
    given = [prompt(1, image(1, width)) for width in range(1, MOST_GRAPHS + 5)]
    for _ in range(2):
        for each in given:
            encode(pictures, each)
    assert len(pictures._graphs._recent) == MOST_GRAPHS
