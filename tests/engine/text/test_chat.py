import tracemalloc

import pytest

from milepost.engine.text.chat import render
from milepost.errors import InvalidRequestError

TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
GENERATION = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
QWEN = "{% for m in messages %}" + TURN + "{% endfor %}" + GENERATION

WITH_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}"
    "{% for t in tools %}{{ t | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% elif messages[0].role == 'system' %}{% set m = messages[0] %}" + TURN + "{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}" + TURN + "{% endif %}{% endfor %}"
) + GENERATION

STRIPS_REASONING = (
    "{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'assistant' and not loop.last %}"
    "{% set content = m.content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)

NEEDS_USER = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('no user query') }}{% endif %}" + QWEN
)

NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
) + QWEN

SYSTEM_IN_USER = (
    "{% set head = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}"
    "{% for m in messages %}{% if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'user' and loop.index0 <= 1 %}{{ head }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
) + GENERATION

DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nhelp<|im_end|>\\n' }}{% endif %}"
) + QWEN

SYSTEM = {"role": "system", "content": "you are a helpful assistant"}
USER = {"role": "user", "content": "the quick brown fox"}
ANSWER = {"role": "assistant", "content": "<think>hm</think>\n\njumps over"}
AGAIN = {"role": "user", "content": "the lazy dog"}

SYSTEM_TEXT = "<|im_start|>system\nyou are a helpful assistant<|im_end|>\n"
USER_TEXT = "<|im_start|>user\nthe quick brown fox<|im_end|>\n"


@pytest.fixture
def with_template(tokenizer):
    def set_template(template):
        tokenizer.chat_template = template
        return tokenizer

    yield set_template
    tokenizer.chat_template = None


def texts(tokenizer, prompt):
    """The whole prompt, and the text before each mark."""
    assert list(prompt.cache_marks) == sorted(set(prompt.cache_marks))
    assert all(0 < mark < len(prompt.token_ids) for mark in prompt.cache_marks)
    whole = tokenizer.decode(prompt.token_ids)
    return whole, [tokenizer.decode(prompt.token_ids[:mark]) for mark in prompt.cache_marks]


@pytest.mark.parametrize("template", [QWEN, WITH_TOOLS, NEEDS_USER], ids=["qwen", "tools", "needs"])
def test_marks_end_the_system_prompt_and_the_last_message(with_template, template):
    tokenizer = with_template(template)
    whole, before = texts(tokenizer, render(tokenizer, [SYSTEM, USER]))
    assert whole == SYSTEM_TEXT + USER_TEXT + "<|im_start|>assistant\n"
    head, body = before
    assert head in (SYSTEM_TEXT, SYSTEM_TEXT + "<|im_start|>user\n")
    assert body == SYSTEM_TEXT + USER_TEXT


def test_a_template_that_takes_a_system_prompt_alone_gives_its_exact_end(with_template):
    tokenizer = with_template(QWEN)
    assert texts(tokenizer, render(tokenizer, [SYSTEM, USER]))[1][0] == SYSTEM_TEXT


def test_stripped_reasoning_leaves_the_marks_right(with_template):
    tokenizer = with_template(STRIPS_REASONING)
    whole, before = texts(tokenizer, render(tokenizer, [SYSTEM, USER, ANSWER, AGAIN]))
    assert "hm" not in whole
    assert whole.endswith("<|im_end|>\n<|im_start|>assistant\n<think>\n")
    assert before == [SYSTEM_TEXT, whole.removesuffix("<|im_start|>assistant\n<think>\n")]


def test_the_mark_of_a_turn_is_a_prefix_of_the_next_turn(with_template):
    tokenizer = with_template(STRIPS_REASONING)
    first = render(tokenizer, [SYSTEM, USER])
    second = render(tokenizer, [SYSTEM, USER, ANSWER, AGAIN])
    assert first.token_ids[: first.cache_marks[-1]] == second.token_ids[: first.cache_marks[-1]]


def test_tools_belong_to_the_head(with_template):
    tokenizer = with_template(WITH_TOOLS)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    _, before = texts(tokenizer, render(tokenizer, [SYSTEM, USER], tools=tools))
    assert before[0].startswith("<|im_start|>system\nyou are a helpful assistant")
    assert before[0].endswith('"weather"}}\n<|im_end|>\n')
    _, before = texts(tokenizer, render(tokenizer, [USER], tools=tools))
    assert '"weather"' in before[0]
    assert "fox" not in before[0]


def test_a_system_prompt_inside_the_user_message_is_found(with_template):
    tokenizer = with_template(SYSTEM_IN_USER)
    _, before = texts(tokenizer, render(tokenizer, [SYSTEM, USER]))
    assert before[0].startswith("<|im_start|>user\nyou are a helpful assistant")
    assert "fox" not in before[0]


def test_a_default_system_prompt_is_found(with_template):
    tokenizer = with_template(DEFAULT_SYSTEM)
    _, before = texts(tokenizer, render(tokenizer, [USER]))
    assert before[0].startswith("<|im_start|>system\nhelp<|im_end|>\n")
    assert "fox" not in before[0]


def test_conversations_with_one_system_prompt_share_its_tokens(with_template):
    tokenizer = with_template(SYSTEM_IN_USER)
    one, two = (render(tokenizer, [SYSTEM, user]) for user in (USER, AGAIN))
    assert one.token_ids[: one.cache_marks[0]] == two.token_ids[: one.cache_marks[0]]


def test_a_template_without_system_role_has_the_user_say_it(with_template):
    tokenizer = with_template(NO_SYSTEM)
    assert texts(tokenizer, render(tokenizer, [USER]))[1][-1] == USER_TEXT
    whole, before = texts(tokenizer, render(tokenizer, [SYSTEM, USER]))
    said = "you are a helpful assistant\n\nthe quick brown fox"
    assert whole == f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
    assert before[-1] == f"<|im_start|>user\n{said}<|im_end|>\n"


def test_without_a_generation_prompt_the_end_is_no_mark(with_template):
    tokenizer = with_template(QWEN)
    prompt = render(tokenizer, [SYSTEM, USER], add_generation_prompt=False)
    whole, before = texts(tokenizer, prompt)
    assert (whole, before) == (SYSTEM_TEXT + USER_TEXT, [SYSTEM_TEXT])


def test_only_a_system_prompt_and_a_generation_prompt(with_template):
    tokenizer = with_template(QWEN)
    assert texts(tokenizer, render(tokenizer, [SYSTEM]))[1] == [SYSTEM_TEXT]


def test_a_token_over_a_boundary_is_left_out(with_template):
    tokenizer = with_template("{% for m in messages %}{{ m.role + m.content }}{% endfor %}")
    prompt = render(tokenizer, [{"role": "the q", "content": "uick"}], add_generation_prompt=False)
    assert prompt.token_ids == tokenizer.encode("the quick")
    assert all(mark < len(prompt.token_ids) for mark in prompt.cache_marks)


def test_template_kwargs_reach_the_template(with_template):
    tokenizer = with_template(QWEN + "{% if enable_thinking %}{{ '<think>' }}{% endif %}")
    prompt = render(tokenizer, [USER], chat_template_kwargs={"enable_thinking": True})
    assert tokenizer.decode(prompt.token_ids).endswith("<think>")
    named = render(with_template(None), [USER], chat_template_kwargs={"chat_template": QWEN})
    assert len(named.token_ids) < len(prompt.token_ids)


def test_a_slow_tokenizer_gives_the_same_marks(with_template):
    fast = with_template(QWEN)

    class Slow:
        is_fast = False
        chat_template = QWEN
        apply_chat_template = fast.apply_chat_template

        def encode(self, text, add_special_tokens):
            return fast.encode(text, add_special_tokens=add_special_tokens)

    assert render(Slow(), [SYSTEM, USER]) == render(fast, [SYSTEM, USER])


def test_text_parts_become_text_and_images_are_refused(with_template):
    tokenizer = with_template(QWEN)
    parts = [{"type": "text", "text": "the quick"}, {"type": "text", "text": "fox"}]
    prompt = render(tokenizer, [{"role": "user", "content": parts}])
    assert "the quick\nfox<|im_end|>" in tokenizer.decode(prompt.token_ids)
    with pytest.raises(InvalidRequestError, match="'image_url': only text"):
        render(tokenizer, [{"role": "user", "content": [{"type": "image_url"}]}])


@pytest.mark.parametrize("joint", ["", " "])
def test_a_template_that_reads_parts_says_what_stands_between_them(with_template, joint):
    """As Qwen3.5's do, whose parts follow each other."""
    tokenizer = with_template(
        "{% for m in messages %}<|im_start|>{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content %}{{ part.text }}"
        f"{{% if not loop.last %}}{{{{ '{joint}' }}}}{{% endif %}}"
        "{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    )
    marked = {"type": "text", "text": "the quick", "cache_control": {"type": "ephemeral"}}
    parts = [marked, {"type": "text", "text": "brown"}, {"type": "text", "text": "fox"}]
    plain = [{key: part[key] for key in ("type", "text")} for part in parts]
    own = tokenizer.apply_chat_template([{"role": "user", "content": plain}], tokenize=False)
    prompt = render(tokenizer, [USER, {"role": "user", "content": parts}])
    assert prompt.text.endswith(own)
    assert own == f"<|im_start|>the quick{joint}brown{joint}fox<|im_end|>"
    (end,) = prompt.breakpoints
    assert tokenizer.decode(prompt.token_ids[:end]).endswith("the quick")


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "one message or more"),
        (["hello"], "a role and a content"),
        ([{"content": "x"}], "a role and a content"),
        ([{"role": "user", "content": 5}], "content=5"),
        ([{"role": "user"}], "refuses the messages"),
    ],
)
def test_bad_messages_are_refused(with_template, messages, said):
    with pytest.raises(InvalidRequestError, match=said):
        render(with_template(QWEN), messages)


def test_no_template_is_refused_with_a_way_out(tokenizer):
    with pytest.raises(InvalidRequestError, match="no chat template"):
        render(tokenizer, [USER])


PARTS = {
    "role": "user",
    "content": [
        {"type": "text", "text": "the quick brown fox", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "jumps over the lazy dog"},
    ],
}


def test_cache_control_on_a_part_is_a_mark(with_template):
    tokenizer = with_template(QWEN)
    plain = {**PARTS, "content": [{**part} for part in PARTS["content"]]}
    plain["content"][0].pop("cache_control")
    prompt = render(tokenizer, [SYSTEM, PARTS])
    assert prompt.token_ids == render(tokenizer, [SYSTEM, plain]).token_ids
    _, before = texts(tokenizer, prompt)
    assert [text for text in before if text.endswith("the quick brown fox")]
    assert len(before) == 1 + len(render(tokenizer, [SYSTEM, plain]).cache_marks)


def test_cache_control_on_a_message_is_a_mark(with_template):
    tokenizer = with_template(QWEN)
    marked = {**USER, "cache_control": {"type": "ephemeral"}}
    prompt = render(tokenizer, [SYSTEM, marked, ANSWER, AGAIN])
    assert prompt.token_ids == render(tokenizer, [SYSTEM, USER, ANSWER, AGAIN]).token_ids
    _, before = texts(tokenizer, prompt)
    assert SYSTEM_TEXT + "<|im_start|>user\nthe quick brown fox" in before


def test_many_breakpoints_cost_what_their_text_costs(with_template):
    """4,000 parts, each copied for each, would be 128 MB of pointers."""
    tokenizer = with_template(QWEN)
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [part] * 4000}
    render(tokenizer, [message])
    tracemalloc.start()
    try:
        rendered = render(tokenizer, [message])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 2**20
    marked = render(tokenizer, [{"role": "user", "content": [part] * 8}])
    assert len(rendered.cache_marks) == len(marked.cache_marks)


def test_the_last_breakpoints_are_those_that_count(with_template):
    tokenizer = with_template(QWEN)
    part = {"type": "text", "text": "the quick brown fox"}
    marked = {**part, "cache_control": {"type": "ephemeral"}}

    def marks(parts):
        return render(tokenizer, [{"role": "user", "content": parts}]).cache_marks

    assert marks([marked] * 12) == marks([*[part] * 4, *[marked] * 8])
    message = {"role": "user", "content": [marked, part], "cache_control": {"type": "ephemeral"}}
    assert render(tokenizer, [message]).cache_marks == marks([marked, marked])
