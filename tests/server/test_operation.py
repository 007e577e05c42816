"""What routers, proxies, browsers and operators ask for."""

import re
import ssl
import subprocess
from datetime import datetime

import httpx
import pytest

from milepost.cli.main import main
from milepost.errors import ConfigError
from milepost.server.config import ServerConfig
from milepost.server.run import _check_tls
from tests.server.conftest import serving
from tests.server.inprocess import answered

PROMPT = {"model": "tiny", "prompt": "the quick brown fox " * 40, "max_tokens": 2}
HELLO = [{"role": "user", "content": "the quick"}]


def test_the_page_of_the_api_loads_nothing_from_elsewhere(http):
    """It is blank otherwise where a browser reaches this server alone."""
    page = http.get("/docs").text
    loaded = re.findall(r"""(?:src|href)=["']([^"']+)""", page)
    assert len(loaded) == 3
    assert "//" not in "".join(loaded)
    script, style, icon = (
        http.get(next(p for p in loaded if end in p)) for end in ("js", "css", "png")
    )
    assert b"SwaggerUIBundle" in script.content
    assert b".swagger-ui" in style.content
    assert icon.headers["content-type"] == "image/png"


def test_what_routers_ask(http):
    assert http.get("/ping").status_code == http.post("/ping").status_code == 200
    assert http.get("/load").json() == {"server_load": 0}
    info = http.get("/server_info?config_format=json").json()
    assert info == http.get("/get_server_info").json()
    assert info["vllm_config"]["cache_config"]["block_size"] == info["block_size"] == 64
    assert info["vllm_config"]["model_config"]["served_model_name"] == ["tiny"]
    assert info["model_id"] == "tiny"
    for asleep in (http.post("/sleep"), http.post("/wake_up"), http.get("/is_sleeping")):
        assert asleep.status_code == 404
        assert "--enable-sleep-mode" in asleep.json()["error"]["message"]


def test_sagemaker_sends_chats_and_completions_to_one_path(http):
    greedy = {"temperature": 0, "max_tokens": 4, "return_token_ids": True}
    for path, own in (("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "a"})):
        asked = {**own, **greedy}
        here, there = (
            http.post(each, json=asked).json() for each in ("/invocations", f"/v1/{path}")
        )
        assert here["object"] == there["object"]
        assert here["choices"] == there["choices"]
    streamed = http.post("/invocations", json={"messages": HELLO, **greedy, "stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")
    wrong = http.post("/invocations", json={"messages": [{"role": "user", "content": 5}]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages[0].content")
    wrong = http.post("/invocations", json={"inputs": "a"})
    assert wrong.json()["error"]["message"] == "prompt: this field is required"
    assert http.post("/invocations", json=[]).status_code == 400


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-keyout", "key.pem", "-out", "cert.pem", *names]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


def test_a_server_with_all_of_it(folder, certificate):
    """TLS, a root path, cross-origin requests, request ids, a template and sleep, in one."""
    cert, key = map(str, certificate)
    flags = ["--ssl-certfile", cert, "--ssl-keyfile", key, "--root-path", "/api"]
    flags += ["--enable-request-id-headers", "--enable-sleep-mode", "--trust-remote-code"]
    flags += ["--allowed-origins", '["https://a.example"]', "--enable-auto-tool-choice"]
    flags += ["--chat-template", "{% for m in messages %}{{ m.content }}{% endfor %}"]
    with serving(folder, *flags) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=cert)
        with httpx.Client(base_url=server.url, verify=context, timeout=60) as http:
            check_tls_paths_and_headers(http)
            check_sleep(http)


def check_tls_paths_and_headers(http):
    asked = {"origin": "https://a.example", "x-request-id": "mine"}
    got = http.get("/api/health", headers=asked)
    assert (got.status_code, got.headers["x-request-id"]) == (200, "mine")
    assert got.headers["access-control-allow-origin"] == "https://a.example"
    assert http.get("/health").headers["x-request-id"], "one is made"
    assert "/api/openapi.json" in http.get("/api/docs").text
    plain = http.post("/tokenize", json={"prompt": "the quick"}).json()["tokens"]
    assert http.post("/tokenize", json={"messages": HELLO}).json()["tokens"] == plain


def check_sleep(http):
    assert http.post("/v1/completions", json=PROMPT).status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert http.post("/sleep?level=1").json() == {"status": "sleeping", "level": 1}
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    refused = http.post("/v1/completions", json=PROMPT)
    assert (refused.status_code, "wake_up" in refused.text) == (503, True)
    assert 'sleep_state="awake"} 0.0' in http.get("/metrics").text
    refused = http.post("/sleep?level=2")
    assert refused.status_code == 400, "weights are not dropped"
    assert refused.json()["error"]["message"].startswith("level: "), refused.text
    assert http.post("/wake_up").json() == {"status": "awake"}
    woken = http.post("/v1/completions", json=PROMPT).json()
    assert woken["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "it was forgotten"


def test_a_root_path_opens_nothing():
    """What an admin key guards is guarded under every spelling of its path."""
    config = ServerConfig(api_key=["k"], admin_key=["a"], root_path="/api")
    headers = {"authorization": "Bearer k"}
    for path, status in (
        ("/metrics", 401),
        ("/api/metrics", 401),
        ("/api/api/metrics", 404),
        ("/api/v1/models", 200),
        ("/apiary", 404),
    ):
        assert answered(config, path, headers=headers).status_code == status, path
    assert answered(config, "/api/v1/models").status_code == 401


def test_behind_a_root_path_errors_hint_as_without_one():
    for root, cut in (("", ""), ("/api", ""), ("/api", "/api")):  # a proxy may cut it off, or not
        for path, words in (
            ("/sleep", f"{root}/sleep is not served: start the server with --enable-sleep-mode"),
            ("/v1/rerank", f"{root}/v1/rerank is not served: this server's models generate text"),
            ("/v1/moderations", f"{root}/v1/moderations does not exist: {root}/docs lists"),
            ("/v1/completions", f"{root}/v1/completions does not take GET: use POST"),
        ):
            error = answered(ServerConfig(root_path=root or None), cut + path).json()["error"]
            assert error["message"].startswith(words), (root, cut)


def test_other_origins_get_nothing_unless_they_may():
    origin = {"origin": "https://b.example"}
    response = answered(ServerConfig(), "/v1/models", headers=origin)
    assert "access-control-allow-origin" not in response.headers
    config = ServerConfig(allowed_origins=["https://a.example"], api_key=["k"])
    response = answered(config, "/v1/models", headers=origin)
    assert "access-control-allow-origin" not in response.headers
    mine = answered(config, "/v1/models", headers={"origin": "https://a.example"})
    assert mine.status_code == 401
    assert mine.headers["access-control-allow-origin"] == "https://a.example"


def test_models_in_the_shape_that_their_client_reads():
    headers = {"anthropic-version": "2023-06-01"}
    listed = answered(ServerConfig(), "/v1/models", headers=headers).json()
    one = answered(ServerConfig(), "/v1/models/tiny", headers=headers).json()
    created = [each.pop("created_at") for each in (one, *listed["data"])]
    assert listed["data"] == [one]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("tiny", "tiny", False)
    assert (one["type"], one["id"], one["display_name"]) == ("model", "tiny", "tiny")
    assert None not in [datetime.fromisoformat(each).tzinfo for each in created]
    assert "object" in answered(ServerConfig(), "/v1/models/tiny").json()


def test_models_say_what_they_take():
    model = answered(ServerConfig(max_request_bytes=4096), "/v1/models/tiny").json()
    assert (model["input_modalities"], model["max_request_bytes"]) == (["text"], 4096)


def test_flags_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="root_path"):
        ServerConfig(root_path="api")
    with pytest.raises(ConfigError, match="ssl_certfile"):
        ServerConfig(ssl_keyfile="k")
    with pytest.raises(ConfigError, match="JSON"):
        ServerConfig(allowed_origins=["["])
    (tmp_path / "no.pem").write_text("no")
    with pytest.raises(ConfigError, match=r"no\.pem"):
        _check_tls(ServerConfig(ssl_certfile=str(tmp_path / "no.pem")))


VLLM = (
    "--trust-remote-code --dtype auto --max-model-len 512 --enable-auto-tool-choice "
    "--tool-call-parser hermes --reasoning-parser qwen3 --enable-prompt-tokens-details "
    "--disable-log-requests --enable-log-requests --uvicorn-log-level warning --block-size 32 "
    "--served-model-name a --gpu-memory-utilization 0.8 --enable-chunked-prefill --swap-space 4 "
    "--no-enable-prefix-caching --max-num-seqs 4 --max-num-batched-tokens 2048 --seed 1 "
    "--generation-config vllm --disable-uvicorn-access-log --tensor-parallel-size 1 "
    "--kv-cache-dtype auto --tokenizer-mode auto --root-path /v --enforce-eager --api-key k"
)


def test_vllms_flags_are_taken():
    asked = []
    main(["serve", "./m", *VLLM.split()], serve=lambda *configs: asked.append(configs) or 0)
    ((server, engine),) = asked
    assert (engine.page_size, engine.max_model_len, server.access_log) == (32, 512, False)


def test_vllms_name_of_host_memory_is_ours():
    asked = []
    main(["serve", "--kv-offloading-size", "2"], serve=lambda *configs: asked.append(configs) or 0)
    ((_, engine),) = asked
    assert engine.cache_host_gib == 2


@pytest.mark.parametrize(
    "flags",
    ["--kv-cache-dtype fp8_e5m2", "--enable-lora", "--pipeline-parallel-size 2"],
)
def test_vllms_flags_that_would_change_what_is_served_are_refused(flags, capsys):
    assert main(["serve", *flags.split()], serve=lambda *_: 0) == 2
    assert f"{flags.split()[0]}" in capsys.readouterr().err
