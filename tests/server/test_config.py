"""What is wrong with a server's files is said in a line, with the file's name once."""

import pytest

from milepost.errors import ConfigError
from milepost.models.folder import find_folder
from milepost.server.config import read_keys, read_template


@pytest.mark.parametrize("read", [read_keys, read_template])
def test_a_file_that_is_not_there(read):
    with pytest.raises(ConfigError) as raised:
        read("/nope")
    assert str(raised.value).endswith("='/nope': No such file or directory")


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
