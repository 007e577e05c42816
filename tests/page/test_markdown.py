"""Markdown of a model in a browser: what it becomes, and what it must never become."""

import json

import pytest

from tests.page.answers import stream
from tests.webdriver import ENTER

pytestmark = pytest.mark.browser

SAMPLE = """# Title

Text with **bold**, *italic*, `code`, ~~gone~~ and a [link](https://example.org/a?b=c).
A second line.

- one
- two
  1. inner

  text of two

> quoted

| a | b |
|---|--:|
| 1 | 2 |

```python
def f(x: int) -> str:
    return "a" * x  # comment
```

- [x] done
- [ ] open

[defined]: https://example.org/later
The [defined] one.
"""


@pytest.fixture
def shown(chat):
    """Answers a question with this text, and returns the page and the elements of the answer."""

    def show(*pieces, **options):
        page = chat(stream(*pieces, **options))
        page.type("#question", "go" + ENTER)
        page.wait("return !document.querySelector('#send').hidden")
        return page, page.run("return document.querySelector('.model .said').innerHTML")

    return show


def test_markdown_becomes_elements(shown):
    page, html = shown(SAMPLE)
    for part in (
        "<h3>Title</h3>",
        "<strong>bold</strong>",
        "<em>italic</em>",
        "<code>code</code>",
        "<del>gone</del>",
        "</a>.<br>A second line.",
        "<blockquote>",
        '<td align="right">2</td>',
        "☑ done",
        "☐ open",
    ):
        assert part in html, html
    links = "return [...document.querySelectorAll('.said a')].map((e) => [e.href, e.target, e.rel])"
    rel = "noopener noreferrer nofollow"
    assert page.run(links) == [
        ["https://example.org/a?b=c", "_blank", rel],
        ["https://example.org/later", "_blank", rel],
    ]


def test_code_has_its_language_colours_and_a_copy_button(shown, files):
    page, html = shown(SAMPLE)
    assert '<span class="hljs-keyword">def</span>' in html
    assert page.run("return document.querySelector('figcaption span').textContent") == "python"
    page.command("Browser.grantPermissions", origin=files, permissions=["clipboardReadWrite"])
    page.run("document.querySelector('figcaption button').click()")
    page.run("navigator.clipboard.readText().then((text) => { window.copied = text })")
    page.wait("return window.copied")
    code = 'def f(x: int) -> str:\n    return "a" * x  # comment'
    assert page.run("return window.copied") == code


def test_a_text_that_grows_ends_as_one_that_came_at_once(shown):
    _, whole = shown(SAMPLE)
    _, grown = shown(*(SAMPLE[at : at + 4] for at in range(0, len(SAMPLE), 4)), pauses=True)
    assert grown == whole


def test_what_is_drawn_on_the_way_is_what_it_would_be_as_a_whole(chat):
    """Cut anywhere, the blocks that are drawn once and the last one together are the whole."""
    page = chat(stream("x"))
    page.run(
        """
        import("/ui/markdown.mjs").then(({ MarkdownView, rendered }) => {
          const text = arguments[0], wrong = [];
          const html = (fragment) => {
            const box = document.createElement("div");
            box.append(fragment);
            return box.innerHTML.replace(/\\n+/g, "\\n").trim();
          };
          const box = document.createElement("div");
          const view = new MarkdownView(box);
          for (let end = 1; end <= text.length; end += 1) {
            view.text = text.slice(0, end);
            view.isWaiting = true;
            view.draw();
            const drawn = box.innerHTML.replace(/\\n+/g, "\\n").trim();
            if (drawn !== html(rendered(view.text))) wrong.push(end);
          }
          window.wrong = [wrong, view.numDone];
        });
        """,
        SAMPLE.partition("[defined]")[0],
    )
    page.wait("return window.wrong")
    wrong, num_done = page.run("return window.wrong")
    assert wrong == []
    assert num_done > 150


ATTACKS = [
    "<img src=x onerror='window.hit = 1'>",
    "<script>window.hit = 1</script>",
    "<svg onload='window.hit = 1'>",
    "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe>",
    "[click](javascript:window.hit=1)",
    "[click](java\nscript:window.hit=1)",
    "[click](data:text/html,<script>window.hit=1</script>)",
    "[click](&#106;avascript:window.hit=1)",
    "<a href='javascript:window.hit=1'>click</a>",
    "![picture](https://example.org/secret.png)",
    "![picture](javascript:window.hit=1)",
    '[a](https://example.org "onmouseover=window.hit=1")',
    "```<img/src=x/onerror=window.hit=1>\ncode\n```",
    '```"onload=window.hit=1\ncode\n```',
    "```html\n<img src=x onerror='window.hit = 1'>\n```",
    "<style>body { display: none }</style>",
    "<form action='https://example.org'><input name=a></form>",
    "<math><mtext><table><mglyph><style><img src=x onerror='window.hit = 1'>",
    "`<img src=x onerror='window.hit = 1'>`",
    r"$\href{javascript:window.hit=1}{click}$",
    r"$\htmlData{a=b}{x} \includegraphics{https://example.org/secret.png}$",
    "$$ <img src=x onerror='window.hit = 1'> $$",
    r"$\def\a{\a\a}\a$",
    "|<img src=x onerror='window.hit=1'>|\n|-|\n|<script>window.hit=1</script>|",
]

HARMLESS = """
const answers = [...document.querySelectorAll('#turns .said, #turns .thought')];
const all = answers.flatMap((said) => [...said.querySelectorAll('*')]);
const bad = "img, script, style, svg, iframe, form, input, math *:is(a, img), object";
return all.filter((e) => e.matches(bad)
  || [...e.attributes].some(({name}) => name.startsWith('on') || name === 'style')
  || (e.matches('a[href]') && !/^(https?|mailto):/.test(e.href))).map((e) => e.outerHTML);
"""


def test_what_a_model_or_a_person_writes_never_runs_and_loads_nothing(chat):
    page = chat(*(stream(attack, {"reasoning_content": attack}) for attack in ATTACKS))
    for num, attack in enumerate(ATTACKS, start=1):
        page.run("document.querySelector('#question').value = arguments[0]", attack)
        page.run("document.querySelector('#ask').requestSubmit()")
        page.wait(f"return document.querySelectorAll('#turns .gave').length === {num}")
        page.wait("return !document.querySelector('#send').hidden")
    assert page.run(HARMLESS) == []
    page.run("for (const link of document.querySelectorAll('#turns a:not([href])')) link.click()")
    assert page.run("return window.hit ?? null") is None
    plain = page.run("return [...document.querySelectorAll('.user .said')].map((e) => e.innerText)")
    assert plain == ATTACKS


@pytest.mark.parametrize(
    "text", ["a\r\nb\r\n\r\nc", "\t- x\n\n\tcode\n", "**open", "```py\nx = 1", ""]
)
def test_odd_texts_are_drawn(shown, text):
    page, _ = shown(text or {"reasoning_content": "hm"}, "" if text else {"content": ""})
    assert page.run("return document.querySelectorAll('.model').length") == 1


def test_a_large_block_of_code_is_left_without_colours(shown):
    _, html = shown("```json\n" + json.dumps(list(range(30_000))) + "\n```")
    assert "hljs" not in html
    _, html = shown("```json\n" + json.dumps(list(range(300))) + "\n```")
    assert "hljs" in html


MATH = r"""Prices of $5 and $10, and `$x$` in code. In a line $a_1 + b^2$ and \(\frac{1}{2}\).

$$
\int_0^1 x^2 \, dx = \begin{cases} \frac13 \\ y \end{cases}
$$

\[ e^{i\pi} = -1 \]

Broken: $\frac{$ and \(\href{javascript:window.hit=1}{x}\) and
$\text{<img src=x onerror=window.hit=1>}$.
"""


def test_formulas_become_mathml(shown):
    page, html = shown(MATH)
    sources = "return [...document.querySelectorAll('.said math')].map((e) => e.textContent)"
    drawn = page.run(sources)
    assert drawn[0].replace(" ", "") == "a1+b2"
    assert len(drawn) == 6, drawn
    apart = "return document.querySelectorAll('.said math[display=block]').length"
    assert page.run(apart) == 2
    assert "Prices of $5 and $10" in html
    assert "<code>$x$</code>" in html
    assert "annotation" not in html
    assert page.run(HARMLESS) == []
    assert page.run("return window.hit ?? null") is None
