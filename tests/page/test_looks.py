"""The page as a person sees it, light and dark, wide and narrow; `--pictures` keeps the pictures.

Nothing runs out of the screen, everything has a name, and every text stands out from its ground.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.page.answers import USAGE, calls, refusal, stream
from tests.webdriver import ENTER

pytestmark = pytest.mark.browser

LEAST_CONTRAST = 4.5
"""WCAG 2.2, level AA, for text of this size."""

CLOCK = "const now = performance.now.bind(performance); performance.now = () => 12 * now();"
"""Makes the page's clock go faster: a stub answers at once."""

CODE = """`str.partition` splits at the **first** separator, and always returns three parts:

```python
def host_of(address: str) -> str:
    host, _, port = address.partition(":")
    return host if port.isdigit() else address  # no port

print(host_of("127.0.0.1:8000"))
```

| call | result |
|---|---|
| `"a=b".partition("=")` | `("a", "=", "b")` |
| `"ab".partition("=")` | `("ab", "", "")` |

So it needs no check of the length, unlike `split`:

1. it never raises for a missing separator,
2. the separator itself tells whether it was found.
"""

CONTRASTS = """
const luminance = ([r, g, b]) => {
  const part = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
};
const colour = (text) => text.match(/[0-9.]+/g).map(Number);
const ground = (e) => {
  for (; e; e = e.parentElement) {
    const found = colour(getComputedStyle(e).backgroundColor);
    if (found.length === 3 || found[3] > 0) return found;
  }
  return [255, 255, 255];
};
const worst = [];
for (const e of document.querySelectorAll("body *")) {
  const has = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  if (!has || !e.checkVisibility({visibilityProperty: true, opacityProperty: true})) continue;
  if (e.disabled || e.closest("noscript, .hidden")) continue;
  const [a, b] = [luminance(colour(getComputedStyle(e).color)), luminance(ground(e))];
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (contrast < %s) worst.push([contrast.toFixed(2), e.className, e.textContent.slice(0, 40)]);
}
return worst;
"""

UNNAMED = """
return [...document.querySelectorAll("button, input, textarea, select, [tabindex], svg, canvas")]
  .filter((e) => !(e.textContent.trim() || e.ariaLabel || e.labels?.length
    || e.getAttribute("aria-labelledby") || e.closest("[aria-hidden], [aria-labelledby]")))
  .map((e) => e.outerHTML)"""

OUTSIDE = """
return [...document.querySelectorAll("header *, #chat *, #chats *")].filter((e) => {
  const {left, right, width} = e.getBoundingClientRect();
  return width && !e.closest("pre, .wide, .hidden, #chat-list, .skip")
    && (left < -1 || right > innerWidth + 1);
}).map((e) => e.outerHTML.slice(0, 100))"""


SCREENS = [
    ("light", 1400, 900),
    ("dark", 1400, 900),
    ("light", 390, 844),
    ("dark", 390, 844),
]


@pytest.fixture
def look(request, tmp_path):
    """Checks what is seen, and takes a picture of it."""
    kept = request.config.getoption("--pictures")
    folder = Path(kept) if kept else tmp_path

    def check(page, name, screens=SCREENS, *, is_shown=False):
        for scheme, width, height in screens:
            page.size(width, height)
            colours(page, scheme)
            page.run("document.activeElement.blur()")
            page.run("const t = document.querySelector('#turns'); t.scrollTop = t.scrollHeight")
            page.wait("return document.documentElement.dataset.drawn")
            device = "-phone" if width < 1000 else ""
            target = folder if is_shown else tmp_path
            page.picture(target / f"chat-{name}-{scheme}{device}.png")
            assert page.run(CONTRASTS % LEAST_CONTRAST) == []
            assert page.run(UNNAMED) == []
            assert page.run(OUTSIDE) == []
            assert page.run("return document.documentElement.scrollWidth <= innerWidth")

    return check


def colours(page, scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.command("Emulation.setEmulatedMedia", features=features)
    page.wait(f"return document.documentElement.dataset.theme === '{scheme}'")


def ask(page, question, num_turns):
    page.type("#question", question + ENTER)
    page.wait(f"return document.querySelectorAll('#turns .gave').length === {num_turns}")
    page.wait("return !document.querySelector('#send').hidden")


def usage(cached, new, told):
    details = {"cached_tokens": cached, "lost_tokens": {"unseen": new - 1, "last_token": 1}}
    return {
        **USAGE,
        "prompt_tokens": cached + new,
        "completion_tokens": told,
        "prompt_tokens_details": details,
    }


def test_a_chat_with_code(chat, look):
    first = stream("Yes: `partition` and `rpartition`.", usage=usage(0, 38, 9))
    thought = {"reasoning_content": "They want an example with a missing separator."}
    page = chat(
        first,
        stream(thought, *re.split(r"(?<= )", CODE), usage=usage(47, 14, 182), pauses=True),
        script=CLOCK,
    )
    ask(page, "Can Python split a string in two?", 1)
    ask(page, "What does `str.partition` do? Show an example.", 2)
    look(page, "code", is_shown=True)


def test_a_chat_with_a_tool_call(chat, look):
    arguments = '{"city": "Lagos", "unit": "celsius"}'
    called = stream(
        {"reasoning_content": "I should look that up."},
        *calls(("get_weather", arguments)),
        finish="tool_calls",
        pauses=True,
        usage=usage(256, 41, 33),
    )
    second = stream("It is **31 °C** ", "in Lagos.", usage=usage(330, 22, 11), pauses=True)
    page = chat(called, second, called, script=CLOCK)
    ask(page, "How warm is it in Lagos?", 1)
    page.type(".results textarea", '{"degrees": 31}')
    page.run("document.querySelector('.results').requestSubmit()")
    page.wait("return document.querySelectorAll('#turns .gave').length === 2")
    page.wait("return !document.querySelector('#send').hidden")
    ask(page, "And tomorrow?", 3)
    look(page, "tool-call", is_shown=True)


def test_a_cut_answer_and_a_question_that_is_too_long(chat, look):
    cut = stream(
        "Once the request has been admitted, ", "its pages are pinned, and", finish="length",
        usage=usage(128, 20, 16), pauses=True,
    )  # fmt: skip
    why = "the prompt has 5,210 tokens, and this model takes 4,096: shorten it"
    page = chat(cut, refusal(why), script=CLOCK)
    ask(page, "How is a request admitted?", 1)
    page.type("#question", "Here is the whole file: " + "and so on " * 30 + ENTER)
    page.wait("return !document.querySelector('#fault').hidden")
    look(page, "cut", is_shown=True)


def test_settings_and_the_list_of_chats(chat, look):
    page = chat(stream("Hel", "lo.", pauses=True), script=CLOCK)
    for question in ("How do I rename a branch?", "What is a mark? " * 9):
        page.run("document.querySelector('#new-chat').click()")
        ask(page, question, 1)
    page.run("document.querySelector('#settings').open = true")
    look(page, "settings")
    page.run("document.querySelector('#show-chats').click()")
    page.wait("return !document.querySelector('#chats').hidden")
    look(page, "list", SCREENS[2:])


def test_the_cache_can_be_put_away(chat, look):
    page = chat(stream(*CODE.split("|"), pauses=True), script=CLOCK)
    ask(page, "What does `str.partition` do? Show an example.", 1)
    page.run("document.querySelector('#beside').click()")
    assert page.run("return document.querySelector('#cache').offsetParent === null")
    look(page, "alone", SCREENS[:2])
    page = chat(stream(CODE), keeps=True)
    assert page.run("return document.querySelector('#cache').offsetParent === null")
