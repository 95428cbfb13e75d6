"""Cut-off answers and damaged texts are found, and what only looks like them is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data.quality.oddities import ODDITIES, control, html, invisible, mojibake, unfinished
from rlhf.data.scripts import script

LONG = "You could begin with a walk along the river in the morning, before it gets too hot for that. After that "


@pytest.mark.parametrize(
    "text",
    [
        LONG + "you might want to",
        LONG + "there are, for example,",
        "Here are some ideas:",
        "First of all, this is the list of them;",
        "Like this:\n```python\nprint(1)\n",
        LONG + "\n\n2. " + LONG + "it is worth",
        LONG.replace("river", "Fluß") + "ging es auch noch weiter so",
    ],
)
def test_an_answer_that_stops_in_the_middle_is_unfinished(text):
    assert unfinished(text)


@pytest.mark.parametrize(
    "text",
    [
        LONG + "you rest.",
        LONG + "you rest!”",
        LONG + "you rest (or not)",
        LONG + "you rest 😊",
        "Yes",
        "I would rather not say",
        LONG + "\n\nBest regards,\nAnna Smith",
        LONG + "\n- a walk\n- some rest",
        LONG + "\n3. The long road to the house by the sea",
        LONG + "\nAnswer: Illinois",
        LONG + "it all comes to 42",
        LONG + "you find more of it at https://example.org/walks",
        LONG + "you write to anna@example",
        LONG + "you post it with the hashtag #walks",
        "Like this:\n```python\nprint(1)\n```",
        "まず川沿いを散歩して、それから休むといいでしょう、そのあとで" * 8,
        "ठीक है " * 30,
        "",
        ":",
    ],
)
def test_a_finished_or_undecidable_text_is_not_called_unfinished(text):
    assert not unfinished(text)


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
@pytest.mark.parametrize(
    "text",
    [
        *("café", "naïve it isn’t", "“Hello”", "Größe", "“Über”", "5 €", "č š ž", "→", "hi 😊"),
        *("привет", "你好", "שלום", "مرحبا"),
    ],
)
def test_mojibake_is_found_where_it_can_be_undone(text, encoding):
    misread = text.encode().decode(encoding, "ignore")
    assert mojibake(f"He said {misread} and left.")
    assert not mojibake(f"He said {text} and left.")


@pytest.mark.parametrize(
    "text",
    [
        "« un café\xa0» et « l’été…\xa0»",
        "„Spaß“ — „Fuß“",
        "CAFÉ” – À…",
        "“EU VOLTO AMANHÃ” – AMANHÃ…",
        "MAÇÃ–UVA, MANHÃ»",
        "«está…\xa0» y “NÄ”",
        "3×\xa04 = 12, Ø\xa010 mm, 20 °C ± 2",
        "São Paulo, coração, mãe",
        "“‘Well’ — he said…”",
        "Ελλάδα, Россия, 日本語, Việt Nam, ÅÄÖ",
        "½ × ¾ © ® ™",
    ],
)
def test_ordinary_typesetting_is_no_mojibake(text):
    assert not mojibake(text)


@given(st.text())
def test_any_text_can_be_judged(text):
    for sign in ODDITIES.values():
        assert sign(text) in (True, False)
    assert unfinished(text) in (True, False)
    assert script(text) is None or script(text)


def test_control_and_invisible_characters():
    assert control("a\x00b") and control("a\x1b[0m") and control("a\x85b") and not control("a\tb\r\n")
    for text in ("a\u200bb", "\ufeffa", "a\u202eb", "a\u2066b", "a\u200db", "hi\U000e0041\U000e0042"):
        assert invisible(text), ascii(text)
    family, scotland = "👨\u200d👩\u200d👧", "\U0001f3f4\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f"
    for text in (family, scotland, "می\u200cخواهم", "क्\u200dष", "ភាសា\u200bខ្មែរ", "naïve"):
        assert not invisible(text), ascii(text)


def test_html_is_odd_unless_it_is_code():
    for text in ("one<br>two", "<p>Hi</p>", '<a href="x">y</a>', "R&amp;B", "it&#39;s", "a&nbsp;b", "</DIV>"):
        assert html(text), text
    for text in ("a < b and c > d", "AT&T; Q&A", "<MASK> <name>", "`<br>`", "```html\n<p>Hi</p>\n```", "x &foo; y"):
        assert not html(text), text


def test_script_is_that_of_most_letters():
    assert script("Hello 你好") == "Latin" and script("Что значит cat?") == "Cyrillic"
    assert script("日本語のテキスト") == "CJK" and script("مرحبا") == "Arabic" and script("안녕") == "Hangul"
    assert script("12 + 3 = 15 😊") is None and script("") is None
