"""`milepost verify`: every way agrees, and a planted difference is found."""

from __future__ import annotations

import functools

import pytest
import torch

from milepost import LLM
from milepost.cache import Cache
from milepost.cache.tree import Chain
from milepost.cli.main import main
from milepost.config import EngineConfig
from milepost.engine.bit_checks import BitChecks, CheckSize
from milepost.errors import ConfigError
from milepost.scheduler.request import Request
from tests.engines import save_tiny

SIZE = CheckSize(num_prompts=3, prompt_tokens=150, max_tokens=24)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    @functools.cache
    def find(family):
        return save_tiny(tmp_path_factory.mktemp(family), family, torch.float32).folder

    return find


def results(folder, directory, last="with drafts", **options):
    """What becomes of each way up to the `last`."""
    config = EngineConfig(
        model=str(folder), skip_tokenizer_init=True, batch_invariant=True, **options
    )
    names = ("model", "skip_tokenizer_init", "speculative_config", "cache_dir", "max_model_len")
    names += ("batch_invariant", "max_num_batched_tokens", "max_num_seqs", "num_pages", "num_slots")

    def opened(own):
        return LLM(**{name: getattr(own, name) for name in (*names, "dtype")})

    checks, found = BitChecks(config, SIZE, str(directory), opened).run(), {}
    for each in checks:
        found[each.way] = each
        if each.way == last:
            break
    checks.close()
    return found


def test_every_way_has_the_same_bits(folder_of, tmp_path):
    found = results(folder_of("nemotron_h"), tmp_path, dtype="bfloat16")
    assert {way: each.num_different for way, each in found.items()} == dict.fromkeys(found, 0)
    assert len(found) == 10
    for way in ("again", "as a chat's next turn", "after a restart", "with drafts"):
        (each,) = [each for name, each in found.items() if name.endswith(way)][-1:]
        assert each.num_cached, way
    assert "preemption" in found["in small chunks and little memory"].note
    assert "accepted drafts" in found["with drafts"].note


def test_reused_answers_are_found_out(folder_of, tmp_path, monkeypatch):
    def chain(cache, tokens, salt="", pictures=()):
        return Chain(tokens, cache.page_size, salt, cache.identity, pictures)

    monkeypatch.setattr(Cache, "chain", chain)
    found = results(folder_of("qwen3_5"), tmp_path, "as a chat's next turn")
    assert found["as a chat's next turn"].num_different


def test_another_order_after_a_preemption_is_found_out(folder_of, tmp_path, monkeypatch):
    """Its answer goes through prefill's kernels, all at once."""
    left = property(lambda request: request.num_tokens - request.allocation.planned or 1)
    monkeypatch.setattr(Request, "num_left", left)
    found = results(folder_of("qwen3_5"), tmp_path, "in small chunks and little memory")
    assert found["in small chunks and little memory"].num_different


@pytest.mark.parametrize(("flags", "status"), [((), 0), (("--no-batch-invariant",), 1)])
def test_the_command_says_how_it_went(flags, status, folder_of, capsys):
    line = ["verify", str(folder_of("qwen3_5")), "--skip-tokenizer-init", "--prompt-tokens", "150"]
    line += ["--num-prompts", "3", "--max-tokens", "8"]
    assert main([*line, *flags]) == status
    said = capsys.readouterr().err
    assert "all at once" in said
    assert "bit for bit" in said


def test_what_was_compared_is_shown_if_a_later_engine_does_not_start(
    folder_of, capsys, monkeypatch
):
    def refuse(*_):
        raise ConfigError("no room for it")

    monkeypatch.setattr(BitChecks, "_elsewhere", refuse)
    line = ["verify", str(folder_of("qwen3_5")), "--skip-tokenizer-init", "--prompt-tokens", "150"]
    assert main([*line, "--num-prompts", "3", "--max-tokens", "8"]) == 2
    said = capsys.readouterr().err
    assert "no room for it" in said
    assert "after a restart" in said


def test_engines_with_other_pages_have_another_fingerprint(folder_of):
    options = {"skip_tokenizer_init": True, "batch_invariant": True, "cpu_cache_gib": 0.01}
    engines = [LLM(folder_of("qwen3_5"), page_size=size, **options) for size in (16, 64, 64)]
    small, large, same = (llm.llm_engine.facts.fingerprint for llm in engines)
    assert small != large == same


@pytest.mark.parametrize("name", ["num_prompts", "prompt_tokens", "max_tokens"])
def test_too_little_to_compare_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=1: use"):
        CheckSize(**{name: 1})


def test_prompts_that_fit_no_chunk_are_refused(folder_of, tmp_path):
    with pytest.raises(ConfigError, match="too short to be cut"):
        results(folder_of("qwen3_5"), tmp_path, max_model_len=190)
