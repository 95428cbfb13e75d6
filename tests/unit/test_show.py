"""`rlhf data show`: what a person reads at 80 columns, and what cannot reach the terminal."""

import json
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from rlhf.data import formats, show
from rlhf.data.rows import Document, Example, Message, PreferencePair, PromptOnly
from tests.helpers import rlhf

ASKED = (Message("user", "Which one?"),)


def rendered(row, width: int = 80, **options) -> str:
    console = Console(width=width, highlight=False, **options)
    with console.capture() as capture:
        console.print(show.render(row))
    return capture.get()


def test_both_answers_stand_side_by_side_below_the_prompt():
    text = rendered(PreferencePair(ASKED, "the left answer", "the right answer", "pairs.jsonl:7"))
    lines = text.splitlines()
    assert "pairs.jsonl:7" in lines[0] and "Which one?" in lines[1]
    (line,) = [line for line in lines if "the left answer" in line]
    assert line.index("the left answer") < 40 < line.index("the right answer")


@pytest.mark.parametrize("answer", ["word " * 60, "x" * 300, "日本語のとても長い答え" * 20, "😀" * 90, "a\tb\n" * 9])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_lost(answer):
    text = rendered(PreferencePair(ASKED, answer, "short", "f:1"))
    assert max(map(cell_len, text.splitlines())) <= 80
    left = "".join(line[1:].split("│")[0] for line in text.splitlines() if line.startswith("│"))
    assert "".join(left.split()) == "".join(answer.split())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07\x1b[31mred", r"\x1b]0;title\x07\x1b[31mred"),
        ("a\x00b\x08c\rd\x9be", r"a\x00b\x08c\rd\x9be"),
        ("left \u202eright\u200b", r"left \u202eright\u200b"),
        ("[bold]no markup[/bold]", "[bold]no markup[/bold]"),
        ("👩\u200d🔬 is fine", "👩\u200d🔬 is fine"),
    ],
)
def test_control_characters_are_shown_and_never_sent(text, shown):
    assert show.visible(text).plain == shown
    rows = [Document(text, "\x1b[2Jf:1"), Example((Message("user", text),), text, "f:1")]
    rows.append(PreferencePair((Message("user", text),), text, f"other {text}", "f:1"))
    for row in rows:
        assert not {"\x1b", "\x07", "\x00", "\u202e", "\r"} & set(rendered(row))


def test_words_that_differ_are_marked():
    text = rendered(PreferencePair(ASKED, "the big red bird", "the big blue bird", "f:1"), force_terminal=True)
    assert "\x1b[1mred" in text and "\x1b[1mblue" in text
    assert "\x1b[1mbig" not in text and "\x1b[1mbird" not in text


def test_a_long_text_is_cut_and_says_by_how_much():
    pair = PreferencePair(ASKED, "x" * (show.LONGEST + 1234), "y", "f:1")
    assert "1,234 more" in " ".join(rendered(pair).replace("│", " ").split())


@pytest.fixture
def file(tmp_path):
    rows = [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(40)]
    rows[30]["chosen"] = "yes"
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "not JSON\n")
    return path


def test_a_prompt_without_an_answer_is_shown():
    text = rendered(PromptOnly(ASKED, "prompts.jsonl:1"))
    assert "Which one?" in text and "answer" not in text


@pytest.mark.parametrize(
    "row", [Example(ASKED, "The left.", "f:1", "left, west"), PromptOnly(ASKED, "f:1", "left, west")]
)
def test_the_right_answer_is_shown(row):
    text = rendered(row)
    assert re.search(r"^right answer +left, west *$", text, re.M)
    assert ("The left." in text) == isinstance(row, Example)


def test_a_worked_answer_is_shown_once():
    text = rendered(Example(ASKED, "So it is 24.", "f:1", "So it is 24."))
    assert text.count("So it is 24.") == 1


def test_the_choice_follows_the_seed_and_keeps_the_order_of_the_file(file):
    rows = formats.read([file], on_bad_row="skip")

    def chosen(**options) -> list[int]:
        return [int(row.source.rsplit(":", 1)[1]) for row in show.choose(rows, 6, **options)[0]]

    assert chosen(seed=None) == [1, 2, 3, 4, 5, 6]
    assert chosen(seed=1) == chosen(seed=1) == sorted(chosen(seed=1))
    assert len({tuple(chosen(seed=seed)) for seed in range(4)}) == 4


def test_the_command_shows_the_rows_that_were_asked_for(monkeypatch, capsys, file):
    code, out, _ = rlhf(monkeypatch, capsys, "data", "show", file, "--first", "--rows", "2")
    assert code == 0 and "question 1" in out and "question 2" not in out
    assert "2 of 40 rows, the first" in out and "malformed 1," in out
    code, out, _ = rlhf(monkeypatch, capsys, "data", "show", file, "--only", "one_word")
    assert code == 0 and "question 30" in out and "1 of 1 row with one_word among " in out
    code, out, _ = rlhf(monkeypatch, capsys, "data", "show", file, "--only", "mojibake")
    assert code == 0 and "no row with mojibake among 40 rows; " in out
    code, _, err = rlhf(monkeypatch, capsys, "data", "show", file.with_name("none.jsonl"))
    assert code == 2 and err.startswith("error: ") and "no such file" in err
    assert rlhf(monkeypatch, capsys, "data", "show", file, "--only", "dull")[0] == 2


def test_malformed_rows_are_named_with_their_reasons(tmp_path, monkeypatch, capsys):
    file = tmp_path / "a.jsonl"
    good = [json.dumps({"text": f"text {i}"}) for i in range(5)]
    file.write_text("\n".join([*good, '{"text": 1}', "{\x1b", '{"body": "x"}', '{"text": ""}']) + "\n")
    code, out, _ = rlhf(monkeypatch, capsys, "data", "show", file)
    told = " ".join(out.split()).replace(f"{tmp_path}/", "")
    assert code == 0 and "malformed: a.jsonl:6: 'text' is a number; it must be text; a.jsonl:7: invalid JSON" in told
    assert "; a.jsonl:8: no 'text' key; each text row needs text; and 1 more" in told and "\x1b" not in out
    file.write_text("\n".join(good) + "\n")
    assert "malformed:" not in rlhf(monkeypatch, capsys, "data", "show", file)[1]
