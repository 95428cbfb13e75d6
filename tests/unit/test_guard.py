"""How a command ends: what is known in one line, a bug with its traceback, and neither floods nor drives a terminal."""

import errno
import sys

import click
import pytest

from rlhf.cli import guard
from rlhf.errors import UserError
from rlhf.process import endings
from rlhf.terminal import LONGEST_LINE


@pytest.fixture
def ends(monkeypatch, capsys):
    """Exit code and stderr of a command that raises an error."""

    def run(error: BaseException, *words: str) -> tuple[str | int | None, str]:
        @click.command()
        @click.argument("rest", nargs=-1)
        def command(rest):
            raise error

        monkeypatch.setattr(sys, "argv", ["rlhf", *words])
        with pytest.raises(SystemExit) as stop:
            guard.guarded(command)
        return stop.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("r"), 1, "error: r"),
        (UserError("two\nlines"), 1, "error: two lines"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 5000), 1, "File name too long"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/a"), 1, "error: runs/a: No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "a\x1b[31mb"), 1, r"a\x1b[31mb: Permission denied"),
        (MemoryError(), 71, "out of memory"),
        (endings.Stopped(15), 143, "stopped by SIGTERM"),
        (endings.Stopped(2, "kept"), 130, "stopped; kept"),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
)
def test_a_known_failure_is_one_line(ends, error, code, said):
    found, err = ends(error)
    assert found == code
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert len(err) <= LONGEST_LINE + len("error: \n")
    assert "Traceback" not in err


def test_the_traceback_of_a_known_failure_is_printed_on_demand(ends, monkeypatch):
    error = UserError("r")
    error.__cause__ = ValueError("the reason")
    monkeypatch.setenv("RLHF_DEBUG", "1")
    code, err = ends(error)
    assert code == 1 and err.endswith("error: r\n")
    assert "ValueError: the reason" in err and "UserError: r" in err


def test_a_bug_shows_its_traceback_and_where_to_go(ends):
    code, err = ends(KeyError("a\x1b[2J\u202e"))
    assert code == guard.BUG
    assert "Traceback" in err and r"KeyError: 'a\x1b[2J\u202e'" in err.replace("\\\\", "\\")
    assert "\x1b" not in err and "\u202e" not in err
    assert "bug" in err.splitlines()[-1] and "rlhf --version" in err.splitlines()[-1]
