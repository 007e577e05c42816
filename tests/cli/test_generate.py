import io
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from milepost.cache.report import Lost
from milepost.errors import EngineDeadError, WeightsError

LONG = "one two three four five six seven"


def test_the_answer_goes_to_stdout_and_the_report_to_stderr(session):
    assert session.run("generate", LONG) == 0
    assert session.out == LONG.upper() + "\n"
    assert "7 tokens in 500 ms · the first after 250 ms · complete" in session.err
    assert "0 of 7 prompt tokens from the cache; computed 7: 7 not seen before" in session.err


def test_repeats_show_the_hits_and_a_summary(session):
    assert session.run("generate", LONG, "--repeat", "3") == 0
    assert session.out == (LONG.upper() + "\n") * 3
    assert [f"{i} of 3" in session.err for i in (1, 2, 3)] == [True] * 3
    report = f"4 of 7 prompt tokens from the cache; computed 3: 3 {Lost.GRID.phrase}"
    assert report in " ".join(session.err.split())
    assert "8 of 21 prompt tokens (38%) came from the cache" in session.err


def test_a_prompt_under_one_page_is_said_once(session):
    assert session.run("generate", LONG, LONG, "other words") == 0
    assert session.err.count("are less than one page (64)") == 1
    assert session.run("generate", " ".join(["word"] * 64)) == 0
    assert "less than one page" not in session.err


def test_prompts_come_from_arguments_files_and_stdin(session, tmp_path):
    (tmp_path / "a.txt").write_text("from a\n")
    arguments = ["--prompt-file", str(tmp_path / "a.txt"), "--prompt-file", "-"]
    assert session.run("generate", "first", "second", *arguments, stdin="from stdin\n") == 0
    assert [prompt for prompt, _ in session.requests] == ["first", "second", "from a", "from stdin"]
    assert session.run("generate", stdin="only stdin\n") == 0
    assert session.requests[0][0] == "only stdin"


def test_text_comes_as_it_is_made(session, terminal):
    session.run("generate", "a b c", answers=terminal)
    assert terminal.writes == ["A", " B", " C", "\n"]


def test_a_terminal_gets_no_control_characters_and_a_file_gets_all(session, terminal):
    session.run("generate", "a\x1b[2Jb", answers=terminal)
    assert session.out == "A\ufffd[2JB\n"
    session.run("generate", "a\x1b[2Jb")
    assert session.out == "A\x1b[2JB\n"


def test_flags_reach_the_engine_and_the_request(session):
    flags = ["--max-tokens", "3", "--stop", "x", "--stop", "y", "--top-p", "0.5"]
    engine = ["--no-enable-prefix-caching", "--mamba-cache-mode", "align", "--seed", "4"]
    assert session.run("generate", LONG, *flags, *engine, "--sampling-seed", "9") == 0
    params = session.requests[0][1]
    assert (params.max_tokens, params.stop, params.top_p, params.seed) == (3, ("x", "y"), 0.5, 9)
    config = session.engines[0].config
    assert (config.enable_prefix_caching, config.mamba_cache_mode, config.seed) == (
        False,
        "align",
        4,
    )
    assert "cut off by --max-tokens 3" in session.err


def test_chat_is_used_where_there_is_a_template(chat_session):
    chat_session.run("generate", "hello", "--system", "be brief")
    assert chat_session.requests[0][0] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
    ]
    chat_session.run("generate", "hello", "--no-chat")
    assert chat_session.requests[0][0] == "hello"


def test_chat_can_be_asked_for(session):
    session.run("generate", "hello", "--chat")
    assert session.requests[0][0] == [{"role": "user", "content": "hello"}]


def test_several_answers_are_written_one_after_the_other(session):
    assert session.run("generate", "a b", "--n", "2") == 0
    assert session.out == "A B\nA B\n"
    assert "answer 2" in session.err
    assert "4 tokens" in session.err


def test_logprobs_are_shown(session):
    session.run("generate", "a", "--logprobs", "2")
    assert "' a'" in session.err
    assert "-0.500" in session.err
    assert "#8 -0.10" in session.err


@pytest.mark.parametrize("flag", ["--skip-tokenizer-init", "--no-detokenize"])
def test_answers_without_text_are_token_ids(session, flag):
    assert session.run("generate", "5, 17", flag) == 0
    assert session.out == "7 7 \n"


def test_prompts_without_a_tokenizer_are_token_ids(session):
    session.run("generate", "5, 17 3", "--skip-tokenizer-init")
    assert session.requests[0][0] == {"prompt_token_ids": [5, 17, 3]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x", "--page-size", "3"], "page_size=3: use a power of two"),
        (["x", "--temperature", "-1"], "temperature=-1.0: use 0"),
        (["x", "--max-tokens", "many"], "--max-tokens"),
        (["x", "--pagesize", "3"], "--page-size"),
        (["x", "--repeat", "0"], "--repeat 0: use 1 or more"),
        (["x", "--system", "s", "--no-chat"], "--no-chat"),
        (["x", "--chat", "--skip-tokenizer-init"], "leave out --skip-tokenizer-init"),
        (["x", "--skip-tokenizer-init"], "prompt 'x'"),
        (["--prompt-file", "/no/such/file"], "/no/such/file: No such file"),
        ([], "no prompt: standard input is empty"),
        (["fine", ""], "prompt=''"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_status_2(session, arguments, said):
    assert session.run("generate", *arguments) == 2
    last = session.err.splitlines()[-1]
    assert last.startswith("milepost: error: ")
    assert said in last


def test_a_file_that_is_no_text_is_refused(session, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert session.run("generate", "--prompt-file", str(tmp_path / "binary")) == 2
    assert "use UTF-8 text" in session.err


def test_a_terminal_without_a_prompt_is_told_how(session, terminal):
    assert session.run("generate", stdin=terminal) == 2
    assert "no prompt: give one as an argument" in session.err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (WeightsError("model.safetensors is truncated"), 2),
        (EngineDeadError("the step loop failed"), 2),
        (KeyboardInterrupt(), 130),
    ],
    ids=["weights", "dead", "ctrl-c"],
)
def test_the_engines_end_becomes_a_status(session, error, status):
    def open_engine(config):
        raise error

    session.open_engine = open_engine
    assert session.run("generate", "x") == status
    assert ("milepost: error: " + str(error) in session.err) == (status == 2)


def test_ctrl_c_while_the_command_line_is_imported_says_nothing():
    """It comes when the first of our modules is looked for."""
    script = (
        "import os, signal, sys, milepost.__main__ as entry\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'milepost.cli.main': os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "entry.run()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_closed_streams_lead_nowhere(tmp_path):
    """And no socket and no child gets their numbers."""
    script = (
        "import os, socket, subprocess, sys, milepost.__main__ as entry\n"
        "entry.open_streams()\n"
        "print(sys.stdin.read()); print('lost', file=sys.stderr, flush=True)\n"
        "shown = subprocess.run('readlink /proc/self/fd/[012] > found', shell=True)\n"
        "sys.exit(shown.returncode or socket.socket().fileno() < 3)"
    )
    command = f"exec {sys.executable} -c {shlex.quote(script)} <&- >&- 2>&-"
    assert subprocess.run(command, shell=True, cwd=tmp_path).returncode == 0
    assert (tmp_path / "found").read_text().split()[::2] == ["/dev/null"] * 2


def test_version_and_help_need_no_torch():
    script = (
        "import sys; from milepost.cli.main import main; "
        "commands = 'serve bench chat kernels run-batch simulate generate'; "
        "status = main(['--version']) + sum(main([c, '--help']) for c in commands.split()); "
        "sys.exit(status or bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("0.1.0\n")
    assert "--mamba-cache-mode" in done.stdout


GENERATE = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
    "from conftest import FakeEngine; from milepost.cli.main import main; "
    "command = ['generate', 'a ' * 9_000, '--max-tokens', 'none']; "
    "sys.exit(main(command, open_engine=FakeEngine))"
)


def test_a_reader_that_goes_away_ends_quietly():
    process = subprocess.Popen(
        [sys.executable, "-c", GENERATE], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.read(10)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert errors == b""


def test_a_full_disk_is_said_in_a_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", GENERATE], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr.split("\n")[-2:] == [
        "milepost: error: cannot write the output: No space left on device",
        "",
    ]
    assert "Traceback" not in done.stderr


def test_flags_come_before_the_checkpoints_own_sampling(session):
    session.sampling_defaults = {"temperature": 0.6, "top_p": 0.9}
    assert session.run("generate", "a b", "--top-p", "0.5") == 0
    (_, params) = session.requests[0]
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.5, 0)


def test_answers_are_whole_by_default(session):
    words = " ".join(str(number) for number in range(40))
    assert session.run("generate", words) == 0
    assert len(session.out.split()) == 40
    assert session.requests[-1][1].max_tokens is None


def test_a_standard_input_that_is_no_text_is_one_line(session):
    stdin = io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8")
    assert session.run("generate", stdin=stdin) == 2
    assert session.err.startswith("milepost: error: use UTF-8 text")
    assert len(session.err.splitlines()) == 1
