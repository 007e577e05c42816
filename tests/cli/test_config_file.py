"""Flags in a YAML file."""

import pytest

from milepost.cli.config_file import with_file
from milepost.cli.main import main

TEXT = """
model: ./m
max_model_len: 32k
served-model-name: [a, b]
block-size: 32
enable-prefix-caching: false
enforce-eager: true
trust-remote-code: true
allowed-origins: ["http://x"]
hf-overrides: {text_config: {eos_token_id: 3}}
kv-transfer-config: null
seed: 5
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "flags.yaml"
    path.write_text(TEXT)
    return str(path)


def asked(*flags):
    found = []
    assert main(["serve", *flags], serve=lambda *configs: found.append(configs) or 0) == 0
    return found[0]


def test_its_flags_are_those_of_a_command_line(file):
    server, engine = asked("--config", file)
    assert (engine.model, engine.max_model_len, engine.page_size) == ("./m", 32000, 32)
    assert (engine.enable_prefix_caching, engine.enforce_eager, engine.seed) == (False, True, 5)
    assert engine.overrides == {"text_config": {"eos_token_id": 3}}
    assert list(server.served_model_name) == ["a", "b"]
    assert list(server.allowed_origins) == ["http://x"]


def test_the_command_line_comes_first(file):
    flags = ("--max-model-len=2", "--page_size", "16", "--enable-prefix-caching")
    server, engine = asked("./other", f"--config={file}", *flags, "--served-model-name", "c")
    assert (engine.model, engine.max_model_len, engine.page_size) == ("./other", 2, 16)
    assert (engine.enable_prefix_caching, engine.seed) == (True, 5)
    assert list(server.served_model_name) == ["c"]


def test_short_names_are_known(tmp_path):
    (tmp_path / "f.yaml").write_text("tensor-parallel-size: 4\nspeculative-config: {method: mtp}\n")
    flags = ("-tp", "2", "--speculative-config.method", "suffix")
    _, engine = asked("--config", str(tmp_path / "f.yaml"), *flags)
    assert (engine.tensor_parallel_size, engine.speculative_config.method) == (2, "suffix")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "expected the node content"),
        ("[1, 2]", "use names of flags"),
        ("1: 2", "use names of flags"),
        ("config: x.yaml", "a file cannot name another one"),
        ("lora-modules: [a=b]", "--lora-modules a=b is not supported"),
        ("no-such-flag: 1", "no-such-flag"),
        (None, "No such file"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, capsys, text, words):
    if text is not None:
        (tmp_path / "f.yaml").write_text(text)
    assert main(["serve", "--config", str(tmp_path / "f.yaml")], serve=lambda *_: 0) == 2
    assert words in capsys.readouterr().err


def test_a_missing_value_and_an_empty_file(tmp_path, capsys):
    assert main(["serve", "--config"], serve=lambda *_: 0) == 2
    assert "a value is missing" in capsys.readouterr().err
    (tmp_path / "f.yaml").write_text("")
    assert with_file(["./m", "--config", str(tmp_path / "f.yaml"), "--seed", "1"]) == [
        "./m",
        "--seed",
        "1",
    ]
