import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from milepost.engine.text.detokenizer import NoText, TextDetokenizer, detokenizer_for
from milepost.engine.text.token_texts import TokenTexts
from milepost.errors import InvalidRequestError
from milepost.sampling_params import ReasoningTokens, SamplingParams
from tests import chatmodel

relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def stream(tokenizer, token_ids, **params):
    """(deltas, stop string) of a whole answer."""
    detokenizer = TextDetokenizer(TokenTexts(tokenizer), SamplingParams(max_tokens=None, **params))
    deltas = []
    for token_id in token_ids:
        stop = detokenizer.append(token_id)
        deltas.append(detokenizer.delta())
        if stop is not None:
            return deltas, stop
    detokenizer.flush()
    deltas.append(detokenizer.delta())
    assert detokenizer.delta() == ""
    return deltas, None


def bytes_of(tokenizer, text):
    """One token per byte of the text."""
    vocab = tokenizer.get_vocab()
    (encoded,) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
        text
    )
    return [vocab[character] for character in encoded[0]]


@relaxed
@given(text=any_text)
def test_text_is_the_whole_decoded(tokenizer, text):
    token_ids = tokenizer.encode(text)
    deltas, _ = stream(tokenizer, token_ids)
    assert "".join(deltas) == tokenizer.decode(token_ids) == text


@relaxed
@given(text=any_text)
def test_characters_come_whole_and_at_once(tokenizer, text):
    deltas, _ = stream(tokenizer, bytes_of(tokenizer, text)) if text else ([], None)
    expected = [c for character in text for c in [""] * (len(character.encode()) - 1) + [character]]
    assert deltas[:-1] == (expected if "\ufffd" not in text else deltas[:-1])
    assert "".join(deltas) == text


@relaxed
@given(token_ids=st.lists(st.integers(0, 600), max_size=30), skip=st.booleans())
def test_any_tokens_give_what_decoding_all_gives(tokenizer, token_ids, skip):
    token_ids = [t for t in token_ids if t < len(tokenizer)] + [9999]
    deltas, _ = stream(tokenizer, token_ids, skip_special_tokens=skip)
    assert "".join(deltas) == tokenizer.decode(token_ids, skip_special_tokens=skip)


def test_incomplete_bytes_show_only_at_the_end(tokenizer):
    smile = bytes_of(tokenizer, "🙂")
    assert stream(tokenizer, smile[:3])[0] == ["", "", "", "\ufffd"]
    assert stream(tokenizer, [*smile[:2], *bytes_of(tokenizer, "a")])[0] == ["", "", "\ufffda", ""]


def test_characters_that_end_inside_the_next_token_are_not_held(tokenizer):
    a, b, c = bytes_of(tokenizer, "日")
    vocab = {t: i for t, i in tokenizer.get_vocab().items() if len(t) == 1}
    tail = "".join(tokenizer.convert_ids_to_tokens([b, c, a]))
    core = Tokenizer(models.BPE({**vocab, tail: 9000}, []))
    core.decoder = decoders.ByteLevel()
    straddling = PreTrainedTokenizerFast(tokenizer_object=core)
    assert stream(straddling, [a, 9000, 9000, b, c])[0] == ["", "日", "日", "", "日", ""]


def test_words_keep_the_space_that_their_first_token_lacks():
    core = Tokenizer(models.BPE({"▁the": 0, "▁fox": 1, "es": 2, "<0xC3>": 3, "<0xA9>": 4}, []))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    assert stream(tokenizer, [0, 1, 2, 3, 4, 1])[0] == ["the", " fox", "es", "", "é", " fox", ""]


def test_a_token_of_whole_characters_is_decoded_once_for_all_answers(tokenizer):
    texts, token_ids = TokenTexts(tokenizer), tokenizer.encode("The fox, naïve 日本")
    decoded = []
    for _ in range(2):
        answer = TextDetokenizer(texts, SamplingParams())
        decode = answer._pieces._decode
        answer._pieces._decode = lambda ids, decode=decode: decoded.append(ids) or decode(ids)
        for token_id in token_ids:
            answer.append(token_id)
        assert answer.delta() == "The fox, naïve 日本"
    whole = [t for t in token_ids if "\ufffd" not in tokenizer.decode([t])]
    assert len(whole) > len(token_ids) / 3
    assert not any(ids[-1:] == [token_id] for ids in decoded for token_id in whole)


def test_special_tokens_are_left_out_or_shown(tokenizer):
    (end,) = tokenizer.encode("<|im_end|>")
    token_ids = [*tokenizer.encode("fox"), end, *tokenizer.encode(" dog")]
    assert "".join(stream(tokenizer, token_ids)[0]) == "fox dog"
    shown = "".join(stream(tokenizer, token_ids, skip_special_tokens=False)[0])
    assert shown == "fox<|im_end|> dog"


@relaxed
@given(text=any_text, stop=st.lists(st.text("STOPstop abé🙂", min_size=1, max_size=5), min_size=1))
@pytest.mark.parametrize("keep", [False, True])
def test_text_ends_at_the_first_stop_string(tokenizer, keep, text, stop):
    text = text + "STOP again STstop"
    deltas, found = stream(
        tokenizer, bytes_of(tokenizer, text), stop=stop, include_stop_str_in_output=keep
    )
    ends = sorted((text.find(s) + len(s), text.find(s)) for s in stop if s in text)
    if not ends:
        assert ("".join(deltas), found) == (text, None)
        return
    earliest_end = ends[0][0]
    start = min(start for end, start in ends if end == earliest_end)
    assert found == text[start:earliest_end]
    assert "".join(deltas) == text[: earliest_end if keep else start]


def test_several_stops_in_one_token_end_at_the_one_that_begins_first(tokenizer):
    core = Tokenizer(models.BPE({"a": 0, "xENDySTOPz": 1}, []))
    core.decoder = decoders.ByteLevel()
    one_token = PreTrainedTokenizerFast(tokenizer_object=core)
    assert stream(one_token, [0, 1], stop=["STOP", "END"]) == (["a", "x"], "END")


def test_what_may_become_a_stop_string_is_held_and_let_go(tokenizer):
    token_ids = bytes_of(tokenizer, "a ENEND")
    assert stream(tokenizer, token_ids, stop="END") == (["a", " ", "", "", "EN", "", ""], "END")
    assert stream(tokenizer, token_ids[:-1], stop="END")[0][-1] == "EN"
    assert stream(tokenizer, bytes_of(tokenizer, "ENa"), stop="END")[0] == ["", "", "ENa", ""]


def test_no_stop_string_ends_an_answer_within_min_tokens(tokenizer):
    token_ids = bytes_of(tokenizer, "abab")
    assert stream(tokenizer, token_ids, stop="ab")[1] == "ab"
    deltas, found = stream(tokenizer, token_ids, stop="ab", min_tokens=2)
    assert ("".join(deltas), found) == ("ab", "ab")
    assert stream(tokenizer, token_ids, stop="ab", min_tokens=4) == (["", "ab", "", "ab", ""], None)


@pytest.mark.parametrize(("keep", "text"), [(False, "fox"), (True, "fox!")])
def test_a_stop_token_is_shown_only_if_asked(tokenizer, keep, text):
    params = SamplingParams(include_stop_str_in_output=keep)
    detokenizer = TextDetokenizer(TokenTexts(tokenizer), params)
    for token_id in tokenizer.encode("fox"):
        detokenizer.append(token_id)
    detokenizer.append_stop(bytes_of(tokenizer, "!")[0])
    assert detokenizer.delta() == text
    with pytest.raises(AssertionError, match="end of an answer"):
        detokenizer.append(5)


def test_without_text_there_is_none(tokenizer):
    silent = detokenizer_for(TokenTexts(tokenizer), SamplingParams(detokenize=False))
    assert isinstance(silent, NoText)
    assert silent.append(5) is None
    silent.append_stop(6)
    silent.flush()
    assert silent.delta() == ""
    assert isinstance(detokenizer_for(None, SamplingParams()), NoText)
    assert isinstance(detokenizer_for(TokenTexts(tokenizer), SamplingParams()), TextDetokenizer)


def lines_run(work):
    """Lines of the detokenizer's own code that `work` runs."""
    count = 0
    file = TextDetokenizer.append.__code__.co_filename

    def trace(frame, event, _):
        nonlocal count
        count += event == "line"
        return trace if frame.f_code.co_filename == file else None

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize(("stop", "text"), [("a" * 60 + "b", "a"), ("ab" * 30 + "c", "ab")])
def test_looking_for_stop_strings_costs_the_same_for_each_character(tokenizer, stop, text):
    def work(stop, length):
        token_ids = bytes_of(tokenizer, text * (length // len(text)))
        return lines_run(lambda: stream(tokenizer, token_ids, stop=stop))

    assert work(stop, 800) < 10 * work(stop, 100)
    assert work(stop, 400) < 2 * work(stop[-5:], 400), "however long the stop string"


def test_bytes_that_never_become_a_character_do_not_pile_up(tokenizer):
    backend = tokenizer.backend_tokenizer
    byte = bytes_of(tokenizer, "é")[1]
    widths = []

    def decode(token_ids, **options):
        widths.append(len(token_ids))
        return backend.decode(token_ids, **options)

    for token_ids in ([byte] * 200, ([byte] * 50 + bytes_of(tokenizer, "日é🙂")) * 3):
        deltas, _ = stream(tokenizer, token_ids)
        assert "".join(deltas) == tokenizer.decode(token_ids)
    counted = TextDetokenizer(TokenTexts(tokenizer), SamplingParams(max_tokens=None))
    counted._pieces._decode = decode
    for _ in range(500):
        counted.append(byte)
    assert max(widths) < 50


# --- stop strings and reasoning -------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinking():
    tokenizer = chatmodel.make_tokenizer()
    return tokenizer, tokenizer.convert_tokens_to_ids(["<think>", "</think>"])


@pytest.mark.parametrize(
    ("text", "is_open", "shown", "stop"),
    [
        ("hm\n\nso\n</think>\n\nyes\n\nno", True, "hm\n\nso\n</think>\n\nyes", "\n\n"),
        (
            "<think>\nhm\n\nso</think>\n\nyes\n\nno",
            False,
            "<think>\nhm\n\nso</think>\n\nyes",
            "\n\n",
        ),
        ("\n<think>\nhm\n\nso</think>yes", False, "\n<think>\nhm\n\nso</think>yes", None),
        ("hm\n\nso", True, "hm\n\nso", None),
        ("yes\n\nno", False, "yes", "\n\n"),
        ("yes <think>hm\n\nso", False, "yes <think>hm", "\n\n"),
        ("hm</think>\n\n\n\nyes. STOP it", True, "hm</think>\n\n\n\nyes. ", "STOP"),
        ("STO</think>P", True, "STO</think>P", None),
        ("STOP</think>STOP", True, "STOP</think>", "STOP"),
        ("hm</think>yes\n\n", True, "hm</think>yes", "\n\n"),
    ],
)
def test_stop_strings_count_behind_the_reasoning(thinking, text, is_open, shown, stop):
    tokenizer, (opens, closes) = thinking
    reasoning = ReasoningTokens(closes=closes, opens=opens, is_open=is_open)
    params = {"stop": ["\n\n", "STOP"], "reasoning": reasoning}
    deltas, found = stream(tokenizer, tokenizer.encode(text), **params)
    assert ("".join(deltas), found) == (shown, stop)


@pytest.mark.parametrize("added", ["\n\n", "\n\nyes"])
def test_line_breaks_behind_the_reasoning_are_no_stop_however_they_are_cut_into_tokens(added):
    tokenizer = chatmodel.make_tokenizer()
    tokenizer.add_tokens([added])
    closes = tokenizer.convert_tokens_to_ids("</think>")
    token_ids = tokenizer.encode("hm</think>\n\nyes\n\nno")
    reasoning = ReasoningTokens(closes=closes, is_open=True)
    deltas, found = stream(tokenizer, token_ids, stop="\n\n", reasoning=reasoning)
    assert ("".join(deltas), found) == ("hm</think>\n\nyes", "\n\n")


def test_a_stop_string_does_not_begin_before_the_reasoning_and_end_behind_it(thinking):
    tokenizer, (opens, closes) = thinking
    reasoning = ReasoningTokens(closes=closes, opens=opens)
    token_ids = tokenizer.encode("\n<think>hm</think>yes")
    deltas, found = stream(tokenizer, token_ids, stop="\nyes", reasoning=reasoning)
    assert ("".join(deltas), found) == ("\n<think>hm</think>yes", None)


def test_without_its_tokens_stop_strings_count_in_the_reasoning(thinking):
    tokenizer, _ = thinking
    assert stream(tokenizer, tokenizer.encode("hm\n\nso</think>"), stop="\n\n")[1] == "\n\n"


def test_tags_that_are_not_shown_are_around_the_reasoning_all_the_same(thinking):
    _, (opens, closes) = thinking
    tokenizer = chatmodel.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    reasoning = ReasoningTokens(closes=closes, opens=opens)
    token_ids = tokenizer.encode("<think>\n\nhm</think>\n\nyes\n\nno")
    deltas, found = stream(tokenizer, token_ids, stop="\n\n", reasoning=reasoning)
    assert ("".join(deltas), found) == ("\n\nhm\n\nyes", "\n\n")


@pytest.mark.parametrize("own", [{"closes": -1}, {"closes": 1, "opens": "x"}, {"closes": True}])
def test_tokens_of_the_reasoning_are_token_ids(own):
    with pytest.raises(InvalidRequestError, match="reasoning"):
        ReasoningTokens(**own)
    with pytest.raises(InvalidRequestError, match="reasoning"):
        SamplingParams(reasoning="</think>")
