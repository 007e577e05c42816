"""What `--speculative-config` takes, and how it says what is wrong."""

from __future__ import annotations

import json

import msgspec
import pytest

from milepost.cli.flags import ENGINE
from milepost.config import EngineConfig
from milepost.errors import ConfigError
from milepost.speculative import FirstOf, HeadDrafter, SuffixDrafter, drafter_of
from milepost.speculative_config import SpeculativeConfig


def read(value):
    return EngineConfig(speculative_config=value).speculative_config


def test_a_mapping_its_json_and_itself_are_the_same():
    given = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    config = read(given)
    assert config == read(json.dumps(given)) == read(config)
    assert (config.methods, config.num_tokens, config.lookup) == (("ngram",), 4, (3, 3))
    assert read(None) is read("null") is None
    settings = {"speculative_config": json.dumps(given)}
    assert ENGINE.build(settings).speculative_config == config


def test_it_can_be_recorded():
    config = EngineConfig(speculative_config={"method": ["suffix", "mtp"]})
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig)
    assert again == config
    assert again.speculative_config.methods == ("suffix", "mtp")


@pytest.mark.parametrize(
    ("given", "num_tokens"),
    [({}, 3), ({"method": "suffix"}, 8), ({"method": ["suffix", "mtp"]}, 3)],
)
def test_the_number_of_drafts_has_a_default(given, num_tokens):
    assert read(given).num_tokens == num_tokens


def test_what_vllms_command_lines_say_is_understood():
    assert read({"method": "qwen3_next_mtp", "num_speculative_tokens": 2}).methods == ("mtp",)
    assert read({"method": "mtp", "draft_tensor_parallel_size": 1}).methods == ("mtp",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "use a JSON object"),
        (7, "use a JSON object"),
        ({"methods": "mtp"}, "unknown field 'methods'"),
        ({"method": "eagle3"}, "method='eagle3': not supported here, use one of auto, mtp"),
        ({"method": "magic"}, "method='magic': use one of"),
        ({"method": []}, "name at least one"),
        ({"method": ["suffix", "suffix"]}, "name each once"),
        ({"method": ["auto", "ngram"]}, "stands alone"),
        ({"method": "ngram"}, "num_speculative_tokens must be provided"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0: use 1 or more"),
        ({"num_speculative_tokens": 33}, "use 32 or fewer"),
        ({"num_speculative_tokens": 2.5}, "use 32 or fewer"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens=True"),
        ({"suffix_decoding_min_token_prob": -1}, "suffix_decoding_min_token_prob=-1"),
        (
            {"prompt_lookup_min": 5, "prompt_lookup_max": 2},
            "prompt_lookup_min=5 must be <= prompt_lookup_max=2",
        ),
        ({"model": "some/draft"}, "model='some/draft': not supported here"),
        ({"adaptive": 1}, "adaptive=1"),
        ({"rejection_sample_method": "block"}, "rejection_sample_method='block': use one of"),
        ({"rejection_sample_method": "synthetic"}, "goes with"),
        ({"synthetic_acceptance_rates": [0.5] * 3}, "goes with"),
    ],
)
def test_what_is_wrong_is_said_by_name(given, message):
    with pytest.raises(ConfigError, match="speculative_config") as caught:
        read(given)
    assert message in str(caught.value)


@pytest.mark.parametrize("rates", [[0.5], [0.5, 0.6, 0.1], [1.5, 0.5, 0.1], [0.5, 0.4, -0.1]])
def test_synthetic_rates_are_one_a_draft_and_fall(rates):
    with pytest.raises(ConfigError, match="synthetic_acceptance_rates"):
        SpeculativeConfig(
            rejection_sample_method="synthetic", synthetic_acceptance_rates=tuple(rates)
        )


def test_drafters_are_made_in_the_order_of_the_methods():
    head = HeadDrafter()
    assert isinstance(drafter_of(SpeculativeConfig(method="suffix")), SuffixDrafter)
    assert isinstance(drafter_of(SpeculativeConfig(method=("suffix", "mtp")), head), FirstOf)
    assert drafter_of(SpeculativeConfig(), head) is head
