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


def test_numbers_are_names_as_they_are_written(tmp_path):
    (tmp_path / "f.yaml").write_text("served-model-name: [1.10, 007]\nrevision: 2026-01-02\n")
    server, engine = asked("--config", str(tmp_path / "f.yaml"))
    assert (list(server.served_model_name), engine.revision) == (["1.10", "007"], "2026-01-02")


def test_anchors_and_merged_objects_are_known(tmp_path):
    (tmp_path / "f.yaml").write_text("<<: {seed: 1, port: 7}\nseed: &n 2\npage_size: *n\n")
    assert with_file(["--config", str(tmp_path / "f.yaml")]).words == [
        "--seed=2",
        "--port=7",
        "--page_size=2",
    ]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("seed: 1\na: [", 2, "expected the node content"),
        ("[1, 2]", 1, "use names of flags"),
        ("seed: 1\n1: 2", 2, "use names of flags"),
        ("'': 2", 1, "use names of flags"),
        ("config: x.yaml", 1, "a file cannot name another one"),
        ("max-model-len: 5\nmax_model_len: 5", 2, "max_model_len appears twice"),
        ("seed: 1\n---\nseed: 2", 2, "expected a single document"),
        ("hf-overrides: {a: 2026-01-02}", 1, "hf-overrides: use a text"),
        ("hf-overrides: &a {b: *a}", 1, "an alias inside an anchor"),
        ("seed: &a [*a]", 1, "an alias inside an anchor"),
        ("seed: 1\n<<: &a {<<: *a}", 2, "an alias inside an anchor"),
        ("seed: &a 1\nport: [" + "*a, " * 99 + "]", 2, "64 aliases at most"),
        ("seed: 1\nport: " + "[" * 5000, 2, "64 levels"),
        ("seed: !!python/object:a.b {}", 1, "seed: use a text"),
        ("lora-modules: [a=b]", 1, "--lora-modules a=b is not supported"),
        ("seed: 1\nno-such-flag: 1", 2, "Unknown option: --no-such-flag"),
        ("# ours\n\nport: abc", 3, 'Invalid value for --port: unable to convert "abc"'),
        ("model: m\nmax_num_seqs: 0", 2, "max_num_seqs=0: use 1"),
        ("kv-transfer-config: {kv_connector: b}", 1, "kv_transfer_config: kv_connector='b'"),
    ],
)
def test_what_is_wrong_is_one_line_that_says_where(tmp_path, capsys, text, line, words):
    (tmp_path / "f.yaml").write_text(text)
    assert main(["serve", "--config", str(tmp_path / "f.yaml")], serve=lambda *_: 0) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"milepost: error: --config {tmp_path}/f.yaml, line {line}: "), said
    assert words in said


def test_a_file_that_cannot_be_read(tmp_path, capsys):
    assert main(["serve", "--config", str(tmp_path / "f.yaml")], serve=lambda *_: 0) == 2
    assert f"--config {tmp_path}/f.yaml: No such file" in capsys.readouterr().err


def test_a_file_without_an_end(capsys):
    assert main(["serve", "--config", "/dev/zero"], serve=lambda *_: 0) == 2
    assert "--config /dev/zero: more than 262144 bytes" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--port", "abc"], ["--max-num-seqs", "0"]])
def test_what_is_wrong_on_the_command_line_is_not_the_files_fault(file, capsys, flags):
    assert main(["serve", "--config", file, *flags], serve=lambda *_: 0) == 2
    said = capsys.readouterr().err
    assert file not in said
    assert flags[0][2:].replace("-", "_") in said.replace("-", "_")


@pytest.mark.parametrize("command", ["serve", "run-batch"])
def test_help_lists_it(capsys, command):
    assert main([command, "--help"]) == 0
    assert "--config PATH" in capsys.readouterr().out


def test_a_missing_value_and_an_empty_file(tmp_path, capsys):
    assert main(["serve", "--config"], serve=lambda *_: 0) == 2
    assert "a value is missing" in capsys.readouterr().err
    (tmp_path / "f.yaml").write_text("")
    path = str(tmp_path / "f.yaml")
    assert with_file(["./m", "--config", path, "--seed", "1"]).words == ["./m", "--seed", "1"]
