"""What reaches a terminal: no control character, no flood."""

import errno
import io
import time
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rlhf.terminal import (
    EXCERPT,
    LONGEST_LINE,
    excerpt,
    harmless,
    message_of,
    one_line,
    say,
    screen,
    shortened,
    visible,
)
from rlhf.terminal.progress import Bar, working
from rlhf.terminal.screen import Screen
from rlhf.terminal.tables import rows_table, show_sample

ROOT = Path(__file__).parents[2]
NASTY = "a\x1b]0;title\x07b\x9b31mc\u202ed\x00e\udcfff"


def test_control_characters_are_left_out_or_shown_as_escapes():
    assert harmless(NASTY) == "a]0;titleb31mcdef"
    assert visible(NASTY) == r"a\x1b]0;title\x07b\x9b31mc\u202ed\x00e\udcfff"
    assert harmless("fünf\n\t👩\u200d💻") == visible("fünf\n\t👩\u200d💻") == "fünf\n\t👩\u200d💻"


def test_a_message_is_one_line_of_bounded_length():
    assert one_line("a \n b\r\nc") == "a b c"
    long = one_line("start" + "\x1b" * 10**6 + "end")
    assert len(long) <= LONGEST_LINE and long.startswith(r"start\x1b")
    long = one_line("start" + "x" * 5000 + "end")
    assert len(long) <= LONGEST_LINE and long.startswith("start") and long.endswith("end") and "more) …" in long
    assert shortened("x" * LONGEST_LINE) == "x" * LONGEST_LINE


def test_an_excerpt_is_one_line_that_says_where_it_is_cut():
    assert excerpt(" a\n\tb\r\nc ") == "a b c"
    assert excerpt("x" * EXCERPT) == "x" * EXCERPT
    assert excerpt("x" * (EXCERPT + 1)) == "x" * (EXCERPT - 1) + "…"
    assert message_of(ValueError("a\nb")) == "a b" and message_of(MemoryError()) == "MemoryError"


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_a_terminal_that_is_gone_is_no_error(monkeypatch):
    monkeypatch.setattr("sys.stderr", Gone())
    say("nobody hears this")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_console_prints_no_control_character_that_it_was_given(terminal):
    file = io.StringIO()
    screen = Screen(file=file, force_terminal=terminal, color_system="standard" if terminal else None, width=80)
    table = Table(title=NASTY)
    table.add_column(NASTY)
    table.add_row(NASTY)
    screen.print(table)
    screen.print(NASTY, style="dim")
    with Progress(console=screen) as progress:
        progress.add_task(NASTY, total=1)
    printed = file.getvalue()
    for character in ("\x07", "\x9b", "\u202e", "\x00", "\udcff", "\x1b]"):
        assert character not in printed
    assert ("\x1b[" in printed) == terminal, "rich's own codes stay"


@pytest.mark.parametrize("terminal", [False, True])
def test_text_is_printed_as_it_is(terminal, monkeypatch):
    """A folder may be named `[x]`, and a model of the hub misspelt as `a[/b]`."""
    name, file = "runs/[/a][bold][x]:100:", io.StringIO()
    made = Screen(file=file, force_terminal=terminal, width=200)
    monkeypatch.setattr(screen, "OUT", made)
    monkeypatch.setattr(screen, "ERR", made)

    def printed() -> str:
        text = file.getvalue()
        file.seek(0)
        file.truncate()
        return text

    for show in (
        lambda: made.print(name),
        lambda: rows_table(name, ("column",), [("a wide cell " * 3,)]),
        lambda: rows_table("title", (name,), [("cell",)]),
        lambda: rows_table("title", ("column",), [(name,)]),
        lambda: show_sample(name, "prompt", {"sft": "answer"}),
        lambda: show_sample("title", "prompt", {"sft": name}),
    ):
        show()
        assert name in printed()
    if terminal:
        with working(name) as say_now:
            time.sleep(0.3)  # the spinner is drawn by a thread
            assert name in printed()
            say_now(f"{name} now")
            time.sleep(0.3)
        assert f"{name} now" in printed()
        with Bar(name, 3) as bar:
            bar.update(1, f"note of {name}")
        assert f"note of {name}" in printed()


def test_names_in_the_first_column_are_not_broken(monkeypatch, capsys):
    monkeypatch.setattr(screen, "OUT", Console(width=80, highlight=False))
    rows_table("t", ("", *"abcdef"), [("micro/encode_dialogues", *["0.9876 [0.95, 1.02]"] * 6), ("x" * 60, *"123456")])
    out = capsys.readouterr().out
    assert "micro/encode_dialogues" in out and "x" * 60 not in out and max(map(len, out.splitlines())) <= 80
