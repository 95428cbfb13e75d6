"""What reaches a terminal: no control character, no flood."""

import errno
import io

import pytest
from rich.progress import Progress
from rich.table import Table

from rlhf.terminal import (
    LONGEST_LINE,
    excerpt,
    harmless,
    say,
)
from rlhf.terminal.screen import Screen

NASTY = "a\x1b]0;title\x07b\x9b31mc\u202ed\x00e\udcfff"


def test_control_characters_are_shown_as_escapes():
    assert harmless(NASTY) == r"a\x1b]0;title\x07b\x9b31mc\u202ed\x00e\udcfff"
    assert harmless("fünf\n\t👩\u200d💻") == "fünf\n\t👩\u200d💻"


def test_a_message_is_one_line_of_bounded_length():
    assert excerpt("a \n b\r\nc") == "a b c"
    long = excerpt("start" + "\x1b" * 10**6 + "end", LONGEST_LINE)
    assert len(long) <= LONGEST_LINE and long.startswith(r"start\x1b")
    long = excerpt("start" + "x" * 5000 + "end", LONGEST_LINE)
    assert len(long) <= LONGEST_LINE and long.startswith("start") and long.endswith("end") and "more) …" in long
    assert excerpt("x" * LONGEST_LINE, LONGEST_LINE) == "x" * LONGEST_LINE


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
