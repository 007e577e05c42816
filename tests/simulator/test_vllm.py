import pytest

from milepost.cache import Lost
from milepost.scheduler.request import Request
from milepost.scheduler.scheduler import Scheduler
from milepost.simulator import read_trace
from milepost.simulator.chain import TraceChain
from milepost.simulator.cost import read_cost
from milepost.simulator.fleet import outcome
from milepost.simulator.policies import POLICIES, Pooled
from milepost.simulator.vllm import OnePool
from tests.simulator.traces import DATA, Maker, one_engine

COST = read_cost("hybrid-35b-a3b-h200")


def pool(num_blocks, **options):
    fields = {"block_size": 512, "blocks_a_state": 3, "page_size": 64}
    return OnePool(num_blocks=num_blocks, **(fields | options))


def reused(trace, cache, **options):
    """Tokens that the requests reused, one after the other."""
    for number, request in enumerate(trace.requests):
        request.arrival_s = 1000.0 * number
    one_engine(trace, cache, COST, closed=False, **options).run()
    cache.check()
    return cache.stats.hits


def test_a_block_is_what_a_third_of_a_state_takes():
    """vLLM 0.33 rounds 1048 tokens of the 35B's KV up to 1088."""
    memory = POLICIES["vllm"].memory(COST, num_pages=1000, num_slots=20, page_size=64)
    assert (memory.block_size, memory.blocks_a_state) == (1088, 3)


def test_a_prompt_shorter_than_a_block_never_hits():
    maker = Maker()
    pages = maker.pages(7)
    for _ in range(3):
        maker.ask(pages)
    cache = pool(100)
    assert reused(maker.trace(), cache) == 0
    assert cache.stats.lost[Lost.UNDER_PAGE] == 2 * 7 * 64


def test_a_continued_prompt_hits_its_last_whole_block():
    maker = Maker()
    pages = maker.pages(20)
    maker.ask(pages)
    maker.ask(pages + maker.pages(10))
    assert reused(maker.trace(), pool(100)) == 16 * 64


def test_a_block_that_is_no_multiple_of_a_page_is_told_by_the_page_it_ends_in():
    maker = Maker()
    pages = maker.pages(20)
    maker.ask(pages)
    maker.ask(pages + maker.pages(10))
    assert reused(maker.trace(), pool(100, block_size=544)) == 2 * 544


def test_blocks_may_be_smaller_than_pages():
    """The prompt leaves the first one's path; the state there is kept for the third."""
    maker = Maker()
    pages = maker.pages(5)
    maker.ask(pages)
    for _ in range(2):
        maker.ask(pages[:4] + maker.pages(10))
    assert reused(maker.trace(), pool(100, block_size=16)) == 4 * 64


def test_a_shared_prefix_hits_where_its_state_is_kept():
    """From the third prompt on: the second keeps a state where it leaves the first."""
    maker = Maker()
    shared = maker.pages(16)
    for _ in range(4):
        maker.ask(shared + maker.pages(9))
    cache = pool(100)
    assert reused(maker.trace(), cache) == 2 * 1024
    assert cache.stats.checkpoints_made == 4 + 1


def test_a_state_goes_before_the_kv_that_it_makes_usable():
    """40 pages leave 5 blocks and a state of 3. The short prompt in between needs 2, 3 for its own
    state while it runs, and 3 for the one that it keeps.
    """

    def lost(num_blocks):
        maker = Maker()
        pages = maker.pages(40)
        maker.ask(pages)
        maker.ask(maker.pages(8))
        maker.ask(pages + maker.pages(1))
        cache = pool(num_blocks)
        hits = reused(maker.trace(), cache)
        return hits, cache.stats.lost[Lost.CHECKPOINT_EVICTED]

    assert lost(16) == (40 * 64, 0)
    assert lost(13) == (0, 40 * 64)


def test_an_answer_leaves_kv_and_no_state():
    maker = Maker()
    pages = maker.pages(8)
    longer = pages + maker.pages(16)
    maker.ask(pages, output_length=900)
    maker.ask(longer)
    trace = maker.trace()
    trace.link_answers()
    cache = pool(100)
    assert reused(trace, cache) == 8 * 64
    assert cache.stats.lost[Lost.NO_CHECKPOINT] == 8 * 64


def test_the_pool_has_the_bytes_of_pages_and_slots_together():
    num_bytes = 1000 * 64 * COST.page_token_bytes + 10 * COST.state_bytes
    for share, block_size in ((1.0, 1088), (0.5, 576)):
        policy = Pooled(name="made", about="", state_share=share)
        made = policy.memory(COST, num_pages=1000, num_slots=10, page_size=64)
        assert (made.blocks_a_state, made.block_size) == (3, block_size)
        assert made.blocks.total == num_bytes // (block_size * COST.page_token_bytes)


@pytest.mark.parametrize("num_blocks", [90, 180, 1000])
def test_the_pool_keeps_its_invariants_at_every_step(num_blocks):
    """Also where running requests are preempted for one another."""
    trace = read_trace(DATA / "conversation-excerpt.jsonl.gz", limit=60)
    trace.link_answers()
    cache = pool(num_blocks, block_size=544, page_size=512)
    scheduler = Scheduler(cache, max_num_seqs=16, max_num_batched_tokens=2048)
    digests = trace.digests()
    for number, asked in enumerate(trace.requests):
        if asked.input_length + asked.output_length <= cache.capacity:
            chain = TraceChain(asked, trace.page_size, digests)
            request = Request(id=f"{number}", chain=chain, max_tokens=asked.output_length)
            scheduler.add(request)
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan.sequences
        cache.check()
        scheduler.update(plan, outcome(plan))
        cache.check()
    assert cache.room == (num_blocks, num_blocks)
    assert bool(scheduler.stats.num_preemptions) == (num_blocks < 1000)
    stats = cache.stats
    assert stats.hits + sum(stats.lost.values()) == stats.queries
