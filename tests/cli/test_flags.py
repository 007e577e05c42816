import inspect
from dataclasses import dataclass, fields

import pytest
from cyclopts import Group

from milepost.cache import CacheReport
from milepost.cli.flags import ENGINE, Flags, field_docs
from milepost.cli.generate import SAMPLING
from milepost.cli.main import main
from milepost.cli.simulate_settings import Settings
from milepost.config import EngineConfig
from milepost.engine.outputs import CompletionOutput, RequestOutput
from milepost.kv_config import KVEventsConfig, KVTransferConfig
from milepost.load.drive import DriveConfig
from milepost.load.workloads import WorkloadConfig
from milepost.sampling_params import SamplingParams, StructuredOutputs
from milepost.server.config import ServerConfig
from milepost.speculative_config import SpeculativeConfig

PUBLIC = (
    *(CacheReport, CompletionOutput, RequestOutput, SamplingParams, StructuredOutputs),
    *(EngineConfig, KVEventsConfig, KVTransferConfig, ServerConfig, SpeculativeConfig),
    *(DriveConfig, Settings, WorkloadConfig),
)


@pytest.mark.parametrize("config", PUBLIC)
def test_every_field_has_a_docstring(config):
    assert set(field_docs(config)) == {field.name for field in fields(config)}


def test_a_docstring_over_two_lines_is_one_paragraph():
    assert "block-aligned prefill chunk" in field_docs(EngineConfig)["mamba_cache_mode"]


@pytest.mark.parametrize("flags", [ENGINE, SAMPLING])
def test_no_flags_give_the_defaults(flags):
    defaults = {parameter.name: parameter.default for parameter in flags.parameters()}
    assert flags.build(defaults) == flags.build({}) == flags.config(**flags.defaults)


def test_the_commands_flags_have_different_names():
    names = [p.name for flags in (ENGINE, SAMPLING) for p in flags.parameters()]
    assert len(names) == len(set(names))


def test_renamed_and_left_out_fields():
    @dataclass(kw_only=True)
    class Config:
        a: int = 1
        """The first."""
        b: int = 2
        c: int = 3

    flags = Flags(config=Config, group=Group("x"), renamed={"a": "first"}, left_out=("c",))
    assert [parameter.name for parameter in flags.parameters()] == ["first", "b"]
    assert flags.parameters()[0].kind is inspect.Parameter.KEYWORD_ONLY
    assert flags.build({"first": 7, "a": 8, "other": 9}) == Config(a=7)


@pytest.mark.parametrize("value", ["80.7", "1.5", "nan", "inf", "1e2", "x"])
@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--port"),
        ("serve", "--num-pages"),
        ("generate", "a", "--max-tokens"),
        ("generate", "a", "--stop-token-ids"),
        ("generate", "a", "--repeat"),
        ("bench", "--concurrency"),
        ("simulate", "a", "--limit"),
        ("simulate", "a", "--fleet"),
        ("simulate", "a", "--fleet", "8"),
        ("simulate", "a", "--seeds"),
    ],
    ids=" ".join,
)
def test_a_number_that_is_not_whole_is_refused_and_not_rounded(capsys, words, value):
    assert main([*words, value], serve=lambda *_: 0, open_engine=_no_engine) == 2
    flag = next(word for word in words if word.startswith("--"))
    assert f'value for {flag}: unable to convert "{value}" into int' in capsys.readouterr().err


def _no_engine(_config):
    raise AssertionError("it is refused before")


@pytest.mark.parametrize("value", ["80", "80.0", "0x50", "+80"])
def test_whole_numbers_may_be_written_in_any_way(value):
    found = []
    main(["serve", "--port", value], serve=lambda server, _: found.append(server.port) or 0)
    assert found == [80]


def test_none_is_still_said_by_its_name():
    found = []
    main(["serve", "--num-pages", "none"], serve=lambda _, engine: found.append(engine) or 0)
    assert found[0].num_pages is None
    assert main(["serve", "--port", "none"], serve=lambda *_: 0) == 2
