"""The chat in a browser: what a person does, and what the server is asked."""

import json

import pytest

from tests.page.answers import USAGE, calls, refusal, stream
from tests.webdriver import ENTER

pytestmark = pytest.mark.browser

ESCAPE = "\ue00c"
ALL = "return [...document.querySelectorAll('%s')].map((e) => e.textContent.trim())"


def texts(page, selector):
    return page.run(ALL % selector)


def ask(page, question, *, until="return !document.querySelector('#send').hidden"):
    page.type("#question", question + ENTER)
    page.wait(until)


def click(page, name, place=-1):
    """Clicks a button of a turn, the last one unless told otherwise, and waits for an answer."""
    page.run(
        "[...document.querySelectorAll('#turns button')]"
        f".filter((e) => e.textContent === {json.dumps(name)}).at({place}).click()"
    )
    page.wait("return !document.querySelector('#send').hidden")


def bodies(page):
    """Every request for an answer so far."""
    return page.run("return window.asked.filter(({body}) => body).map(({body}) => body)")


def messages(page):
    """Roles and contents of the last request."""
    return [(said["role"], said["content"]) for said in bodies(page)[-1]["messages"]]


def test_an_answer_shows_what_the_cache_gave_and_what_it_cost(chat):
    page = chat(stream("one ", "two"))
    ask(page, "count")
    assert texts(page, "#turns .said") == ["count", "one two"]
    (line,) = texts(page, "#turns .gave")
    assert line.startswith("320 of 400 prompt tokens cached · computed: 79 new, 1 last token")
    assert " · first token " in line
    assert " · 30 tokens · " in line
    assert texts(page, "#turns .cut") == []
    assert bodies(page)[0]["stream_options"]["continuous_usage_stats"] is True


def test_stop_keeps_what_came_and_its_cache_line_and_goes_on(chat):
    page = chat(stream("half", finish=None), stream(" and half"))
    ask(page, "go", until="return document.querySelectorAll('#turns .said')[1]?.textContent")
    page.type("body", ESCAPE)
    page.wait("return !document.querySelector('#send').hidden")
    (line,) = texts(page, "#turns .gave")
    assert line.startswith("stopped · 320 of 400 prompt tokens cached")
    click(page, "Continue")
    assert texts(page, "#turns .said") == ["go", "half and half"]
    body = bodies(page)[-1]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert messages(page) == [("user", "go"), ("assistant", "half")]


def test_what_is_asked_again_or_edited_is_another_version_and_none_is_lost(chat):
    page = chat(stream("first"), stream("second"), stream("third"))
    ask(page, "question")
    click(page, "Regenerate")
    assert texts(page, "#turns .said") == ["question", "second"]
    assert texts(page, ".versions span") == ["2 / 2"]
    page.run("document.querySelector('[aria-label=\"Version before\"]').click()")
    assert texts(page, "#turns .said") == ["question", "first"]
    click(page, "Edit")
    page.run("document.querySelector('.editor textarea').select()")
    page.type(".editor textarea", "better question" + ENTER)
    page.wait("return !document.querySelector('#send').hidden")
    assert messages(page) == [("user", "better question")]
    assert texts(page, "#turns .said") == ["better question", "third"]
    page.run("document.querySelector('[aria-label=\"Version before\"]').click()")
    assert texts(page, "#turns .said") == ["question", "second"]


def test_an_edit_can_be_left(chat):
    page = chat(stream("first"))
    ask(page, "question")
    click(page, "Edit")
    page.type(".editor textarea", "no" + ESCAPE)
    assert texts(page, "#turns .editor") == []
    assert page.run("return document.activeElement.textContent") == "Edit"
    assert len(bodies(page)) == 1


@pytest.mark.parametrize("first", [stream("well"), None])
def test_a_question_that_is_refused_stays_in_the_box(chat, first):
    why = "This model takes 4096 tokens at most; the prompt has 5000"
    page = chat(*([first] if first else []), refusal(why), stream("yes"))
    if first:
        ask(page, "before")
    ask(page, "much too long", until="return !document.querySelector('#fault').hidden")
    assert page.run("return document.querySelector('#question').value") == "much too long"
    assert texts(page, "#fault") == [why]
    assert page.run("return document.querySelector('#fault').getAttribute('role')") == "alert"
    assert texts(page, "#turns .said") == (["before", "well"] if first else [])
    page.type("#question", ENTER)
    page.wait("return document.querySelector('#fault').hidden")
    page.wait("return !document.querySelector('#send').hidden")
    before = [("user", "before"), ("assistant", "well")] if first else []
    assert messages(page) == [*before, ("user", "much too long")]
    assert page.run("return document.querySelector('#question').value") == ""


def test_an_edit_that_is_refused_stays_in_its_field(chat):
    page = chat(stream("first"), refusal("too long"))
    ask(page, "question")
    click(page, "Edit")
    page.type(".editor textarea", " and more" + ENTER)
    page.wait(
        "return document.querySelector('.editor') && !document.querySelector('#fault').hidden"
    )
    assert (
        page.run("return document.querySelector('.editor textarea').value") == "question and more"
    )
    assert texts(page, "#turns .said") == ["question", "first"]


@pytest.mark.parametrize(
    ("usage", "said"),
    [
        (USAGE, "Cut off at the limit of 30 tokens for an answer."),
        ({**USAGE, "total_tokens": 4096}, "Cut off: the model takes no more than 4,096 tokens."),
    ],
)
def test_a_cut_answer_says_so(chat, usage, said):
    page = chat(stream("and so", finish="length", usage=usage))
    ask(page, "tell")
    assert texts(page, "#turns .cut") == [f"✂{said}"]
    assert "Continue" in texts(page, "#turns button")


def test_reasoning_folds_and_goes_back_to_the_server(chat):
    page = chat(stream({"reasoning_content": "hm, "}, {"reasoning_content": "ah"}, "so"))
    ask(page, "why")
    assert texts(page, "#turns details summary") == ["Reasoning"]
    assert page.run("return document.querySelector('.reasoning').open") is False
    assert texts(page, "#turns .thought") == ["hm, ah"]
    ask(page, "again")
    assert bodies(page)[-1]["messages"][1]["reasoning_content"] == "hm, ah"


def test_tool_calls_are_shown_and_answered(chat):
    called = calls(("weather", '{"city": "Lagos"}'), ("time", "{}"))
    page = chat(stream(*called, finish="tool_calls"), stream("Warm."))
    page.run("document.querySelector('#settings').open = true")
    tools = [{"name": "weather"}, {"type": "function", "function": {"name": "time"}}]
    page.type("#tools", json.dumps(tools))
    ask(page, "how is it in Lagos?")
    assert bodies(page)[-1]["tools"] == [
        {"type": "function", "function": {"name": "weather"}},
        {"type": "function", "function": {"name": "time"}},
    ]
    assert texts(page, ".call .name") == ["Calls weather", "Calls time"]
    assert texts(page, ".call pre") == ['{\n  "city": "Lagos"\n}', "{}"]
    page.type(".results label:nth-of-type(1) textarea", '{"degrees": 31}')
    page.type(".results label:nth-of-type(2) textarea", "noon")
    click(page, "Send 2 results")
    said = bodies(page)[-1]["messages"]
    assert said[1]["tool_calls"][0] == {
        "id": "call_0",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Lagos"}'},
    }
    assert said[2:] == [
        {"role": "tool", "content": '{"degrees": 31}', "tool_call_id": "call_0"},
        {"role": "tool", "content": "noon", "tool_call_id": "call_1"},
    ]
    assert texts(page, "#turns .said:not([hidden])")[-1] == "Warm."
    assert texts(page, "#turns .who")[-3:] == ["Result of weather", "Result of time", "Model"]


def test_tools_that_are_no_json_are_refused_before_anything_is_sent(chat):
    page = chat(stream("no"))
    page.run("document.querySelector('#settings').open = true")
    page.type("#tools", "[weather]")
    assert texts(page, "#tools-fault")[0].startswith("Tools: ")
    ask(page, "hello", until="return !document.querySelector('#fault').hidden")
    assert page.run("return document.querySelector('#question').value") == "hello"
    assert bodies(page) == []


def test_settings_are_sent_and_kept(chat):
    page = chat(stream("yes"))
    page.run("document.querySelector('#settings').open = true")
    wanted = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "max_tokens": 64,
        "seed": 7,
    }
    for name, value in wanted.items():
        page.type(f"#{name.replace('_', '-')}", str(value))
    change = (
        "const e = document.querySelector('%s'); e.value = '%s';"
        "e.dispatchEvent(new Event('change'))"
    )
    page.run(change % ("#thinking", "off"))
    page.run(change % ("#model", "other"))
    page.type("#system", "Be brief.")
    ask(page, "hello")
    chat(stream("yes"), keeps=True)
    page.wait("return document.querySelectorAll('#turns .gave').length === 1")
    ask(page, "hello again")
    body = bodies(page)[-1]
    assert {name: body[name] for name in wanted} == wanted
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["model"] == "other"
    assert [role for role, _ in messages(page)] == ["system", "user", "assistant", "user"]
    page.run("document.querySelector('#reset-settings').click()")
    page.run(change % ("#thinking", "high"))
    ask(page, "third")
    body = bodies(page)[-1]
    assert body["reasoning_effort"] == "high"
    assert not body.keys() & {*wanted, "chat_template_kwargs"}


def test_a_setting_that_is_no_number_is_named(chat):
    page = chat(stream("yes"))
    page.run("document.querySelector('#settings').open = true")
    page.type("#temperature", "e")
    ask(page, "hello", until="return !document.querySelector('#fault').hidden")
    assert texts(page, "#fault") == ["temperature: use a number"]


def test_an_error_in_the_middle_keeps_what_came(chat):
    broken = stream("half", finish=None)
    broken["events"].append({"error": {"code": 500, "message": "the engine died"}})
    page = chat(broken)
    ask(page, "go", until="return !document.querySelector('#fault').hidden")
    assert texts(page, "#turns .said") == ["go", "half"]
    assert texts(page, "#turns .gave")[0].startswith("ended by an error · 320 of 400")
    assert texts(page, "#fault") == ["the engine died"]


def test_a_turn_is_copied(chat, browser, files):
    page = chat(stream("see `this`"))
    granted = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    page.command("Browser.grantPermissions", origin=files, permissions=granted)
    ask(page, "hello")
    page.run("[...document.querySelectorAll('.model button')][0].click()")
    page.wait("return document.querySelector('.model button').textContent === 'Copied'")
    page.run("navigator.clipboard.readText().then((text) => { window.copied = text })")
    page.wait("return window.copied")
    assert page.run("return window.copied") == "see `this`"


def test_a_long_answer_is_followed_until_somebody_scrolls(chat):
    lines = [f"line {n}\n\n" for n in range(300)]
    page = chat(stream(*lines, finish=None, pauses=True), stream("x"))
    page.type("#question", "count" + ENTER)
    page.wait("return document.querySelector('#turns').scrollTop > 300")
    page.run("document.querySelector('#turns').scrollTop = 0")
    page.wait("return document.querySelector('#turns').textContent.includes('line 299')")
    assert page.run("return document.querySelector('#turns').scrollTop") == 0
