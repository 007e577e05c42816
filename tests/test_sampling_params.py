import dataclasses
import math
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from milepost.errors import InvalidRequestError
from milepost.sampling_params import MAX_LOGPROBS, MAX_N, SamplingParams, StructuredOutputs

REFUSED = [
    ({"temperature": -0.1}, "temperature=-0.1"),
    ({"temperature": math.nan}, "temperature=nan"),
    ({"temperature": math.inf}, "temperature=inf"),
    ({"temperature": None}, "temperature=None"),
    ({"temperature": "hot"}, "temperature='hot'"),
    ({"top_p": 0.0}, "top_p=0.0"),
    ({"top_p": 1.01}, "top_p=1.01"),
    ({"top_p": math.nan}, "top_p=nan"),
    ({"top_k": -2}, "top_k=-2"),
    ({"top_k": 1.5}, "top_k=1.5"),
    ({"min_p": -0.1}, "min_p=-0.1"),
    ({"min_p": 1.1}, "min_p=1.1"),
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"max_tokens": True}, "max_tokens=True"),
    ({"min_tokens": -1}, "min_tokens=-1"),
    ({"min_tokens": 17}, "min_tokens=17: use at most max_tokens=16"),
    ({"stop": ""}, "stop=''"),
    ({"stop": ["a", ""]}, "stop=''"),
    ({"stop": [7]}, "stop=7"),
    ({"stop": "x", "detokenize": False}, "detokenize=True"),
    ({"stop_token_ids": [-1]}, "stop_token_ids=-1"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids='a'"),
    ({"n": 0}, "n=0"),
    ({"n": 2, "temperature": 0}, "n=2"),
    ({"logprobs": -1}, "logprobs=-1"),
    ({"logprobs": MAX_LOGPROBS + 1}, "logprobs=21"),
    ({"seed": -(2**63) - 1}, "seed=-9223372036854775809"),
    ({"seed": 2**63}, "seed=9223372036854775808"),
    ({"presence_penalty": 2.1}, "presence_penalty=2.1"),
    ({"frequency_penalty": -2.1}, "frequency_penalty=-2.1"),
    ({"repetition_penalty": 0}, "repetition_penalty=0"),
    ({"repetition_penalty": math.inf}, "repetition_penalty=inf"),
    ({"logit_bias": {3: 101.0}}, "logit_bias[3]=101.0"),
    ({"logit_bias": {-3: 1.0}}, "logit_bias=-3"),
    ({"logit_bias": [3]}, "logit_bias=[3]"),
    ({"temperature": 10**400}, "temperature=1000"),
    ({"repetition_penalty": 10**400}, "repetition_penalty=1000"),
    ({"n": MAX_N + 1}, f"n={MAX_N + 1}"),
    ({"stop": 5}, "stop=5"),
    ({"stop": b"end"}, "stop=b'end'"),
    ({"stop_token_ids": 5}, "stop_token_ids=5"),
    ({"allowed_token_ids": 5}, "allowed_token_ids=5"),
    ({"bad_words": "never"}, "bad_words='never'"),
    ({"bad_words": ["\ud800"]}, "bad_words='\\ud800'"),
    ({"ignore_eos": "no"}, "ignore_eos='no'"),
    ({"detokenize": None}, "detokenize=None"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output=1"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens='no'"),
    ({"structured_outputs": "a"}, "structured_outputs='a'"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs: regex=5"),
]


@pytest.mark.parametrize(("values", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_bad_values_are_refused_by_name_and_value(values, said):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**values)
    assert said in str(caught.value)
    assert "use " in str(caught.value)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({}, "exactly one of"),
        ({"regex": "a", "choice": ["a"]}, "exactly one of"),
        ({"choice": []}, "exactly one of"),
        ({"choice": ()}, "exactly one of"),
        ({"choice": "yes"}, "choice='yes': use a list"),
        ({"choice": ["yes", 5]}, "choice=5: use strings"),
        ({"json": [1]}, "json=[1]: use a JSON schema"),
        ({"regex": 5}, "regex=5: use a string"),
        ({"grammar": b"start"}, "grammar=b'start': use a string"),
    ],
)
def test_a_form_that_cannot_be_meant_is_refused(form, said):
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputs(**form)
    assert said in str(caught.value)


def test_edges_are_accepted():
    SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, logprobs=0, seed=0)
    SamplingParams(max_tokens=None, min_tokens=10_000, n=3, logprobs=MAX_LOGPROBS)
    SamplingParams(min_tokens=16, max_tokens=16, logit_bias={0: -100, 1: 100})


def test_stop_becomes_a_tuple():
    assert SamplingParams().stop == ()
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)


def test_params_can_be_rebuilt_from_their_dict_and_do_not_change():
    params = SamplingParams(stop="x", stop_token_ids=[1], n=2)
    assert SamplingParams(**dataclasses.asdict(params)) == params
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 3


def test_sample_seeds_differ_by_request_and_answer():
    seeds = [
        SamplingParams(n=2).sample_seed(index, engine_seed=engine, request_number=number)
        for index in (0, 1)
        for engine in (0, 1)
        for number in (0, 1)
    ]
    assert len(set(seeds)) == 8


def test_a_requests_own_seed_decides_alone():
    params = SamplingParams(seed=7, n=2)
    first = params.sample_seed(0, engine_seed=0, request_number=0)
    assert params.sample_seed(0, engine_seed=5, request_number=9) == first
    assert params.sample_seed(1, engine_seed=0, request_number=0) != first
    assert SamplingParams(seed=8).sample_seed(0, engine_seed=0, request_number=0) != first


def test_vocab_check_names_the_id_outside():
    params = SamplingParams(stop_token_ids=[9], logit_bias={4: 1.0})
    params.check_vocab(10)
    with pytest.raises(InvalidRequestError, match=r"stop_token_ids=9: .* vocabulary of 9"):
        params.check_vocab(9)
    with pytest.raises(InvalidRequestError, match="logit_bias=4"):
        SamplingParams(logit_bias={4: 1.0}).check_vocab(4)


def test_import_needs_no_torch():
    script = (
        "import sys, milepost.sampling_params; "
        "sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_form_may_be_a_mapping():
    params = SamplingParams(structured_outputs={"regex": "a"})
    assert params.structured_outputs == StructuredOutputs(regex="a")


def test_numpys_numbers_are_numbers():
    """A seed comes from one of its generators, a temperature from a sweep."""
    given = {"seed": np.int64(7), "max_tokens": np.int32(5), "temperature": np.float32(0.5)}
    params = SamplingParams(**given, top_p=np.float64(0.5), n=np.uint8(2))
    assert params == SamplingParams(seed=7, max_tokens=5, temperature=0.5, top_p=0.5, n=2)
    for name, value in given.items():
        assert type(getattr(params, name)) is type(value.item())


def test_numpys_arrays_are_lists_of_token_ids():
    ids, bias = np.array([3, 5]), np.float32(-0.5)
    given = {"stop_token_ids": ids, "allowed_token_ids": ids, "logit_bias": {ids[0]: bias}}
    params = SamplingParams(**given, stop=np.array(["a", "b"]))
    assert params == SamplingParams(
        stop_token_ids=[3, 5], allowed_token_ids=[3, 5], logit_bias={3: -0.5}, stop=["a", "b"]
    )
    assert set(map(type, (*params.stop_token_ids, *params.logit_bias))) == {int}


@pytest.mark.parametrize("value", [np.complex64(1), np.True_, np.ones(1), Fraction(1), Decimal(1)])
def test_other_numbers_are_refused(value):
    with pytest.raises(InvalidRequestError, match=r"^max_tokens="):
        SamplingParams(max_tokens=value)
    with pytest.raises(InvalidRequestError, match=r"^seed="):
        SamplingParams(seed=value)
