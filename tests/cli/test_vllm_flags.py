"""Command lines that people have for `vllm serve`."""

import pytest

from milepost.cli.flags import ENGINE
from milepost.cli.main import main
from milepost.cli.serve import SERVER
from milepost.cli.vllm_flags import known, translated
from milepost.errors import ConfigError


def asked(*flags):
    found = []
    assert main(["serve", *flags], serve=lambda *configs: found.append(configs) or 0) == 0
    return found[0]


LINES = (
    "./m --tensor-parallel-size=2 --max_model_len 32K --gpu_memory_utilization=0.85 --dtype half "
    "--enable-chunked-prefill --max-num-batched-tokens 8k --disable-log-requests --swap-space 4",
    "./m -tp 2 -pp 1 -dp 1 -O3 --compilation-config {} --no-enable-log-requests --task generate "
    "--max-model-len auto --tool-call-parser qwen3_coder --enable-auto-tool-choice -q fp8",
    "--swap-space 4 ./m -asc 1 --cudagraph-capture-sizes 1 2 4 --trust-remote-code "
    "--no-enforce-eager",
    '--model ./m --limit-mm-per-prompt {"image":0} --async-scheduling --seed 0 -ep',
    # As cards and recipes of Nemotron 3, Nemotron Nano 2 and Qwen3-Next print them.
    "./m --max-num-seqs 8 --trust-remote-code --enable-auto-tool-choice --tool-call-parser "
    "qwen3_coder --reasoning-parser-plugin nano_v3_reasoning_parser.py --reasoning-parser nano_v3",
    "./m --kv-cache-dtype fp8 --mamba-backend triton --mamba-ssm-cache-dtype float32 "
    "--load-format fastsafetensors --mamba-ssu-algorithm horizontal --linear-backend humming",
    "./m --tool-call-parser-plugin ./nemotron_toolcall_parser_no_streaming.py "
    "--tool-call-parser nemotron_json",
    '--compilation_config.cudagraph_mode=PIECEWISE ./m -O.level=3 -cc {"level":3} '
    "-cc.cudagraph_mode FULL --kernel-config.moe_backend=triton --attention-config {}",
    "./m --log-error-stack --no-enable-log-deltas --kda-prefill-backend auto --eplb-config {} "
    '--config-format hf --fingerprint-mode none --disable-async-output-proc -sc {"method":"mtp"}',
    '--mm-processor-cache-type shm ./m --speculative-config {"method":"nemotron_h_mtp",'
    '"num_speculative_tokens":3,"moe_backend":"triton","attention_backend":"FLASHINFER"}',
)


@pytest.mark.parametrize("line", LINES)
def test_lines_are_taken_as_they_are(line):
    _, engine = asked(*line.split())
    assert engine.model == "./m"


@pytest.mark.parametrize("line", ["--model ./m {}", "{} --model=./m", "./m {}"])
def test_several_names_are_one_list(line):
    server, engine = asked(*line.format("--served-model-name a b").split())
    assert (engine.model, list(server.served_model_name)) == ("./m", ["a", "b"])


def test_names_and_values_of_vllms_are_ours():
    line = "./m --max-model-len 32K --max-num-batched-tokens 8k --dtype half --block-size 32"
    line += " --served-model-name a b --kv-offloading-size 2 --disable-uvicorn-access-log"
    line += " --shutdown-timeout 7 --speculative-config.method mtp"
    line += " --speculative-config.num_speculative_tokens 2 --kv-cache-memory-bytes 1.5G"
    line += " --enable-force-include-usage"
    server, engine = asked(*line.split())
    assert (engine.kv_cache_memory_bytes, server.enable_force_include_usage) == (3 << 29, True)
    assert (engine.max_model_len, engine.max_num_batched_tokens) == (32768, 8000)
    assert (engine.dtype, engine.page_size, engine.cache_host_gib) == ("float16", 32, 2)
    assert (list(server.served_model_name), server.access_log) == (["a", "b"], False)
    assert server.shutdown_timeout_s == 7
    assert engine.speculative_config.num_speculative_tokens == 2
    assert asked("./m", "--max-model-len", "-1")[1].max_model_len is None
    line = (
        "./m --api-key a b --reasoning-parser super_v3 --load-format runai_streamer -q awq_marlin"
    )
    server, engine = asked(*line.split())
    assert (list(server.api_key), server.reasoning_parser) == (["a", "b"], "nemotron_v3")
    assert (engine.load_format, engine.quantization) == ("auto", "awq")
    line = "./m --max-model-len 1010000 --hf-overrides.text_config.rope_parameters.factor 4.0"
    assert asked(*line.split(), "--hf_overrides.a", "b")[1].overrides == {
        "text_config": {"rope_parameters": {"factor": 4.0}},
        "a": "b",
    }


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--lora-modules a=b c=d --port 1", "--lora-modules a=b c=d is not supported: merge"),
        ("-dp 4", "--data-parallel-size 4 is not supported: run one server for each GPU behind a"),
        ("--data-parallel-hybrid-lb", "or on Ray Serve (docs/disaggregation.md)"),
        ("--num-speculative-tokens 3", "use --speculative-config"),
        ("--fingerprint-mode hash", "responses have no system_fingerprint"),
        ("--pooler-config {}", "only text"),
        ("--task embed", "--task embed is not supported: only text"),
        ("--cpu-offload-gb=10", "--cpu-offload-gb 10 is not supported: weights stay"),
        ("-asc 4", "--api-server-count 4 is not supported: one process serves HTTP"),
        ("--swap-space", "--swap-space: a value is missing"),
        ("--compilation-config.level", "--compilation-config: a value is missing"),
        ("--hf-overrides.a 1 --hf-overrides.a.b 2", "--hf-overrides.a.b 2: a is 1, not an object"),
        ("--hf-overrides.a.b 2 --hf-overrides.a 1", "--hf-overrides.a 1: a is an object"),
        ("--reasoning-parser-plugin ./my.py", "./my.py is not supported: --reasoning-parser lists"),
        ("--kv-cache-memory-bytes 0", "kv_cache_memory_bytes=0: use more than 0"),
    ],
)
def test_what_cannot_be_served_is_named(line, words, capsys):
    assert main(["serve", "./m", *line.split()], serve=lambda *_: 0) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert words in said


def test_our_own_lines_stay_as_they_are():
    line = ["./m", "--port", "0", "--api-key=a=b", "--no-ui", "--no-special-tokens-in-content"]
    assert translated(line)[:4] == ["./m", "--port", "0", "--api-key"]
    assert asked(*line)[0].api_key == ["a=b"]


def test_the_last_of_several_counts():
    """As for argparse: images and scripts have flags of their own before those that are given."""
    line = "--host 0.0.0.0 --port 8000 ./m --port=9000 --host ::1 -tp 2 --tensor_parallel_size 4"
    line += " --no-enable-prefix-caching --enforce-eager --enable-prefix-caching --enforce-eager"
    line += " --block-size 32 --page-size 16 --api-key a --api-key b --seed 1 --seed 2"
    server, engine = asked(*line.split())
    assert (server.host, server.port, list(server.api_key)) == ("::1", 9000, ["a", "b"])
    assert (engine.model, engine.tensor_parallel_size, engine.page_size) == ("./m", 4, 16)
    assert (engine.enable_prefix_caching, engine.enforce_eager, engine.seed) == (True, True, 2)


def test_an_object_and_a_key_of_it_are_too_much(capsys):
    flags = ("--speculative-config", '{"method":"mtp"}', "--speculative-config.method", "suffix")
    assert main(["serve", "./m", *flags], serve=lambda *_: 0) == 2
    assert "specified multiple times" in capsys.readouterr().err


def test_no_flag_of_ours_is_taken_out():
    own = {p.name.replace("_", "-") for flags in (SERVER, ENGINE) for p in flags.parameters()}
    assert own.isdisjoint(known())


def test_a_value_that_is_missing():
    with pytest.raises(ConfigError, match="value is missing"):
        translated(["--max-model-len"])


def test_the_hubs_token_need_not_be_said():
    assert asked("./m", "--hf-token", "--port", "1")[1].hf_token is None
    assert asked("./m", "--port", "1", "--hf-token")[1].hf_token is None
    engine = asked("./m", "--hf-token", "hf_secret")[1]
    assert engine.hf_token == "hf_secret"
    assert "secret" not in repr(engine)


@pytest.mark.parametrize("name", ["MILEPOST_API_KEY", "VLLM_API_KEY"])
def test_a_key_from_the_environment(name, monkeypatch):
    monkeypatch.setenv(name, "secret")
    assert asked()[0].api_key == ["secret"]
    assert asked("--api-key", "other")[0].api_key == ["other"]
    monkeypatch.setenv(name, "")
    assert asked()[0].api_key is None


def test_an_admin_key_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MILEPOST_ADMIN_KEY", "secret")
    assert asked()[0].admin_key == ["secret"]
    assert asked("--admin-key", "other")[0].admin_key == ["other"]
    assert asked("--admin-key-file", str(tmp_path / "keys"))[0].admin_key is None
    monkeypatch.delenv("MILEPOST_ADMIN_KEY")
    assert asked()[0].admin_key is None


@pytest.mark.parametrize(
    ("line", "value", "expected"),
    [
        ("./m", "1", True),
        ("./m", "0", False),
        ("./m", "", False),
        ("./m --batch-invariant", "1", True),
        ("./m --enable-deterministic-inference", "0", True),
    ],
)
def test_the_bitwise_mode_has_other_names(line, value, expected, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    assert asked(*line.split())[1].batch_invariant is expected


def test_a_strange_value_for_the_bitwise_mode(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "yes")
    assert main(["serve", "./m"], serve=lambda *_: 0) == 2
    assert "VLLM_BATCH_INVARIANT=yes: use 0 or 1" in capsys.readouterr().err
