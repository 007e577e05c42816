"""Pictures in the chat: dropped, pasted or chosen, sent, shown, kept, and refused."""

import base64
import json

import pytest

from tests.page.answers import refusal, stream
from tests.page.test_chat import ask, bodies, messages, texts
from tests.page.test_looks import look  # noqa: F401 (a fixture)
from tests.webdriver import ENTER

pytestmark = pytest.mark.browser

SEEING = {"id": "seeing", "max_model_len": 4096, "input_modalities": ["text", "image"]}
BLIND = {"id": "blind", "max_model_len": 4096, "input_modalities": ["text"]}

MAKE = """
const give = (kind, made) => {
  const given = new DataTransfer();
  for (const file of made) given.items.add(file);
  const data = kind === "paste" ? {clipboardData: given} : {dataTransfer: given};
  const Kind = kind === "paste" ? ClipboardEvent : DragEvent;
  const target = document.querySelector(kind === "paste" ? "#question" : "#cache");
  return !target.dispatchEvent(new Kind(kind, {...data, bubbles: true, cancelable: true}));
};
const noise = (side) => {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [side, side / 2];
  const context = canvas.getContext("2d");
  const data = context.createImageData(side, side / 2);
  for (let at = 0, x = 1; at < data.data.length; at++) {
    x = (x * 16807) % 2147483647;
    data.data[at] = at % 4 === 3 ? 255 : x % 256;
  }
  context.putImageData(data, 0, 0);
  return canvas;
};
const file = async (name, side, kind = "image/png") => {
  const blob = await new Promise((done) => noise(side).toBlob(done, kind));
  return new File([blob], name, {type: kind});
};
"""


def models(*served, **own):
    return {"v1/models": {"data": [{**model, **own} for model in served]}}


def give(page, kind, *files):
    """Drops or pastes files, each given as arguments of the script's `file`."""
    made = ", ".join(f"file({', '.join(map(json.dumps, given))})" for given in files)
    page.run(f"{MAKE}; window.isTaken = give('{kind}', await Promise.all([{made}]))")


def attached(page):
    return page.run("return [...document.querySelectorAll('#attached img')].map((e) => e.alt)")


def until_attached(page, count):
    page.wait(f"return document.querySelectorAll('#attached img').length === {count}")


def until_fault(page):
    page.wait("return !document.querySelector('#fault').hidden")
    return texts(page, "#fault")[0]


def sent(page):
    """Contents of the last request's last message."""
    return messages(page)[-1][1]


def test_pictures_are_dropped_and_pasted_and_go_before_the_text(chat):
    page = chat(stream("a cat"), stream("still"), **models(SEEING))
    give(page, "drop", ["a.png", 64], ["b.webp", 32, "image/webp"])
    give(page, "paste", ["c.jpg", 16, "image/jpeg"])
    until_attached(page, 3)
    assert page.run("return window.isTaken") is True
    assert sorted(attached(page)) == ["a.png", "b.webp", "c.jpg"]
    assert texts(page, "#attached-note") == ["3 pictures to send"]
    page.run("document.querySelector('[aria-label=\"Remove b.webp\"]').click()")
    ask(page, "What is it?")
    assert attached(page) == []
    *pictures, text = sent(page)
    assert text == {"type": "text", "text": "What is it?"}
    kinds = [part["image_url"]["url"].split(";")[0] for part in pictures]
    assert sorted(kinds) == ["data:image/jpeg", "data:image/png"]
    assert all(set(part) == {"type", "image_url"} for part in pictures)
    page.wait("return [...document.querySelectorAll('#turns img')].every((e) => e.complete)")
    shown = (
        "return [...document.querySelectorAll('#turns img')].map((e) => [e.alt, e.naturalWidth])"
    )
    assert sorted(page.run(shown)) == [["a.png", 64], ["c.jpg", 16]]
    ask(page, "Sure?")
    assert messages(page)[0] == ("user", [*pictures, text])
    chat(stream("yes"), keeps=True, **models(SEEING))
    page.wait("return document.querySelectorAll('#turns img').length === 2")
    ask(page, "And now?")
    assert messages(page)[0] == ("user", [*pictures, text])


def test_a_picture_is_chosen_from_files_and_sent_alone_as_it_is(chat, tmp_path):
    page = chat(stream("one"), **models(SEEING))
    data = page.run(f"{MAKE}; return noise(40).toDataURL('image/png')")
    page.run(f"{MAKE}; window.clicks = 0; document.querySelector('#files').click = () => clicks++")
    page.type("#attach", ENTER)
    assert page.run("return window.clicks") == 1
    (tmp_path / "chosen.png").write_bytes(base64.b64decode(data.split(",")[1]))
    page.type("#files", str(tmp_path / "chosen.png"))
    until_attached(page, 1)
    page.type("#question", ENTER)
    page.wait("return document.querySelector('#turns .gave')")
    assert sent(page) == [{"type": "image_url", "image_url": {"url": data}}]
    page.wait("return document.querySelector('.opener')?.textContent === 'chosen.png'")


def test_removing_by_keyboard_goes_to_the_next_picture_and_then_to_the_text(chat):
    page = chat(stream("one"), **models(SEEING))
    give(page, "drop", ["a.png", 16], ["b.png", 16])
    until_attached(page, 2)
    focused = "return document.activeElement.ariaLabel ?? document.activeElement.id"
    page.type("[aria-label='Remove a.png']", ENTER)
    assert page.run(focused) == "Remove b.png"
    page.type("[aria-label='Remove b.png']", ENTER)
    assert page.run(focused) == "question"
    assert attached(page) == []


def test_enter_waits_for_a_picture_that_is_still_read(chat):
    page = chat(stream("one"), **models(SEEING))
    page.run(
        "window.createImageBitmap = ((real) => (...given) => new Promise((done) => {"
        " window.release = () => done(real(...given)) }))(window.createImageBitmap)"
    )
    give(page, "drop", ["a.png", 16])
    page.type("#question", "look" + ENTER)
    assert bodies(page) == []
    page.run("window.release()")
    page.wait("return document.querySelector('#turns .gave')")
    assert [part["type"] for part in sent(page)] == ["image_url", "text"]


def test_what_is_no_picture_is_refused_by_name_and_nothing_is_sent(chat):
    page = chat(stream("one"), **models(SEEING))
    page.run(f"{MAKE}; give('drop', [new File(['x'], 'a.txt', {{type: 'text/plain'}})])")
    assert until_fault(page) == "a.txt: use a PNG, JPEG, WebP or GIF picture."
    page.run(f"{MAKE}; give('drop', [new File(['x'], 'b.png', {{type: 'image/png'}})])")
    page.wait("return document.querySelector('#fault').textContent.startsWith('b.png')")
    assert texts(page, "#fault") == ["b.png cannot be read as a picture."]
    assert page.run("return document.querySelector('#attached').children.length") == 0


def test_a_model_that_takes_no_images_is_named(chat):
    page = chat(stream("one"), **models(BLIND, SEEING))
    assert page.run("return document.querySelector('#attach').hidden") is True
    give(page, "paste", ["a.png", 16])
    assert until_fault(page) == "blind takes no images."
    assert page.run("return document.querySelector('#attached').children.length") == 0
    choose = "const m = document.querySelector('#model'); m.value = 'seeing';"
    page.run(f"{choose} m.dispatchEvent(new Event('change'))")
    assert page.run("return document.querySelector('#attach').hidden") is False


def test_text_that_comes_with_a_picture_of_itself_is_pasted_as_text(chat):
    page = chat(stream("one"), **models(SEEING))
    is_taken = page.run(
        f"{MAKE}; const given = new DataTransfer(); given.items.add(await file('a.png', 16));"
        "given.setData('text/plain', 'cells'); const event = new ClipboardEvent('paste',"
        "{clipboardData: given, bubbles: true, cancelable: true});"
        "return !document.querySelector('#question').dispatchEvent(event)"
    )
    assert is_taken is False
    assert page.run("return document.querySelector('#attached').children.length") == 0


def test_a_large_picture_is_made_smaller_to_what_a_request_may_hold(chat):
    page = chat(stream("one"), **models(SEEING, max_request_bytes=400_000))
    give(page, "drop", ["large.png", 600])
    until_attached(page, 1)
    ask(page, "look")
    url = sent(page)[0]["image_url"]["url"]
    assert url.startswith("data:image/jpeg;base64,")
    assert len(url) * 3 / 4 < 100_100
    assert 128 <= page.run("return document.querySelector('#turns img').naturalWidth") < 600


def test_a_chat_that_is_larger_than_a_request_is_not_sent_and_stays(chat):
    page = chat(stream("one"), **models(SEEING, max_request_bytes=100_000))
    for question in ("first", "x" * 70_000):
        give(page, "drop", ["a.png", 100])
        until_attached(page, 1)
        page.run("document.querySelector('#question').value = arguments[0]", question)
        page.type("#question", ENTER)
        page.wait("return !document.querySelector('#send').hidden")
    why = until_fault(page)
    assert "larger than the 98 KiB that the server takes" in why
    assert len(bodies(page)) == 1
    assert attached(page) == ["a.png"]


def test_a_picture_that_the_server_refuses_goes_back(chat):
    page = chat(refusal("a prompt has 0 images at most"), stream("yes"), **models(SEEING))
    give(page, "drop", ["a.png", 16])
    until_attached(page, 1)
    ask(page, "look", until="return !document.querySelector('#fault').hidden")
    assert attached(page) == ["a.png"]
    assert page.run("return document.querySelector('#question').value") == "look"
    ask(page, "")
    assert [part["type"] for part in sent(page)] == ["image_url", "text"]


def test_an_edited_question_keeps_its_pictures(chat):
    page = chat(stream("one"), stream("two"), **models(SEEING))
    give(page, "drop", ["a.png", 16])
    until_attached(page, 1)
    ask(page, "look")
    before = sent(page)
    page.run("document.querySelectorAll('#turns .user .actions button')[1].click()")
    page.type(".editor textarea", " again" + ENTER)
    page.wait("return document.querySelector('.versions')")
    page.wait("return !document.querySelector('#send').hidden")
    assert sent(page) == [before[0], {"type": "text", "text": "look again"}]


def test_old_chats_go_when_their_pictures_are_too_large_together(chat):
    page = chat(stream("one"), **models(SEEING))
    kept = page.run(
        """
        const {listChats, putChat} = await import("/ui/store.mjs");
        for (let at = 1; at <= 4; at++) {
          const url = `data:image/png;base64,${"A".repeat(90 * 2 ** 20)}`;
          const content = [{type: "image_url", image_url: {url}, name: "a"}];
          await putChat({id: `c${at}`, at, messages: [{id: 0, content}]}, `c${at}`);
        }
        return (await listChats()).map(({id}) => id);
        """
    )
    assert kept == ["c4", "c3"]


def test_pictures_that_no_request_holds_together_are_refused_at_once(chat):
    page = chat(stream("one"), **models(SEEING, max_request_bytes=100_000))
    give(page, "drop", *[[f"{number}.png", 100] for number in range(6)])
    assert "larger than the 98 KiB that the server takes" in until_fault(page)
    assert 0 < len(attached(page)) < 6


def test_pictures_look_well(chat, look):  # noqa: F811
    page = chat(stream("Noise."), **models(SEEING))
    give(page, "drop", ["a.png", 400], ["b.png", 100])
    until_attached(page, 2)
    ask(page, "What is on these?")
    give(page, "drop", *[[f"{number}.png", 60] for number in range(5)])
    until_attached(page, 5)
    look(page, "pictures", is_shown=True)
