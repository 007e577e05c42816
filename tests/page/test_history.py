"""Chats that the browser keeps."""

import json

import pytest

from tests.page.answers import stream
from tests.webdriver import ENTER

pytestmark = pytest.mark.browser

ESCAPE = "\ue00c"


def names(page):
    return page.run("return [...document.querySelectorAll('.opener')].map((e) => e.textContent)")


def said(page):
    return page.run(
        "return [...document.querySelectorAll('#turns .said')].map((e) => e.textContent.trim())"
    )


def press(page, selector):
    page.run(f"document.querySelector({json.dumps(selector)}).click()")


def named(page, *wanted):
    page.wait(
        "return JSON.stringify([...document.querySelectorAll('.opener')]"
        f".map((e) => e.textContent)) === JSON.stringify({json.dumps(wanted)})"
    )


def decide(page, answer):
    """Answers the question whether a person is sure, once it is asked."""
    page.wait("return document.querySelector('#sure-dialog').open")
    press(page, f"#sure-dialog [value={answer}]")


def talk(page, question):
    """A chat of its own, with an answer."""
    press(page, "#new-chat")
    page.type("#question", question + ENTER)
    page.wait("return document.querySelector('#turns .gave')")
    page.wait("return !document.querySelector('#send').hidden")


def test_chats_are_kept_opened_and_gone_on_with(chat):
    page = chat(stream("one"))
    talk(page, "first question")
    talk(page, "second question")
    named(page, "second question", "first question")
    chat(stream("more"), keeps=True)
    named(page, "second question", "first question")
    page.wait("return document.querySelectorAll('#turns .said').length === 2")
    press(page, "li:nth-child(2) .opener")
    page.wait("return document.querySelector('#turns .said').textContent === 'first question'")
    page.type("#question", "and then?" + ENTER)
    named(page, "first question", "second question")
    assert said(page) == ["first question", "one", "and then?", "more"]
    current = "return document.querySelector('.opener[aria-current]').textContent"
    assert page.run(current) == "first question"


def test_a_chat_is_renamed(chat):
    page = chat(stream("one"))
    talk(page, "x" * 200)
    named(page, "x" * 59 + "…")
    press(page, "[aria-label^=Rename]")
    page.type("#chat-list input", "Work" + ENTER)
    named(page, "Work")
    page.type("#question", "more" + ENTER)
    page.wait("return document.querySelectorAll('#turns .gave').length === 2")
    chat(stream("one"), keeps=True)
    named(page, "Work")
    press(page, "[aria-label^=Rename]")
    page.type("#chat-list input", "Other" + ESCAPE)
    named(page, "Work")


def test_an_answer_that_comes_leaves_a_list_alone_that_somebody_is_in(chat):
    page = chat(stream("one"), stream("two", finish=None))
    talk(page, "a")
    named(page, "a")
    page.type("#question", "more" + ENTER)
    page.wait("return document.querySelectorAll('.model').length === 2")
    press(page, "[aria-label^=Rename]")
    page.run("document.querySelector('#chat-list input').value = 'half a na'")
    press(page, "#stop")
    page.wait("return !document.querySelector('#send').hidden")
    page.type("#chat-list input", "me" + ENTER)
    named(page, "half a name")
    page.run("document.querySelector('.opener').focus()")
    page.run(
        "import('/ui/chats.mjs').then(({ showChats }) => showChats())"
        ".then(() => { window.isShown = true })"
    )
    page.wait("return window.isShown")
    assert page.run("return document.activeElement.className") == "opener"


def test_a_chat_is_deleted_once_a_person_is_sure(chat):
    page = chat(stream("one"))
    for question in ("a", "b", "c"):
        talk(page, question)
    named(page, "c", "b", "a")
    press(page, "[aria-label='Delete c']")
    decide(page, "no")
    press(page, "[aria-label='Delete c']")
    decide(page, "yes")
    named(page, "b", "a")
    assert said(page) == []
    press(page, "#drop-chats")
    decide(page, "yes")
    named(page)
    chat(stream("one"), keeps=True)
    page.wait("return document.querySelector('#chats-note').textContent")
    assert names(page) == []


def test_a_chat_that_is_deleted_while_an_answer_comes_stays_deleted(chat):
    page = chat(stream("one", finish=None))
    page.type("#question", "a" + ENTER)
    page.wait("return document.querySelector('.model .said')?.textContent.trim() === 'one'")
    press(page, "#stop")
    named(page, "a")
    page.wait("return !document.querySelector('#send').hidden")
    page.type("#question", "b" + ENTER)
    page.wait("return document.querySelectorAll('.model').length === 2")
    press(page, "[aria-label='Delete a']")
    decide(page, "yes")
    page.wait("return !document.querySelector('#send').hidden")
    named(page)
    assert said(page) == []


def test_a_page_that_is_closed_in_the_middle_keeps_what_had_come(chat):
    page = chat(stream("half", finish=None))
    page.type("#question", "go" + ENTER)
    page.wait("return document.querySelector('.model .said')?.textContent.trim() === 'half'")
    named(page, "go")
    chat(stream(" and half"), keeps=True)
    page.wait("return document.querySelector('#turns .gave')")
    assert said(page) == ["go", "half"]
    assert page.run("return document.querySelector('#turns .gave').textContent") == "not finished"
    press(page, "[aria-label='Continue this answer']")
    page.wait(
        "return document.querySelector('.model .said').textContent.trim() === 'half and half'"
    )


def test_no_more_than_two_hundred_chats_are_kept_and_the_oldest_go(chat):
    page = chat(stream("one"))
    page.run(
        """
        import("/ui/store.mjs").then(async ({ putChat, listChats }) => {
          for (let n = 0; n < 203; n += 1) {
            await putChat({ id: `c${n}`, at: n, messages: [] }, `c${n}`);
          }
          window.kept = (await listChats()).map(({ id }) => id);
        });
        """
    )
    page.wait("return window.kept")
    kept = page.run("return window.kept")
    assert (len(kept), kept[0], kept[-1]) == (200, "c202", "c3")


def test_without_room_in_the_browser_chats_last_until_the_page_is_closed(chat):
    page = chat(stream("one"), script="Object.defineProperty(window, 'indexedDB', {value: null});")
    talk(page, "a")
    talk(page, "b")
    named(page, "b", "a")
    press(page, "[aria-label='Delete a']")
    decide(page, "yes")
    named(page, "b")


def test_the_list_lies_over_the_chat_on_a_narrow_screen(chat):
    page = chat(stream("one"))
    talk(page, "a")
    page.size(390, 844)
    page.wait("return document.querySelector('#chats').hidden")
    press(page, "#show-chats")
    assert page.run("return document.activeElement.id") == "new-chat"
    assert page.run("return document.querySelector('#show-chats').ariaExpanded") == "true"
    page.type("#new-chat", ESCAPE)
    assert page.run("return document.querySelector('#chats').hidden") is True
    assert page.run("return document.activeElement.id") == "show-chats"
