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
    assert "/nonsense is unknown: use /help, /system, /reset or /quit" in chat_session.err
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
