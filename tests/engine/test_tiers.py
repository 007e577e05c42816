"""A hit from host memory answers as one from the device and as a cold run, for every path by which
a state comes back; and the bytes of pages and states are the same on their way."""

from __future__ import annotations

import math
import random

import pytest
import torch

from milepost import SamplingParams
from milepost.cache import Lost
from milepost.config import EngineConfig
from milepost.engine.prompts import Prompt
from milepost.errors import ConfigError
from milepost.tiers.holdings import MeasuredRates
from tests.engines import (
    NUM_TOKENS,
    THREE_LAYERS,
    answer,
    ask,
    cached,
    greedy,
    num_held,
    prompt,
    sampled,
    save_tiny,
    tiering_of,
    tokens,
)
from tests.mtp import add_head

END = 300 + NUM_TOKENS - 1
DEVICES = {
    "split": {"num_pages": 14, "num_slots": 4},
    "shared": {"cpu_cache_gib": 0.0008, "cache_memory": "shared", "page_size": 16},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return save_tiny(folder, "qwen3_5", torch.float64, **THREE_LAYERS)


@pytest.fixture(params=DEVICES)
def llm(request, tiny):
    return opened(tiny, **DEVICES[request.param])


def opened(tiny, **options):
    llm = tiny.open(max_num_seqs=3, **({"cache_host_gib": 0.05} | options))
    tiering = tiering_of(llm.llm_engine)
    if tiering is not None:
        tiering.tiers.holdings.rates = MeasuredRates(
            tokens_per_s=1.0, load_s=0.0
        )  # nothing is worth computing
    return llm


def crowd_out(llm):
    """Other prompts, as many as the device holds."""
    for seed in range(50, 54):
        ask(llm, tokens(400, seed))


def forget_device(llm):
    """What is in host memory stays."""
    assert llm.llm_engine.scheduler.cache.reset()


def follow_up(output, num_new=30):
    return [*output.prompt_token_ids, *answer(output), *tokens(num_new, seed=99)]


def loaded(output):
    return output.cache_report.loaded


def test_the_end_of_an_answer_comes_back(tiny, llm):
    (first,) = ask(llm, tokens(300))
    crowd_out(llm)
    again = ask(llm, follow_up(first))
    assert (cached(again), loaded(again[0])) == ([END], {"host": END})
    tiny.check(again)


def test_the_same_in_float32(tmp_path):
    tiny = save_tiny(tmp_path, "qwen3_5", torch.float32, **THREE_LAYERS)
    llm = opened(tiny, **DEVICES["split"])
    (first,) = ask(llm, tokens(300))
    forget_device(llm)
    again = ask(llm, follow_up(first))
    assert loaded(again[0]) == {"host": END}
    tiny.check(again)


def test_marks_and_branch_points_come_back(tiny, llm):
    shared = tokens(200, seed=1)
    for own in range(2):
        ask(llm, [*shared, *tokens(60, seed=2 + own)])
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    llm.generate([prompt(tokens(220, seed=11), cache_marks=[150])], params, use_tqdm=False)
    forget_device(llm)
    branched = ask(llm, [*shared, *tokens(60, seed=8)])
    marked = ask(llm, [*tokens(150, seed=11), *tokens(60, seed=12)])
    assert [loaded(branched[0]), loaded(marked[0])] == [{"host": 192}, {"host": 150}]
    tiny.check([*branched, *marked])


def test_only_what_the_device_lacks_comes(tiny, llm):
    """Pages that are there are not copied again; the state always is."""
    (first,) = ask(llm, tokens(300))
    forget_device(llm)
    ask(llm, [*tokens(300)[:130], *tokens(9, seed=4)])
    before = tiering_of(llm.llm_engine).transfers.num_pages_brought
    again = ask(llm, follow_up(first))
    assert loaded(again[0]) == {"host": END - 128}
    size = llm.llm_engine.config.page_size
    assert (
        tiering_of(llm.llm_engine).transfers.num_pages_brought - before
        == -(-END // size) - 128 // size
    )
    tiny.check(again)


def test_many_come_back_beside_each_other_and_beside_those_that_run(tiny, llm):
    firsts = [ask(llm, tokens(200, seed))[0] for seed in range(20, 24)]
    prompts = [follow_up(first) for first in firsts] + [tokens(250, 30)]
    outputs = ask(llm, *prompts)
    assert sum(sum(loaded(output).values()) for output in outputs) > 0
    tiny.check(outputs)


def test_what_is_kept_has_the_bytes_that_the_device_had(tiny):
    """Every pool's row of a page and of a slot, whatever it stands for."""
    llm = opened(tiny, num_pages=40, num_slots=8)
    ask(llm, tokens(300))
    engine = llm.llm_engine
    cache, pools = engine.scheduler.cache, engine.runner.pools
    tiering = tiering_of(engine)
    num = 0
    for node in cache.tree.nodes.values():
        item = tiering.tiers.host.get("page", node.digest)
        rows = tiering.transfers.copies.host.pages.tensors
        assert all(
            torch.equal(part[node.page], row[item.place])
            for part, row in zip(pools.page_parts, rows, strict=True)
        )
        num += item.is_ready
    for checkpoint in cache.tree.at_slot.values():
        item = tiering.tiers.host.get("state", checkpoint.key)
        if item is None:
            continue
        rows = tiering.transfers.copies.host.states.tensors
        assert all(
            torch.equal(part[checkpoint.slot], row[item.place])
            for part, row in zip(pools.slot_parts, rows, strict=True)
        )
        num += 10
    assert num == 4 + 20
    assert sum(part.nbytes for part in pools.slot_parts) == sum(
        state.conv.nbytes + state.recurrent.nbytes for state in pools.states.values()
    )


def test_resetting_the_cache_forgets_host_memory(tiny):
    llm = opened(tiny, **DEVICES["split"])
    (first,) = ask(llm, tokens(300))
    assert llm.reset_prefix_cache()
    assert cached(ask(llm, follow_up(first))) == [0]


def test_an_engine_whose_host_memory_is_refused_serves_without(tiny, monkeypatch, caplog):
    def refuse(*_, **__):
        raise MemoryError("8 bytes of host memory: no")

    monkeypatch.setattr("milepost.tiers.arena.allocate_host", refuse)
    llm = opened(tiny, **DEVICES["split"])
    assert [record.message for record in caplog.records if "tiers" in record.message] == [
        "tiers: off, 8 bytes of host memory: no"
    ]
    tiny.check(ask(llm, tokens(300)))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cache_host_gib": 0}, "use more than 0"),
        ({"cache_host_gib": math.inf}, "use more than 0 .*, or leave it out"),
        ({"cache_dir": "kept", "cache_disk_gib": math.inf}, "use more than 0"),
        ({"cache_dir": ""}, "cache_dir='': name one, or leave it out"),
        ({"model": ""}, "model='': name one"),
        ({"record_trace": ""}, "record_trace='': name one"),
        ({"cache_disk_gib": 5.0}, "nothing is kept on disk without cache_dir"),
        ({"cache_host_gib": 1.0, "enable_prefix_caching": False}, "prefix caching is off"),
        ({"cache_host_gib": 1.0, "mamba_cache_mode": "none"}, "prefix caching is off"),
        ({"cache_host_gib": 1.0, "record_plans": "plans"}, "leave out cache_host_gib"),
    ],
)
def test_what_cannot_be_is_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        EngineConfig(**options)


def test_drafts_float8_salts_aborts_and_tight_memory_beside_each_other(tmp_path, monkeypatch):
    sizes = {"linear_value_head_dim": 36}  # a state is no smaller than a page
    tiny = save_tiny(tmp_path, "qwen3_5", torch.float64, **THREE_LAYERS, **sizes)
    add_head(tiny.folder)
    tiny.options = {"kv_cache_dtype": "fp8"}
    llm = opened(
        tiny, speculative_config={"method": "mtp", "adaptive": False}, num_pages=12, num_slots=4
    )
    engine, transfers = llm.llm_engine, tiering_of(llm.llm_engine).transfers
    (first,) = ask(llm, tokens(300), cache_salt="a")
    forget_device(llm)
    stranger = ask(llm, follow_up(first), cache_salt="b")
    assert loaded(stranger[0]) == {}

    forget_device(llm)
    with monkeypatch.context() as held:
        held.setattr(transfers, "poll", lambda: False)
        held.setattr(transfers, "_hasten", lambda: False)
        job = engine.add(Prompt(token_ids=follow_up(first), cache_salt="a"), greedy())
        engine.step()
        assert engine.scheduler.num_loading == 1
        engine.abort(job)
        engine.step()
    engine.flush()
    assert num_held(llm) == (0, 0), "who is over holds nothing, once nobody writes there any more"

    forget_device(llm)
    long = greedy(60)
    again = ask(llm, follow_up(first), tokens(280, seed=6), params=long, cache_salt="a")
    assert loaded(again[0]) == {"host": END}
    assert engine.pipeline.speculation is not None
    assert sum(output.outputs[0].num_draft_tokens for output in again) > 0
    assert engine.scheduler.stats.num_preemptions > 0
    tiny.check([first, *stranger])
    tiny.check(again, long)


# --- on disk --------------------------------------------------------------------------------------


def kept(tiny, folder, **options):
    return opened(tiny, cache_dir=str(folder), **(options or DEVICES["split"]))


def end(llm):
    """Closes the engine; returns what its tiers have done."""
    stats = tiering_of(llm.llm_engine).tiers.stats
    llm.llm_engine.close()
    return stats


@pytest.mark.parametrize("device", DEVICES)
def test_a_restart_goes_on_from_what_was_written(tiny, tmp_path, device):
    llm = kept(tiny, tmp_path, **DEVICES[device])
    (first,) = ask(llm, tokens(300))
    ask(llm, tokens(150, seed=5))
    num_written = end(llm).written
    again = kept(tiny, tmp_path, **DEVICES[device])
    assert len(tiering_of(again.llm_engine).tiers.disk) == num_written > 10
    outputs = ask(again, follow_up(first))
    assert loaded(outputs[0]) == {"disk": END}
    forget_device(again)
    outputs += ask(again, follow_up(first, 40))
    assert list(loaded(outputs[1])) == ["host"]
    tiny.check(outputs)


def test_several_answers_salts_a_full_queue_and_aborts_from_disk(tiny, tmp_path):
    """Eight at once wait for three seats, and for little memory."""
    rng = random.Random(4)
    several, own = sampled(8, n=2), {}
    known = [tokens(150 + 30 * index, seed=index) for index in range(4)]
    for turn in range(2):
        llm = kept(tiny, tmp_path, num_pages=16, num_slots=5)
        engine, aborted = llm.llm_engine, []
        for base in known:
            cut = rng.choice([len(base), 100])
            abandoned = Prompt(token_ids=[*base[:cut], *tokens(20, seed=77)], cache_salt="a")
            aborted.append(engine.add(abandoned, greedy()))
        for _ in range(3):
            engine.step()
        for job in aborted:
            engine.abort(job)
        outputs = [ask(llm, *known, params=several, cache_salt=salt) for salt in ("a", "b")]
        tiny.check([output for group in outputs for output in group], several)
        own[turn] = sum(sum(loaded(output).values()) for group in outputs for output in group)
        assert num_held(llm) == (0, 0)
        known = [
            [*base, *answer(output, 1)] for base, output in zip(known, outputs[0], strict=True)
        ]
        end(llm)
    assert own[1] > 600, "the second engine goes on where the first one was"


@pytest.mark.parametrize("how", ["flipped", "cut", "gone", "swapped"])
def test_files_that_are_no_good_cost_time_alone(tiny, tmp_path, how):
    llm = kept(tiny, tmp_path)
    (first,) = ask(llm, tokens(300))
    end(llm)
    again = kept(tiny, tmp_path)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    whole = [path.read_bytes() for path in files]
    for index, path in enumerate(files):
        if how == "flipped":
            path.write_bytes(whole[index][:-9] + bytes([whole[index][-9] ^ 4]) + whole[index][-8:])
        elif how == "cut":
            path.write_bytes(whole[index][:-100])
        elif how == "gone":
            path.unlink()
        else:
            path.write_bytes(whole[index - 1])
    outputs = ask(again, follow_up(first))
    assert outputs[0].cache_report.lost[Lost.LATE_COPY] == END
    assert loaded(outputs[0]) == {}
    assert tiering_of(again.llm_engine).tiers.stats.failed_loads == 1
    tiny.check(outputs)


def test_what_another_engine_writes_meanwhile_is_found(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("milepost.tiers.finding.ROUND_S", 1e-6)
    llm, other = kept(tiny, tmp_path), kept(tiny, tmp_path)
    assert not len(tiering_of(llm.llm_engine).tiers.disk)
    (first,) = ask(other, tokens(300))
    num_written = end(other).written
    engine = llm.llm_engine
    assert engine.rest_s is not None, "an engine that does nothing looks from time to time"
    while len(tiering_of(engine).tiers.disk) < num_written:
        engine.do_idle_work()
    outputs = ask(llm, follow_up(first))
    assert loaded(outputs[0]) == {"disk": END}
    tiny.check(outputs)


def test_a_disk_that_is_full_costs_what_it_lacks_alone(tiny, tmp_path, monkeypatch, caplog):
    def refuse(self, *_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("milepost.tiers.files.Files._write_aside", refuse)
    llm = kept(tiny, tmp_path)
    (first,) = ask(llm, tokens(300))
    num_written = end(llm).written
    tiny.check([first])
    own = [line for line in caplog.messages if str(tmp_path) in line]  # others' engines write, too
    assert "".join(own).count("No space left") == 1
    assert num_written == 0
    monkeypatch.undo()
    again = ask(kept(tiny, tmp_path), follow_up(first))
    assert loaded(again[0]) == {}
    tiny.check(again)


def test_a_directory_that_cannot_be_made_is_refused(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cache_dir"):
        kept(tiny, tmp_path / "file" / "below")


def num_files(folder):
    return sum(path.is_file() for path in folder.rglob("*"))


def test_resetting_the_cache_deletes_files_if_asked(tiny, tmp_path):
    llm = kept(tiny, tmp_path)
    (first,) = ask(llm, tokens(300))
    while llm.llm_engine.do_idle_work():
        pass
    assert num_files(tmp_path) > 5
    assert llm.reset_prefix_cache()
    assert loaded(ask(llm, follow_up(first))[0]) == {"disk": END}
    assert llm.reset_prefix_cache(reset_connector=True)
    again = ask(llm, follow_up(first))
    assert cached(again) == [0]
    tiny.check(again)
    assert llm.reset_prefix_cache(reset_connector=True), "some writes may be under way"
    assert cached(ask(llm, follow_up(first)[:-1])) == [0]
    assert llm.reset_prefix_cache(reset_connector=True)
    end(llm)
    assert num_files(tmp_path) == 0
    assert cached(ask(kept(tiny, tmp_path), follow_up(first))) == [0]
