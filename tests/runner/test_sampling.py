import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines import sample

from milepost.kernels import sampling as definition
from milepost.runner import sampling
from milepost.runner.choice import likeliest
from milepost.runner.sampling import SamplingRow
from milepost.sampling_params import SamplingParams

VOCAB = 40


def row(*, prompt=(), output=(), seed=0, suppressed=(), **params):
    return SamplingRow(
        params=SamplingParams(**params),
        tokens=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        seed=seed,
        suppressed_ids=suppressed,
    )


def random_logits(seed, num_rows=1, vocab=VOCAB, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab, generator=generator) * scale


def ids(tokens):
    return [token.token_id for token in tokens]


def draws(logits, num_draws, **params):
    """Token counts over `num_draws` draws from one row of logits, each at its own output index."""
    params = SamplingParams(**params)
    rows = [
        SamplingRow(params=params, tokens=[0] * i, num_prompt_tokens=0, seed=1)
        for i in range(num_draws)
    ]
    return Counter(ids(sample(logits.expand(num_draws, -1), rows)))


def plain_distribution(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The wanted distribution in plain Python, one token at a time."""
    weights = {t: math.exp(x / temperature) for t, x in enumerate(logits.tolist())}
    best = max(weights.values())
    kept = [t for t in sorted(weights, key=weights.get, reverse=True) if weights[t] >= min_p * best]
    kept = kept[: top_k or None]
    total, mass, nucleus = sum(weights[t] for t in kept), 0.0, []
    for token in kept:
        if mass >= top_p * total:
            break
        nucleus.append(token)
        mass += weights[token]
    return {t: weights[t] / mass for t in nucleus}


def chi_square(counts, expected, num_draws):
    return sum((counts[t] - num_draws * p) ** 2 / (num_draws * p) for t, p in expected.items())


any_seed = st.integers(0, 2**63 - 1)
any_params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_p": st.sampled_from([0.1, 0.8, 1.0]),
        "top_k": st.sampled_from([0, 1, 5, 1000]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, -0.5]),
        "logprobs": st.sampled_from([None, 0, 3]),
    }
)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 1.7, "min_p": 0.02, "top_k": 9, "top_p": 0.9},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params):
    logits = random_logits(3, scale=1.5)
    counts = draws(logits, 3000, **params)
    expected = plain_distribution(logits[0], **params)
    assert set(counts) <= set(expected)
    freedom = len(expected) - 1
    assert chi_square(counts, expected, 3000) < freedom + 5 * math.sqrt(2 * freedom)


def test_top_p_sorts_on_when_the_first_candidates_do_not_suffice(monkeypatch):
    logits = random_logits(5, scale=0.1)
    wide = draws(logits, 500, top_p=0.95)
    monkeypatch.setattr(definition, "_CANDIDATES", 4)
    assert draws(logits, 500, top_p=0.95) == wide
    assert set(wide) <= set(plain_distribution(logits[0], top_p=0.95))


@settings(max_examples=60)
@given(any_seed, st.sampled_from([{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}]))
def test_the_narrowest_choice_is_greedy(seed, params):
    logits = random_logits(seed % 1000)
    assert ids(sample(logits, [row(seed=seed, **params)])) == logits.argmax(-1).tolist()


def test_top_k_of_one_takes_the_first_of_equal_logits():
    logits = torch.zeros(1, VOCAB)
    picked = ids(sample(logits.expand(20, -1), [row(top_k=1, seed=s) for s in range(20)]))
    assert picked == ids(sample(logits, [row(temperature=0)])) * 20


@settings(max_examples=60)
@given(st.lists(st.tuples(any_params, any_seed), min_size=1, max_size=6), st.integers(0, 99))
def test_a_row_alone_is_the_row_in_a_batch(choices, logits_seed):
    logits = random_logits(logits_seed, len(choices))
    rows = [
        row(seed=seed, output=[i] * i, prompt=[i, i + 1], **params)
        for i, (params, seed) in enumerate(choices)
    ]
    together = sample(logits, rows)
    alone = [sample(logits[r : r + 1], rows[r : r + 1])[0] for r in range(len(rows))]
    assert together == alone


def test_draws_depend_on_seed_and_index_alone():
    logits = random_logits(1, vocab=1000, scale=0.1)
    first = sample(logits, [row(seed=5, output=[1, 2])])
    assert sample(logits, [row(seed=5, output=[8, 9], prompt=[3])]) == first
    assert sample(logits, [row(seed=5, output=[1])]) != first
    assert sample(logits, [row(seed=6, output=[1, 2])]) != first


def test_noise_is_finite_and_masked_tokens_stay_out():
    noise = definition.gumbel([0], [0], 2_000_000, torch.device("cpu"))
    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.5772) < 0.01


def plain_penalties(logits, params, prompt, output):
    out = list(logits)
    for token in range(len(out)):
        bias = params.get("logit_bias", {}).get(token, 0)
        out[token] += bias if bias > -100 else -math.inf
        if token in prompt or token in output:
            penalty = params.get("repetition_penalty", 1)
            out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
        out[token] -= params.get("frequency_penalty", 0) * output.count(token)
        out[token] -= params.get("presence_penalty", 0) * (token in output)
    return out


@settings(max_examples=80)
@given(
    st.fixed_dictionaries(
        {
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "repetition_penalty": st.floats(0.5, 2),
            "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100)),
        }
    ),
    st.lists(st.integers(0, VOCAB - 1)),
    st.lists(st.integers(0, VOCAB - 1)),
    st.integers(0, 99),
)
def test_penalties_are_the_plain_formula(params, prompt, output, logits_seed):
    logits = random_logits(logits_seed).double()
    before = logits.clone()
    penalized = sampling._adjusted(logits, [row(prompt=prompt, output=output, **params)])
    expected = plain_penalties(before[0].tolist(), params, prompt, output)
    torch.testing.assert_close(penalized[0], torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(logits, before)


def test_penalties_change_a_greedy_choice():
    logits = torch.tensor([[2.0, 1.9, 0.0]])
    assert ids(sample(logits, [row(temperature=0, output=[0], presence_penalty=0.5)])) == [1]
    assert ids(sample(logits, [row(temperature=0, prompt=[0], repetition_penalty=1.5)])) == [1]
    assert ids(sample(logits, [row(temperature=0, prompt=[0], presence_penalty=0.5)])) == [0]


@pytest.mark.parametrize("temperature", [0, 1])
def test_suppressed_ids_are_never_chosen(temperature):
    logits = torch.tensor([[90.0, 80.0, 0.0]])
    assert ids(sample(logits, [row(temperature=temperature, suppressed=[0])])) == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_that_excludes_a_token_is_no_mere_number(temperature):
    """However likely the model takes it to be."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 1e4
    wish = {"logit_bias": {7: -100, 8: 50}, "repetition_penalty": 1.5}
    found = ids(sample(logits, [row(prompt=[7], temperature=temperature, **wish)]))
    assert found == [8]


def test_logprobs_are_the_models_own():
    logits = random_logits(2)
    raw = logits[0].log_softmax(-1)
    token = sample(logits, [row(temperature=0.1, logit_bias={7: 100.0}, logprobs=3)])[0]
    assert token.token_id == 7
    assert token.logprob == pytest.approx(raw[7].item())
    assert list(token.top_logprobs) == raw.topk(3).indices.tolist()
    assert list(token.top_logprobs.values()) == pytest.approx(raw.topk(3).values.tolist())
    assert token.rank == 1 + int((raw > raw[7]).sum())


def test_logprobs_only_where_asked_and_as_many_as_asked():
    plain, none, two = sample(
        random_logits(4, 3), [row(), row(logprobs=0), row(logprobs=2, temperature=0)]
    )
    assert (plain.logprob, plain.top_logprobs, plain.rank) == (None, None, None)
    assert none.logprob is not None
    assert none.top_logprobs == {}
    assert len(two.top_logprobs) == 2
    assert two.rank == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_float_type(dtype):
    logits = random_logits(6, 2).to(dtype)
    rows = [row(temperature=0, logprobs=1), row(seed=3, top_p=0.9, logprobs=1)]
    tokens = sample(logits, rows)
    assert tokens[0].token_id == logits[0].argmax().item()
    same = sample(logits.double(), rows)
    assert ids(tokens) == ids(same)
    assert tokens[1].logprob == pytest.approx(same[1].logprob, abs=1e-5)


def test_tiny_temperature_does_not_overflow():
    logits = random_logits(8)
    logits[0, 3] = logits[0, 9] = logits.max() + 1
    picked = {ids(sample(logits, [row(temperature=1e-300, seed=s)]))[0] for s in range(20)}
    assert picked == {3, 9}


def test_no_rows_give_no_tokens():
    assert sample(torch.empty(0, VOCAB), []) == []


def test_a_broken_row_does_not_disturb_its_neighbours():
    logits = random_logits(9, 3)
    logits[1] = math.nan
    rows = [row(seed=s, top_p=0.9, top_k=5, logprobs=1) for s in range(3)]
    tokens = sample(logits, rows)
    assert tokens[0] == sample(logits[:1], rows[:1])[0]
    assert tokens[2] == sample(logits[2:], rows[2:])[0]
    assert 0 <= tokens[1].token_id < VOCAB


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_of_equal_logits_the_first_is_the_best(dtype):
    logits = torch.zeros(3, 500, dtype=dtype)
    logits[0, [7, 300, 499]] = 2.0
    logits[1] = -torch.inf
    logits[2, 499] = 1e-30
    assert [token.token_id for token in sample(logits, [row(temperature=0)] * 3)][:2] == [7, 0]
    best = logits.argmax(dim=-1).tolist()
    assert [token.token_id for token in sample(logits, [row(temperature=0)] * 3)] == best


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_equal_log_probabilities_the_lower_id_comes_first(dtype):
    """However many other rows ask for: the likeliest are a row's own matter."""
    values = torch.tensor([[-2.0, -1.0, 0.5, -1.0, -torch.inf, 0.5, -1.0, -0.0]], dtype=dtype)
    for num in range(9):
        best, ids = likeliest(values, num)
        assert ids.tolist() == [[2, 5, 7, 1, 3, 6, 0, 4][:num]]
        assert best.tolist() == values.gather(1, ids).tolist()
