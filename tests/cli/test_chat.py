import json

import pytest


def contents(session):
    """Of each request: (role, content) of its messages."""
    return [
        [(message["role"], message["content"]) for message in messages]
        for messages, _ in session.requests
    ]


def test_turns_build_on_each_other(chat_session):
    status = chat_session.run("chat", stdin="one two\nthree\n")
    assert (status, chat_session.out) == (0, "ONE TWO\nTHREE\n")
    first, second = contents(chat_session)
    assert first == [("user", "one two")]
    assert second == [("user", "one two"), ("assistant", "ONE TWO"), ("user", "three")]
    assert chat_session.err.count("prompt tokens from the cache") == 2


def test_an_answer_is_whole_by_default(chat_session):
    words = " ".join(str(number) for number in range(40))
    chat_session.run("chat", stdin=f"{words}\n")
    assert len(chat_session.out.split()) == 40
    chat_session.run("chat", "--max-tokens", "3", stdin=f"{words}\n")
    assert len(chat_session.out.split()) == 3


def test_commands(chat_session):
    said = "/system Be brief.\none\n/reset\n\ntwo\n/system\nthree\n/nonsense\n/help\n/quit\nfour\n"
    assert chat_session.run("chat", "--system", "first", stdin=said) == 0
    assert contents(chat_session) == [
        [("system", "Be brief."), ("user", "one")],
        [("system", "Be brief."), ("user", "two")],
        [("user", "three")],
    ]
    assert "/nonsense is unknown: use /help, /reset, /system, /set, /stats" in chat_session.err
    assert "/system TEXT" in chat_session.err


@pytest.mark.parametrize("num_words", [0, 2])
def test_an_answer_that_is_stopped_stays_as_far_as_it_came(chat_session, num_words):
    engines = chat_session.engines

    def interrupting(config):
        engine = make(config)
        stream = engine.stream_chat

        def stopped(messages, params):
            for number, output in enumerate(stream(messages, params)):
                if (
                    len(messages) == 1
                    and messages[-1]["content"] == "a b c"
                    and number == num_words
                ):
                    raise KeyboardInterrupt
                yield output

        engine.stream_chat = stopped
        engines.append(engine)
        return engine

    make, chat_session.open_engine = chat_session._make, interrupting
    assert chat_session.run("chat", stdin="a b c\nd\n") == 0
    answered = [("assistant", "A B")] if num_words else []
    kept = [("user", "a b c"), *answered] if answered else []
    assert contents(chat_session)[-1] == [*kept, ("user", "d")]
    assert "stopped" in chat_session.err


def test_a_turn_that_is_refused_is_taken_back(chat_session):
    chat_session.sampling_defaults = {"max_tokens": 5}

    def refusing(config):
        from milepost.errors import InvalidRequestError

        engine = chat_session._make(config)
        stream = engine.stream_chat

        def first_refused(messages, params):
            if messages[-1]["content"] == "long":
                raise InvalidRequestError("too long")
            return stream(messages, params)

        engine.stream_chat = first_refused
        chat_session.engines.append(engine)
        return engine

    chat_session.open_engine = refusing
    assert chat_session.run("chat", stdin="long\nshort\n") == 0
    assert "error: too long" in chat_session.err
    assert contents(chat_session) == [[("user", "short")]]


def test_without_a_tokenizer(chat_session):
    assert chat_session.run("chat", "--skip-tokenizer-init", stdin="a\n") == 2


def params(session):
    return [given for _, given in session.requests]


def test_sampling_parameters_are_set_shown_and_taken_back(chat_session):
    chat_session.sampling_defaults = {"temperature": 0.6}
    said = (
        'one\n/set temperature 0.7\n/set stop ["x", "y"]\n/set --top-k 40\ntwo\n/set\n'
        "/set temperature\n/set temperature default\nthree\n/set top_k default\n"
        "/set stop default\n"
    )
    assert chat_session.run("chat", "--top-p", "0.9", stdin=said) == 0
    first, second, third = params(chat_session)
    assert (first.temperature, first.top_p, first.top_k) == (0.6, 0.9, 0)
    assert (second.temperature, second.stop, second.top_k) == (0.7, ("x", "y"), 40)
    assert (third.temperature, third.top_k) == (0.6, 40)
    assert "set: top_p 0.9, temperature 0.7, stop ['x', 'y'], top_k 40" in chat_session.err
    assert "temperature is 0.7: 0 takes the likeliest token" in chat_session.err
    assert chat_session.err.endswith("set: top_p 0.9\n")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set temperature hot", "temperature='hot'"),
        (f"/set temperature {'[' * 100_000}", "temperature='[[["),
        ("/set temperature -1", "temperature=-1"),
        ("/set heat 1", "/set heat: use one of temperature, top_p"),
        ("/set n 2", "/set n: use one of"),
        ("/save", "/save: name a file"),
        ("/save ~nobody-here/it.md", "/save ~nobody-here/it.md: Could not determine home"),
        (f"/save {'a' * 300}", "File name too long"),
        ("/save here.md", "/save here.md: nothing was said"),
        ("/stats", "nothing was answered in this conversation"),
    ],
)
def test_a_command_that_cannot_be_obeyed_says_why_and_changes_nothing(chat_session, line, said):
    assert chat_session.run("chat", stdin=f"{line}\none\n") == 0
    assert said in chat_session.err
    (given,) = params(chat_session)
    assert given.temperature == 1.0


def test_stats_are_of_the_turns_of_this_conversation(chat_session):
    chat_session.run("chat", stdin="a b c d\n/reset\none two three four five\n/stats\n")
    table = chat_session.err[chat_session.err.index("from cache  ") :]
    assert "one two three four five" in table
    assert "a b c d" not in table
    assert "0 of 5 prompt tokens" in table
    assert "5 tokens answered in " in table


def test_a_conversation_is_saved(chat_session, tmp_path):
    path, page = tmp_path / "talk.json", tmp_path / "talk.md"
    said = f"/system Be brief.\n/set seed 3\none\n/save {path}\ntwo\n/save {path}\n/save {page}\n"
    assert chat_session.run("chat", stdin=said) == 0
    saved = json.loads(path.read_text())
    assert saved == {
        "model": "the embedded model",
        "seed": 3,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "ONE"},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "TWO"},
        ],
    }
    assert page.read_text().startswith("## System\n\nBe brief.\n\n## You\n\none\n\n## the embedded")
    assert f"saved 4 messages to {path}" in chat_session.err


def test_a_file_that_was_there_before_is_not_overwritten(chat_session, tmp_path):
    path = tmp_path / "talk.md"
    path.write_text("mine")
    missing = tmp_path / "nowhere" / "talk.md"
    chat_session.run("chat", stdin=f"one\n/save {path}\n/save {missing}\n")
    assert path.read_text() == "mine"
    assert f"/save {path}: it exists; use another name" in chat_session.err
    assert "talk.md: No such file or directory" in chat_session.err


def test_answers_are_markdown_on_a_terminal_and_raw_elsewhere(chat_session, terminal):
    chat_session.run("chat", stdin="see **this**\n", answers=terminal)
    assert "**" not in chat_session.out
    chat_session.run("chat", stdin="see **this**\n")
    assert chat_session.out == "SEE **THIS**\n"
    chat_session.run("chat", "--no-markdown", stdin="see **this**\n", answers=type(terminal)())
    assert chat_session.out == "SEE **THIS**\n"
