import errno
import io

import pytest
from rich.console import Console

from milepost.cli.display import Screen
from milepost.cli.main import main
from milepost.errors import EngineDeadError


def run(*arguments, status=0, error=None):
    """The exit status, what was asked to be served, and what was written."""
    asked = []

    def serve(server, engine):
        asked.append((server, engine))
        if error is not None:
            raise error
        return status

    reports = Console(file=io.StringIO(), width=200, highlight=False)
    screen = Screen(answers=io.StringIO(), reports=reports, clock=lambda: 0.0)
    found = main(["serve", *arguments], screen=screen, serve=serve)
    return found, asked, reports.file.getvalue()


def test_defaults_are_local():
    status, [(server, engine)], _ = run()
    assert status == 0
    assert (server.host, server.port, server.api_key) == ("127.0.0.1", 8000, None)
    assert engine.model is None


def test_flags_of_both_sides():
    _, [(server, engine)], _ = run(
        "./model", "--port", "1", "--api-key", "a", "--api-key", "b", "--max-num-seqs", "3",
        "--no-access-log", "--served-model-name", "x", "--no-enable-prefix-caching",
    )  # fmt: skip
    assert (server.port, list(server.api_key), server.access_log) == (1, ["a", "b"], False)
    assert list(server.served_model_name) == ["x"]
    assert (engine.model, engine.max_num_seqs, engine.enable_prefix_caching) == (
        "./model",
        3,
        False,
    )


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "-tp"])
def test_ranks_have_vllms_names(flag):
    _, [(_, engine)], _ = run("./model", flag, "2", "--enable-expert-parallel")
    assert (engine.tensor_parallel_size, engine.enable_expert_parallel) == (2, True)


def test_the_servers_status_is_the_commands():
    assert run(status=1)[0] == 1


@pytest.mark.parametrize(
    "flags",
    [
        ("--port", "70000"),
        ("--max-waiting", "-1"),
        ("--request-timeout-s", "0"),
        ("--max-queue-wait-s", "0"),
        ("--max-queue-wait-s", "nan"),
        ("--api-key", ""),
        ("--page-size", "7"),
        ("--nonsense", "1"),
    ],
)
def test_mistakes_are_named(flags):
    status, asked, text = run(*flags)
    assert (status, asked) == (2, [])
    assert flags[0].removeprefix("--").replace("-", "_") in text.replace("-", "_")


def test_an_engine_that_dies_while_it_starts_is_one_line():
    status, _, text = run(error=EngineDeadError("the engine process ended while it started"))
    assert status == 2
    assert text.count("\n") == 1


def test_two_models_are_one_too_many():
    status, asked, text = run("./m", "--model", "./n")
    assert (status, asked) == (2, [])
    assert "./m --model ./n: name one model" in text
    assert run("./m", "--model", "./m")[1][0][1].model == "./m"
    assert run("--model", "./n")[1][0][1].model == "./n"


def test_a_working_directory_that_was_deleted_is_one_line(tmp_path, monkeypatch):
    """As after a redeployment: neither a process can be started in it, nor torch imported."""
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    status, asked, said = run()
    assert (status, asked) == (2, [])
    assert said.startswith("milepost: error: the working directory was deleted")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files: raise `ulimit -n`"),
        (PermissionError(errno.EACCES, "Permission denied", "m/a"), "m/a: Permission denied"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "aa"), "aa: File name too long"),
    ],
)
def test_what_the_system_refuses_is_one_line(error, words):
    assert run(error=error)[::2] == (1, f"milepost: error: {words}\n")
