"""What is wrong with a server's files is said in a line, with the file's name once."""

from functools import partial

import pytest

from milepost.errors import ConfigError
from milepost.models.folder import find_folder
from milepost.server.config import ServerConfig, read_keys, read_template
from tests.server.inprocess import answered, service


@pytest.mark.parametrize("read", [partial(read_keys, "key_file"), read_template])
def test_a_file_that_is_not_there(read):
    with pytest.raises(ConfigError) as raised:
        read("/nope")
    assert str(raised.value).endswith("='/nope': No such file or directory")


def test_keys_are_lines_whatever_wrote_them(tmp_path):
    """Windows' editors begin a file with a mark. A comment would be a key that anyone guesses."""
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\r\n two \r\n")
    assert read_keys("key_file", str(path)) == ["one", "two"]
    path.write_text("# production\none\n")
    with pytest.raises(ConfigError, match="begins with '#'"):
        read_keys("key_file", str(path))


def test_a_path_is_not_looked_up_at_the_hub(tmp_path):
    path = tmp_path / "model.safetensors"
    for given, why in (
        (path, "there is no such folder"),
        ("./none", "there is no such folder"),
        (__file__, "this is a file, not a folder"),
    ):
        with pytest.raises(ConfigError) as raised:
            find_folder(given, revision=None, with_weights=True)
        assert str(raised.value) == f"model={str(given)!r}: {why}"


SAID = [{"role": "user", "content": "the quick"}]


def length(config, **own):
    answer = answered(config, "/tokenize", {"messages": SAID, **own})
    assert answer.status_code == 200, answer.text
    return answer.json()["count"]


def test_what_templates_are_given_by_default():
    thinking = ServerConfig(default_chat_template_kwargs='{"enable_thinking": true}')
    plain = length(ServerConfig())
    assert length(thinking) > plain
    assert length(thinking, chat_template_kwargs={"enable_thinking": False}) == plain


def test_an_operators_sampling_comes_before_the_checkpoints():
    config = ServerConfig(override_generation_config='{"temperature": 0.5, "top_k": 7}')
    assert service(config).sampling_defaults == {"temperature": 0.5, "top_k": 7}


@pytest.mark.parametrize(
    ("field", "text", "words"),
    [
        ("default_chat_template_kwargs", "{", "not JSON"),
        ("default_chat_template_kwargs", "[1]", "use a JSON object"),
        ("default_chat_template_kwargs", '{"thinking": true}', "did you mean enable_thinking"),
        ("override_generation_config", '{"max_new_tokens": 5}', "'max_new_tokens': use temp"),
        ("override_generation_config", '{"temperature": -1}', "temperature=-1"),
    ],
)
def test_defaults_that_cannot_be(field, text, words):
    with pytest.raises(ConfigError, match=field) as raised:
        service(ServerConfig(**{field: text}))
    assert words in str(raised.value)
