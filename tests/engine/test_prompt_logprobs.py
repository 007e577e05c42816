"""The prompt's own log-probabilities: those of one forward pass, whatever the prompt met."""

import pytest
import torch

from milepost.config import EngineConfig
from milepost.engine.loop.core import Engine
from milepost.engine.prompts import Prompt
from milepost.errors import InvalidRequestError
from milepost.runner import choice
from milepost.sampling_params import SamplingParams
from milepost.tiers.holdings import MeasuredRates
from tests.engines import tiering_of

TOKENS = [5 + (7 * i) % 400 for i in range(300)]


@pytest.fixture(scope="module")
def engine():
    return Engine(
        EngineConfig(
            dtype="float64",
            cpu_cache_gib=0.05,
            max_num_seqs=4,
            max_num_batched_tokens=128,
            max_model_len=1024,
        )
    )


def scored(engine, tokens, num_top=3, **params):
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=num_top, **params)
    job = engine.add(Prompt(token_ids=tokens), params)
    while engine.has_work:
        engine.step()
    return job


def expected(engine, tokens):
    """By one request for each prefix: what is sampled behind it is how its next token is judged."""
    found = []
    for end in (1, 2, 63, 64, 65, 127, 128, 129, 200, 299):
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
        job = engine.add(Prompt(token_ids=tokens[:end]), params)
        while engine.has_work:
            engine.step()
        (entry,) = job.completions[0].logprobs
        found.append((end, {id_: one.logprob for id_, one in entry.items()}))
    return found


def test_chunked_or_cached_they_are_those_of_single_steps(engine):
    """In chunks of 128, after the same prompt was cached, and with the pieces of the logits cut
    elsewhere."""
    reports = [scored(engine, TOKENS).output() for _ in range(2)]
    first, second = (report.prompt_logprobs for report in reports)
    assert reports[1].num_cached_tokens == 0, "all must be computed"
    assert len(first) == len(TOKENS)
    assert first[0] is None
    assert first == second
    for end, tops in expected(engine, TOKENS):
        best = {id_: one.logprob for id_, one in first[end].items() if one.rank <= 3}
        assert next(iter(first[end])) == TOKENS[end]
        assert len(best) >= 3
        for id_, value in best.items():
            assert value == pytest.approx(tops[id_], abs=1e-9)


def test_what_an_earlier_engine_left_on_disk_is_computed(tmp_path):
    """Though it was asked for the same, by a request of the same number."""
    config = EngineConfig(
        dtype="float64", cpu_cache_gib=0.05, cache_dir=str(tmp_path), cache_host_gib=0.05
    )
    found = []
    for _ in range(2):
        engine = Engine(config)
        tiering_of(engine).tiers.holdings.rates = MeasuredRates(tokens_per_s=1.0, load_s=0.0)
        output = scored(engine, TOKENS).output()
        assert output.num_cached_tokens == 0
        found.append(output.prompt_logprobs)
        engine.close()
    assert None not in found[1][1:]
    assert found[0] == found[1]


def test_pieces_do_not_show(engine, monkeypatch):
    whole = scored(engine, TOKENS).output().prompt_logprobs
    monkeypatch.setattr(choice, "PIECE_ROWS", 7)
    for one, other in zip(
        whole[1:], scored(engine, TOKENS).output().prompt_logprobs[1:], strict=True
    ):
        assert one.keys() == other.keys()
        for id_ in one:
            assert one[id_].logprob == pytest.approx(other[id_].logprob, abs=1e-9)


def test_logits_are_made_a_few_rows_at_a_time(engine, monkeypatch):
    sizes = []
    kind = type(engine.runner.executor.model)
    compute = kind.compute_logits

    def counted(model, hidden):
        sizes.append(len(hidden))
        return compute(model, hidden)

    monkeypatch.setattr(kind, "compute_logits", counted)
    scored(engine, TOKENS)
    assert max(sizes) <= choice.PIECE_ROWS
    assert sum(sizes) >= len(TOKENS) - 1


def test_beside_others_and_with_several_answers(engine):
    alone = scored(engine, TOKENS).output().prompt_logprobs
    other = engine.add(Prompt(token_ids=TOKENS[:100]), SamplingParams(max_tokens=30, seed=1))
    params = SamplingParams(max_tokens=3, n=2, seed=2, prompt_logprobs=3)
    job = engine.add(Prompt(token_ids=TOKENS), params)
    while engine.has_work:
        engine.step()
    found = job.output().prompt_logprobs
    assert other.completions[0].prompt_logprobs is None
    for one, its in zip(found[1:], alone[1:], strict=True):
        assert next(iter(one)) == next(iter(its))
        own = next(iter(one))
        assert one[own].logprob == pytest.approx(its[own].logprob, abs=1e-9)
        assert one[own].rank == its[own].rank


def test_none_at_all_and_a_single_token(engine):
    assert scored(engine, TOKENS[:1]).output().prompt_logprobs is None
    zero = scored(engine, TOKENS[:9], num_top=0).output().prompt_logprobs
    assert [len(entry) for entry in zero[1:]] == [1] * 8
    assert torch.isfinite(torch.tensor([next(iter(e.values())).logprob for e in zero[1:]])).all()


def test_too_many_are_refused(engine, monkeypatch):
    monkeypatch.setattr("milepost.engine.validation.MAX_SCORES", 100)
    with pytest.raises(InvalidRequestError, match="prompt_logprobs"):
        scored(engine, TOKENS)
    with pytest.raises(InvalidRequestError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=21)
