"""A survey is the tree folded, whatever happens to the tree meanwhile, and takes no long slices."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.cache import Cache, Kind
from milepost.cache.tree import Chain, Outbox, Tree
from milepost.page.survey import survey
from tests.cache.test_tree import PAGE, Planted, prompts, salts


def finish(slices):
    """What a survey returns, and its number of slices."""
    num = 0
    while True:
        try:
            next(slices)
        except StopIteration as stop:
            return stop.value, num
        num += 1


def expected(tree: Tree):
    """(pages before, number of pages) of each run, found by looking at every node."""
    children = Counter(node.parent for node in tree.nodes.values())
    runs = Counter()
    for end in tree.nodes.values():
        if children[end] == 1:
            continue
        top = end
        while top.parent.parent is not None and children[top.parent] == 1:
            top = top.parent
        runs[top.depth - 1, end.depth - top.depth + 1] += 1
    return runs


def runs_of(view):
    return Counter((run.first, run.num_pages) for run in view.runs if run.parent is not None)


def grow(planted, events):
    for is_cut, prompt, salt in events:
        (planted.cut if is_cut else planted.plant)(Chain(prompt, PAGE, salt))


events = st.lists(st.tuples(st.booleans(), prompts, salts), max_size=30)


@given(events)
def test_runs_are_those_of_the_tree(done):
    planted = Planted()
    grow(planted, done)
    wanted = list(planted.tree.nodes.values())
    view, _ = finish(survey(planted.tree, wanted, visits=3))
    assert runs_of(view) == expected(planted.tree)
    assert sum(run.num_pages for run in view.runs) == len(planted.tree.nodes)
    assert {run.num_others for run in view.runs} <= {0}
    for node in wanted:
        run = view.runs[view.places[node]]
        assert run.first < node.depth <= run.first + run.num_pages
    for run in view.runs:
        above = view.runs[run.parent] if run.parent is not None else None
        assert run.first == (above.first + above.num_pages if above else 0)


@settings(max_examples=60)
@given(events, st.lists(events, max_size=12))
def test_a_tree_that_changes_meanwhile_is_a_tree_still(before, meanwhile):
    planted = Planted()
    grow(planted, before)
    known = set(planted.tree.nodes.values())
    slices = survey(planted.tree, visits=1)

    def changing():
        """The survey's slices, with some changes after each of the first."""
        for more in meanwhile:
            try:
                yield next(slices)
            except StopIteration as stop:
                return stop.value
            grow(planted, more)
            known.update(planted.tree.nodes.values())
        return (yield from slices)

    view, _ = finish(changing())
    assert sum(run.num_pages for run in view.runs) <= len(known)
    places = [(run.id, run.first) for run in view.runs if run.parent is not None]
    assert len(set(places)) == len(places)
    for run in view.runs:
        above = view.runs[run.parent] if run.parent is not None else None
        assert run.first == (above.first + above.num_pages if above else 0)


@given(events, st.integers(1, 6))
def test_what_is_not_listed_is_added_up(done, max_runs):
    planted = Planted()
    grow(planted, done)
    whole, _ = finish(survey(planted.tree))
    view, _ = finish(survey(planted.tree, max_runs=max_runs))
    assert len(view.runs) == min(max_runs, whole.num_runs)
    assert view.num_runs == whole.num_runs
    top = [run for run in view.runs if run.parent is None]
    if len(top) == len([run for run in whole.runs if run.parent is None]):
        listed = sum(run.num_pages for run in view.runs)
        others = sum(run.other_pages for run in view.runs)
        assert listed + others == len(planted.tree.nodes)
        assert len(view.runs) + sum(run.num_others for run in view.runs) == whole.num_runs


def test_a_run_that_is_asked_after_is_listed_before_larger_ones():
    planted = Planted()
    for token in range(20):
        planted.plant(Chain([token] * PAGE * 3, PAGE))
    planted.plant(Chain([99] * PAGE, PAGE))
    small = planted.tree.deepest(Chain([99] * PAGE, PAGE))
    view, _ = finish(survey(planted.tree, [small], max_runs=4))
    assert view.runs[view.places[small]].num_pages == 1


def compute(cache, tokens, kind=Kind.ANSWER_END):
    chain = cache.chain(tokens)
    allocation = cache.admit(chain, cache.match(chain))
    exports = cache.take_exports(allocation, len(chain))
    written = {export.slot: export.position for export in exports}
    cache.commit(allocation, len(chain), {allocation.slot_out: len(chain)} | written)
    cache.release(allocation, kind)


def test_checkpoints_and_strays_of_a_path():
    cache = Cache(num_pages=16, num_slots=8)
    compute(cache, range(64 * 4), kind=None)
    compute(cache, range(64 * 2 + 5))
    view, _ = finish(survey(cache.tree))
    root, run = view.runs
    assert (root.parent, root.num_pages, run.parent) == (None, 0, 0)
    assert (run.first, run.num_pages, run.num_strays) == (0, 4, 1)
    assert [each.position for each in run.checkpoints] == [192, 133, 128]
    assert {each.kind for each in run.checkpoints} >= {"prompt_end", "answer_end"}
    assert run.num_checkpoints == 3


def test_no_slice_is_long():
    """100,000 pages in 3,000 paths: as many slices as there are pieces of work of `visits`."""
    tree = Tree(max_history=1, outbox=Outbox(PAGE, needs_states=True))
    planted = Planted()
    planted.tree = tree
    for path in range(3000):
        tokens = [path] * PAGE * 33
        planted.plant(Chain(tokens, PAGE))
    assert len(tree.nodes) == 99_000
    view, num_slices = finish(survey(tree, visits=1000))
    assert len(view.runs) == 2000
    assert sum(run.num_pages for run in view.runs) + view.runs[0].other_pages == 99_000
    assert num_slices >= 99 + 99 + 3 * 3000 / 125
