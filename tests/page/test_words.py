"""The page has words for what the cache reports."""

import re
from pathlib import Path

import milepost.page
from milepost.cache.report import Lost

STATIC = Path(milepost.page.__file__).parent / "static"


def test_the_page_has_words_and_a_colour_for_every_reason():
    text = (STATIC / "words.mjs").read_text(encoding="utf-8")
    long, short = re.findall(
        r"^(?:export )?const (?:REASONS|SHORT) = (.*?)^[\]}];", text, re.S | re.M
    )
    assert re.findall(r'^  \["(\w+)", "[^"]+"\],$', long, re.M) == [
        "reused",
        *sorted(Lost, key=lambda reason: (reason is Lost.DISABLED, list(Lost).index(reason))),
    ]
    assert set(re.findall(r'^  (\w+): "[^"]+",$', short, re.M)) == set(Lost)
    style = (STATIC / "page.css").read_text(encoding="utf-8")
    for reason in Lost:
        assert len(re.findall(rf"--{reason}: #", style)) == 2, "light and dark"
        assert f"i.{reason} {{ background: var(--{reason}); }}" in style
