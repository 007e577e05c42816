"""Command lines in the documentation and in deploy/ are ones that the command takes."""

import io
import json
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from milepost.cli.display import Screen
from milepost.cli.main import build_app, main
from milepost.cli.simulate_settings import Settings
from milepost.cli.vllm_flags import known, translated
from milepost.config import EngineConfig
from milepost.server.config import ServerConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
DEPLOY = ROOT / "deploy"


def commands():
    """(page, arguments) of each `milepost ...` in a block of code."""
    for page in PAGES:
        lines = iter(page.read_text().splitlines())
        is_block = False
        for line in lines:
            if line.startswith("```"):
                is_block = not is_block
            found = re.match(r"(?:/\S*/)?milepost ", line.strip())
            if not found or not (is_block or line.startswith("    ")):
                continue
            text = line.strip()
            while text.endswith("\\") or text.count("'") % 2:
                text = text.removesuffix("\\") + " " + next(lines).strip()
            text = re.split(r"\s{3,}", text)[0]  # what it is for stands behind it
            yield page.name, tuple(shlex.split(text, comments=True)[1:])


@pytest.mark.parametrize(("page", "arguments"), sorted(set(commands())), ids=str)
def test_commands_of_the_documentation_parse(page, arguments):
    arguments = list(arguments)
    if arguments[0] == "serve":
        assert served(arguments[1:])
        return
    screen = Screen(answers=io.StringIO(), reports=Console(file=io.StringIO()), clock=lambda: 0.0)
    app = build_app(lambda _: None, screen, sys.stdin, lambda *_: 0)
    app.parse_args(arguments, exit_on_error=False, print_error=False)


def served(arguments):
    """The configurations that a command line of `milepost serve` makes."""
    found = []
    assert main(["serve", *arguments], serve=lambda *both: found.append(both) or 0) == 0
    return found[0]


def test_there_are_commands_to_look_at():
    assert len(set(commands())) > 20


COMMANDS = (
    "bench",
    "chat",
    "generate",
    "kernels",
    "plan",
    "run-batch",
    "serve",
    "simulate",
    "warm",
)
OTHERS = {"--mamba-full-memory-ratio"}
"""Flags of programs that are not ours, and that no script or test of ours gives them."""


@pytest.fixture(scope="module")
def flags():
    """Those of our commands, of `vllm serve`, and those that scripts and tests know or give."""
    found = {f"--{name}" for name in known()} | OTHERS
    for command in COMMANDS:
        with pytest.MonkeyPatch.context() as patch, io.StringIO() as text:
            patch.setenv("COLUMNS", "300")
            patch.setattr(sys, "stdout", text)
            assert main([command, "--help"]) == 0
            found |= set(FLAG.findall(text.getvalue()))
    for folder in ("bench", "tests", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r'"(--[a-z][\w-]*)"', path.read_text()))
    return found


FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]+")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_that_a_page_names_exist(page, flags):
    assert set(FLAG.findall(page.read_text())) <= flags


DEFAULT = re.compile(r"`(--[a-z][\w-]+)` \(([\d.]+)\)")


def test_defaults_that_pages_name_are_those():
    own = {
        f"--{field.name.replace('_', '-')}": field.default
        for config in (EngineConfig, ServerConfig, Settings)
        for field in fields(config)
    }
    found = [pair for page in PAGES for pair in DEFAULT.findall(page.read_text())]
    assert len(found) > 5
    assert {name: float(value) for name, value in found} == {name: own[name] for name, _ in found}


def test_the_image_listens_where_its_healthcheck_and_ports_say():
    text = (DEPLOY / "Dockerfile").read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (.*)", text, re.M)
    command, serve, *arguments = json.loads(entry)
    assert (command, serve) == ("milepost", "serve")
    server, _ = served(arguments)
    assert server.host == "0.0.0.0"
    assert served([*arguments, "./m", "--port", "9000"])[0].port == 9000
    assert f"EXPOSE {server.port}\n" in text
    assert f"http://127.0.0.1:{server.port}/health" in text
    for copied in re.findall(r"^COPY (.*) \S+$", text, re.M):
        assert all((ROOT / name).exists() for name in copied.split())


def test_compose_kubernetes_and_systemd_say_what_the_server_takes():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["milepost"]
    server, engine = served(compose["command"])
    assert float(compose["stop_grace_period"].removesuffix("s")) > server.shutdown_timeout_s + 5
    assert (ROOT / compose["build"]["dockerfile"]).exists()
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (pod,) = [d["spec"]["template"]["spec"] for d in documents if d["kind"] == "Deployment"]
    (container,) = pod["containers"]
    assert served(container["args"])[1].model == engine.model
    assert pod["terminationGracePeriodSeconds"] > server.shutdown_timeout_s + 5
    unit = (DEPLOY / "milepost.service").read_text()
    (line,) = re.findall(r"^ExecStart=(.*)", unit, re.M)
    assert served(translated(line.split()[2:]))[1].model == engine.model
