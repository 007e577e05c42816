"""Who waits for whom at the tokenizer, and what is refused before it is begun."""

import asyncio
import json
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from milepost.engine.text import chat
from milepost.engine.text.encoder import Encoder
from milepost.engine.text.lanes import MAX_SHORT, Lane, Lanes
from milepost.engine.text.lengths import FewestTokens
from milepost.engine.text.process import Start, Text, TextProcess, Texts
from milepost.engine.text.tokenizer import load_tokenizer
from milepost.models.folder import EMBEDDED_MODEL
from milepost.server.config import ServerConfig
from tests import chatmodel
from tests.engine.test_parent import is_running
from tests.server.inprocess import MAX_IN_FLIGHT, answered
from tests.waiting import until


def order_of(sizes, cancelled=()):
    """The order in which pieces of work are done that come while another one is."""

    async def all_of_them():
        lane, done, may_go = Lane("test"), [], threading.Event()
        first = asyncio.ensure_future(lane.run(may_go.wait, 0))
        await asyncio.sleep(0)
        while lane.num_waiting:
            await asyncio.sleep(0)
        tasks = [
            asyncio.ensure_future(lane.run(lambda i=i: done.append(i), size))
            for i, size in enumerate(sizes)
        ]
        await asyncio.sleep(0)
        for index in cancelled:
            tasks[index].cancel()
        await asyncio.gather(*(tasks[i] for i in cancelled), return_exceptions=True)
        assert lane.num_waiting == len(sizes) - len(cancelled)
        may_go.set()
        await asyncio.gather(first, *(t for i, t in enumerate(tasks) if i not in cancelled))
        lane.close()
        return done

    return asyncio.run(all_of_them())


def test_less_work_goes_first():
    assert order_of([8, 8, 1]) == [2, 0, 1]


def test_what_is_given_up_is_not_done():
    """Eight long bodies whose client has left delay nobody."""
    assert order_of([8] * 8 + [1], cancelled=range(8)) == [8]


def test_long_work_is_overtaken_by_no_more_than_itself():
    async def served():
        lane, done = Lane("test"), []

        def short():
            done.append("short")

        long = asyncio.ensure_future(lane.run(lambda: done.append("long"), 50))
        while "long" not in done:
            await lane.run(short, 10)
        await long
        lane.close()
        return done.index("long")

    assert asyncio.run(served()) <= 6


def test_a_failure_is_its_callers_alone():
    async def failing():
        lane = Lane("test")
        with pytest.raises(ZeroDivisionError):
            await lane.run(lambda: 1 // 0, 1)
        assert await lane.run(lambda: 5, 1) == 5
        lane.close()

    asyncio.run(failing())


def test_a_long_text_holds_up_no_short_one():
    async def both():
        lanes, may_go = Lanes(object()), threading.Event()
        long = asyncio.ensure_future(lanes.run(lambda _: may_go.wait(30), MAX_SHORT + 1))
        assert await lanes.run(lambda _: "short", 1) == "short"
        may_go.set()
        assert await long
        await lanes.close()

    asyncio.run(both())


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(EMBEDDED_MODEL)


@pytest.fixture(scope="module")
def fewest(tokenizer):
    return FewestTokens(tokenizer)


RUNS = st.sampled_from([" ", "a", "\n", "<|im_end|>", "é"]).map(lambda text: text * 500)


@given(text=st.text(max_size=300) | RUNS)
def test_no_text_has_fewer_tokens_than_its_bound(tokenizer, fewest, text):
    assert fewest(text) <= len(tokenizer.encode(text, add_special_tokens=False))


@pytest.fixture(scope="module")
def pieces():
    """As SentencePiece's: words with their space as one character, and bytes for the rest."""
    words = ["\u2581", "a", "b", "ab", "\u2581ab", "\u2581\u2581", "<0xE2>", "<0x82>", "<0xAC>"]
    merges = [("a", "b"), ("\u2581", "ab"), ("\u2581", "\u2581")]
    vocabulary = {word: number for number, word in enumerate(words)}
    core = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core)


@given(text=st.text(alphabet="ab \u20ac", max_size=200))
def test_no_text_has_fewer_pieces_than_its_bound(pieces, text):
    assert FewestTokens(pieces)(text) <= len(pieces.encode(text, add_special_tokens=False))


def test_the_bound_of_pieces_is_not_idle(pieces):
    assert FewestTokens(pieces)(" ab" * 1000) == 500  # <0xE2> is the longest
    pieces.backend_tokenizer.normalizer = normalizers.Strip()
    assert FewestTokens(pieces)(" ab" * 1000) == 0


def test_the_bound_is_not_idle(tokenizer, fewest):
    text = "def add(a, b):\n    return a + b\n" * 1000
    assert fewest(text) > len(tokenizer.encode(text)) / 8


def test_a_text_that_must_be_too_long_is_not_tokenized(http):
    text = "word " * 60_000
    bodies = {
        "/v1/completions": {"prompt": text},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
    }
    for path, body in bodies.items():
        response = http.post(path, json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "tokens or more" in error["message"]
    cut = {"prompt": text, "truncate_prompt_tokens": 8, "max_tokens": 1}
    assert http.post("/v1/completions", json=cut).is_success


# --- long texts, in a process ---------------------------------------------------------------------

LONG = Text(
    "def add(a, b):\n    return a + b  # <|im_end|> \u00e9\u4e2d\n" * 2000, [1, 500, 90_000]
)


def text_process(tokenizer) -> TextProcess:
    plain = tokenizer.backend_tokenizer.to_str()
    return TextProcess(lambda: Start(tokenizer_json=plain, template=None))


def test_a_long_text_has_the_same_tokens_in_a_process(tokenizer):
    async def apart():
        process = text_process(tokenizer)
        try:
            texts = [LONG, Text("a")]
            found = await process.encode(Texts(texts, add_special_tokens=True, max_tokens=None))
            (counted,) = await process.encode(Texts([LONG], False, max_tokens=100))
            with pytest.raises(UnicodeError):
                await process.encode(Texts([Text("\ud800")], False, max_tokens=None))
            return found, counted
        finally:
            await process.close()

    (long, short), counted = asyncio.run(apart())
    assert long.token_ids == tokenizer.encode(LONG.text)
    assert short.token_ids == tokenizer.encode("a")
    offsets = tokenizer(LONG.text, return_offsets_mapping=True)["offset_mapping"]
    assert long.counts == chat.tokens_before(offsets, LONG.ends)
    assert (counted.num_tokens, counted.token_ids) == (len(long.token_ids), [])


def test_the_work_on_a_text_ends_when_nobody_waits_for_it(tokenizer):
    """The text would take a minute."""

    async def given_up():
        process = text_process(tokenizer)
        try:
            await process.encode(Texts([Text("a")], False, None))
            pid = process.pid
            work = asyncio.ensure_future(process.encode(Texts([Text(" " * 2**26)], False, None)))
            until_read = cpu_ticks(pid) + 20
            while cpu_ticks(pid) < until_read:
                await asyncio.sleep(0)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            until(lambda: not is_running(pid))
            return (await process.encode(Texts([Text("a")], False, None)))[0].token_ids
        finally:
            await process.close()

    assert asyncio.run(given_up()) == tokenizer.encode("a", add_special_tokens=False)


def cpu_ticks(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


TEXT = "a" * 2**23
LEFT = {
    "/tokenize": {"prompt": TEXT},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": TEXT}]},
    "/v1/completions": {"prompt": TEXT, "truncate_prompt_tokens": 8},
}


@pytest.mark.parametrize("path", LEFT)
def test_a_text_is_not_tokenized_for_a_client_that_left(server, path):
    body = json.dumps(LEFT[path] | {"model": "tiny"}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    address = urlsplit(server.url)
    before = {pid: cpu_ticks(pid) for pid in server.children(b"engine.text")}

    def busy() -> list[int]:
        pids = server.children(b"engine.text")
        return [pid for pid in pids if cpu_ticks(pid) > before.get(pid, 0) + 100]

    with socket.create_connection((address.hostname, address.port)) as sock:
        sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        until(busy)
        (pid,) = busy()
    until(lambda: not is_running(pid))


def test_a_long_text_with_a_client_is_tokenized(http):
    """In the process, as a short one is in the server; the marks of messages too."""
    content = "a b " * MAX_SHORT
    body = {"messages": [{"role": "system", "content": "c"}, {"role": "user", "content": content}]}
    rendered = http.post("/tokenize", json=body).json()
    own = chat.render(chatmodel.make_tokenizer(), body["messages"])
    assert rendered["tokens"] == own.token_ids
    assert rendered["cache_marks"] == list(own.cache_marks)
    response = http.post("/v1/completions", json={"prompt": content})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_more_prompts_than_are_taken_are_not_tokenized(monkeypatch):
    """60,000 of a letter each took 9 seconds of the HTTP process."""
    monkeypatch.setattr(Encoder, "with_tokenizer", None)
    body = {"prompt": ["a"] * (MAX_IN_FLIGHT + 1)}
    response = answered(ServerConfig(), "/v1/completions", body)
    assert response.status_code == 400
    assert "prompts with 1 answers each are more than" in response.json()["error"]["message"]
