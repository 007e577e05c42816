"""The bytes of tokens."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from milepost.server.logprobs import TokenBytes
from tests import chatmodel


def test_bytes_of_a_byte_level_vocabulary_join_to_the_text():
    tokenizer = chatmodel.make_tokenizer()
    octets = TokenBytes(tokenizer)
    text = "naïve café 🙂 日本 <|im_end|><think>\n\t\x00end"
    ids = tokenizer.encode(text)
    parts = [octets.of(id_, tokenizer.decode([id_])) for id_ in ids]
    assert bytes(byte for part in parts for byte in part).decode() == text
    assert any("\ufffd" in tokenizer.decode([id_]) for id_ in ids), "some are part of a character"


def test_every_byte_has_a_token():
    tokenizer = chatmodel.make_tokenizer()
    octets = TokenBytes(tokenizer)
    found = [octets.of(id_, tokenizer.decode([id_])) for id_ in range(len(tokenizer))]
    assert {part[0] for part in found if len(part) == 1} == set(range(256))


@pytest.mark.parametrize(
    ("token", "text", "octets"),
    [("<0xE2>", "\ufffd", [0xE2]), ("ab", "ab", [97, 98]), ("?", "\ufffd", None)],
)
def test_other_vocabularies(token, text, octets):
    core = Tokenizer(models.BPE(vocab={token: 0}, merges=[]))
    core.decoder = decoders.ByteFallback()
    assert TokenBytes(PreTrainedTokenizerFast(tokenizer_object=core)).of(0, text) == octets
