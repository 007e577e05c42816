from milepost.simulator.cost import read_cost
from milepost.simulator.one_pool import OnePool, one_pool
from tests.simulator.traces import Maker


def pool(num_blocks):
    return OnePool(num_blocks=num_blocks, pages_each=8, blocks_a_state=3)


def test_a_prompt_shorter_than_a_block_never_hits():
    maker = Maker()
    pages = maker.pages(7)
    for _ in range(3):
        maker.ask(pages)
    assert pool(100).hits(maker.trace()) == 0


def test_a_continued_prompt_hits_its_last_whole_block():
    maker = Maker()
    pages = maker.pages(20)
    maker.ask(pages)
    maker.ask(pages + maker.pages(10))
    assert pool(100).hits(maker.trace()) == 16 * 64


def test_a_shared_prefix_hits_from_the_third_prompt_on():
    maker = Maker()
    shared = maker.pages(16)
    for _ in range(4):
        maker.ask(shared + maker.pages(9))
    assert pool(100).hits(maker.trace()) == 2 * 16 * 64


def test_a_state_goes_before_the_kv_that_it_makes_usable():
    maker = Maker()
    pages = maker.pages(40)
    maker.ask(pages)
    maker.ask(maker.pages(8))
    maker.ask(pages + maker.pages(1))
    assert pool(12).hits(maker.trace()) == 40 * 64
    assert pool(11).hits(maker.trace()) == 0


def test_the_blocks_hold_the_states_of_the_cost_model():
    maker = Maker()
    maker.ask(maker.pages(8))
    made = one_pool(maker.trace(), read_cost("hybrid-35b-a3b-h200"), 2**30, 544)
    assert (made.pages_each, made.blocks_a_state, made.num_blocks) == (9, 6, 91 + 1 + 6)
