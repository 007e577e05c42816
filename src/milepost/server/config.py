"""Configuration of the HTTP server; the flags of `milepost serve` are made from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from milepost.checks import flat_texts, read_mapping, require
from milepost.errors import ConfigError
from milepost.logs import LogFormat
from milepost.server.parsing.formats import REASONING, TOOL_CALLS
from milepost.server.tracing import read_endpoint

ToolParser = Literal["auto", *TOOL_CALLS, "none"]  # type: ignore[valid-type]
SchedulingPolicy = Literal["fcfs", "priority"]
ReasoningParser = Literal["auto", *REASONING, "none"]  # type: ignore[valid-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Configuration of one server; raises ConfigError."""

    host: str = "127.0.0.1"
    """Address to listen on. Other machines reach the server only if you say so here."""
    port: int = 8000
    """TCP port; 0 takes a free one and says which."""
    uds: str | None = None
    """Listen on this Unix domain socket rather than host and port."""
    served_model_name: Sequence[str] | None = None
    """Names by which requests may call the model; by default the checkpoint's. May be given several
    times."""
    api_key: Sequence[str] | None = None
    """Serve only requests that carry one of these keys (except /health and the page's files). May
    be given several times; by default the key in the environment variable MILEPOST_API_KEY or
    VLLM_API_KEY, if there is one."""
    admin_key: Sequence[str] | None = None
    """Only these keys open /metrics, /reset_prefix_cache, /sleep, /wake_up and the page's view of
    the cache; by default the API keys do. May be given several times; by default the key in the
    environment variable MILEPOST_ADMIN_KEY, if there is one."""
    admin_key_file: str | None = None
    """Read more admin keys from this file, one per line."""
    key_file: str | None = None
    """Read more API keys from this file, one per line. A command line is visible to other users."""
    max_waiting: int = 1024
    """How many answers may wait while max_num_seqs run; more are refused with 429."""
    request_timeout_s: float = 600.0
    """Time limit for a request, including its time in the queue."""
    step_timeout_s: float = 600.0
    """Time limit for one step of the engine. An engine that takes longer counts as hung and is
    killed: requests fail, and the server exits with status 1. 0 means no limit."""
    write_timeout_s: float = 30.0
    """How long a client may read nothing of a stream before its request is dropped."""
    shutdown_timeout_s: float = 30.0
    """How long running requests may go on after SIGTERM or Ctrl-C before they fail."""
    max_connections: int | None = None
    """How many connections may be open at once; by default what the system's limit of open files
    leaves. More get 503."""
    head_timeout_s: float = 30.0
    """Time limit for the first request's headers from the start of a connection, and for those of
    later requests from their first byte."""
    keep_alive_timeout_s: float = 120.0
    """How long a connection stays open without a request. Keep it longer than proxies do: a request
    sent while the server closes the connection gets no response."""
    body_timeout_s: float = 60.0
    """Longest pause in a request's body; then 408."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    """`fcfs`: in order of arrival; `priority`: requests may say how urgent they are."""
    grammar_timeout_s: float = 5.0
    """Limit on the processor time for compiling a schema, regular expression or grammar."""
    template_timeout_s: float = 10.0
    """Limit on the processor time for rendering a conversation with the chat template."""
    max_request_bytes: int = 16 * 2**20
    """Largest request body."""
    strict: bool = False
    """Refuse requests with unknown fields. By default such fields are ignored, and named in the log
    and in the response header `x-milepost-ignored`."""
    chat_template: str | None = None
    """File with a chat template, or the template itself, in place of the tokenizer's own."""
    default_chat_template_kwargs: str | None = None
    """Variables for chat templates unless a request sets them: a JSON object such as
    {"enable_thinking": false}."""
    override_generation_config: str | None = None
    """Sampling parameters for requests that do not set them, before those of the checkpoint: a JSON
    object such as {"temperature": 0.6}."""
    enable_force_include_usage: bool = False
    """Send the usage at the end of every stream, as if the request had asked for it."""
    root_path: str = ""
    """Path prefix under which a proxy exposes this server."""
    enable_request_id_headers: bool = False
    """Return each request's X-Request-Id, or a new one, as a header."""
    enable_sleep_mode: bool = False
    """Serve /sleep, /wake_up and /is_sleeping."""
    allowed_origins: Sequence[str] | None = None
    """Origins whose pages may call this server from a browser, `*` for all; none by default. May be
    given several times, or once as a JSON list."""
    allowed_methods: Sequence[str] | None = None
    """Methods that these pages may use; by default all."""
    allowed_headers: Sequence[str] | None = None
    """Headers that they may send; by default all."""
    allow_credentials: bool = False
    """Let them send cookies and other credentials."""
    allowed_hosts: Sequence[str] | None = None
    """Names under which this machine's proxies and browsers reach a server without API keys, such
    as llm.example, `*` for all; by default addresses and local names alone. May be given several
    times, or once as a JSON list."""
    ssl_keyfile: str | None = None
    """File with the key of the TLS certificate."""
    ssl_certfile: str | None = None
    """File with the TLS certificate; with it the server speaks HTTPS."""
    ssl_ca_certs: str | None = None
    """File with the authorities that sign clients' certificates, which are then required."""
    tool_call_parser: ToolParser = "auto"
    """Format of the model's tool calls; `auto` detects it from the chat template."""
    exclude_tools_when_tool_choice_none: bool = False
    """Leave tools out of the prompt if tool_choice is `none`. Such a prompt shares nothing with the
    conversation's other turns."""
    reasoning_parser: ReasoningParser = "auto"
    """Format of the model's reasoning; `auto` detects it from the chat template."""
    special_tokens_in_content: bool = False
    """Recognise special tokens in the text of messages. Whoever writes a message can then end it
    and continue in any role; by default special tokens there are plain text."""
    ui: bool = True
    """Serve a page at `/` with a chat and a live view of the cache."""
    access_log: bool = True
    """Write one JSON line per request to standard error, with the request's cache report."""
    otlp_traces_endpoint: str | None = None
    """Send a trace of each request to this OpenTelemetry collector, as OTLP over HTTP, such as
    http://localhost:4318/v1/traces."""
    log_format: LogFormat = "text"
    """`json`: log one JSON object a line, with the ids of requests and of their traces."""

    def __post_init__(self) -> None:
        for name in ("allowed_origins", "allowed_hosts", "allowed_methods", "allowed_headers"):
            default = () if name in ("allowed_origins", "allowed_hosts") else ("*",)
            object.__setattr__(self, name, flat_texts(getattr(self, name)) or default)
        read_object("default_chat_template_kwargs", self.default_chat_template_kwargs)
        read_object("override_generation_config", self.override_generation_config)
        if self.otlp_traces_endpoint is not None:
            read_endpoint(self.otlp_traces_endpoint)
        root = self.root_path
        is_path = not root or (root.startswith("/") and not root.endswith("/"))
        require(is_path, f"root_path={root!r}: begin it with / and do not end it with one")
        has_key = self.ssl_certfile is not None or (
            self.ssl_keyfile is None and self.ssl_ca_certs is None
        )
        require(has_key, f"ssl_keyfile={self.ssl_keyfile!r}: give ssl_certfile too")
        require(0 <= self.port < 65536, f"port={self.port}: use 0 to 65535")
        for name in (*_POSITIVE, "max_connections"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{name}={value}: use more than 0")
        for name in ("max_waiting", "step_timeout_s", "shutdown_timeout_s"):
            value = getattr(self, name)
            require(value >= 0, f"{name}={value}: use 0 or more")
        for name in ("api_key", "admin_key", "served_model_name"):
            has_text = all(text.strip() for text in getattr(self, name) or ())
            require(has_text, f"{name}='': use text that is not empty")


_POSITIVE = (
    "request_timeout_s", "write_timeout_s", "head_timeout_s", "keep_alive_timeout_s",
    "body_timeout_s", "grammar_timeout_s", "template_timeout_s", "max_request_bytes",
)  # fmt: skip


def read_object(name: str, text: str | None) -> dict[str, Any]:
    """Returns the JSON object in a setting. Raises ConfigError."""
    return dict(read_mapping(name, text or None) or {})


def read_template(given: str | None) -> str | None:
    """Returns a chat template from a file, or as it was given. Raises ConfigError for a missing
    file."""
    if given is None or "{{" in given or "{%" in given:
        return given
    return _read("chat_template", given)


def read_keys(name: str, path: str | None) -> list[str]:
    """Returns the lines of the key file that a setting names. Raises ConfigError if it cannot be
    read, has no key, or has a comment, which would be a key that is easily guessed."""
    if path is None:
        return []
    keys = [line.strip() for line in _read(name, path).splitlines() if line.strip()]
    require(bool(keys), f"{name}={path!r}: the file has no key")
    comments = [key for key in keys if key.startswith("#")]
    require(not comments, f"{name}={path!r}: a line begins with '#': write keys alone")
    return keys


def _read(name: str, path: str) -> str:
    """Returns the text of the file that a setting names."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)  # without the file's name
        raise ConfigError(f"{name}={path!r}: {why}") from error
