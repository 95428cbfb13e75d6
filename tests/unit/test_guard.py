"""How a command ends: what is known in one line, a bug with its traceback, and neither floods nor drives a terminal."""

import errno
import getpass
import os
import subprocess
import sys

import click
import pytest

from rlhf.cli import guard
from rlhf.errors import UserError
from rlhf.process import distributed, endings
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


NESTED = RuntimeError("while loading")
NESTED.__cause__ = MemoryError()


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("r"), 1, "error: r"),
        (UserError("d"), 1, "error: d"),
        (UserError("two\nlines"), 1, "error: two lines"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 5000), 1, "File name too long"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/a"), 1, "error: runs/a: No space left on device"),
        (OSError(errno.EFBIG, "File too large", "a.html"), 1, "error: a.html: File too large"),
        (PermissionError(errno.EACCES, "Permission denied", "a\x1b[31mb"), 1, r"a\x1b[31mb: Permission denied"),
        (MemoryError(), 71, "out of memory"),
        (NESTED, 71, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to get 9 bytes"), 71, "out of memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 71, "out of memory"),
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
    assert err.splitlines()[-1].startswith("error: this is a bug in rlhf and not your mistake: please report")


def test_a_bug_in_quoting_memory_is_not_out_of_memory(ends):
    assert ends(UserError("the row says: out of memory"))[1] == "error: the row says: out of memory\n"
    assert ends(ValueError("out of memory"))[0] == guard.BUG


@pytest.mark.parametrize("word", ["a\0b", "a\udcff", "\ud800"])
def test_an_argument_that_no_manifest_could_hold_is_refused(ends, word):
    code, err = ends(AssertionError("the command must not run"), word)
    assert code == 2
    assert "bytes that are not UTF-8" in err and "Traceback" not in err


@pytest.mark.parametrize("words", [["--\x1b[31m"], ["--" + "x" * 50_000]])
def test_what_click_quotes_is_harmless_and_short(ends, words):
    code, err = ends(AssertionError(), *words)
    assert code == 2
    assert "\x1b" not in err
    assert len(err.splitlines()) == 1 and err.startswith("error: ") and len(err) <= LONGEST_LINE + 1


def test_of_several_processes_the_first_says_why_it_was_stopped(ends, monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert ends(endings.Stopped(15)) == (143, "")
    monkeypatch.setenv("RANK", "0")
    assert ends(endings.Stopped(15)) == (143, "stopped by SIGTERM\n")
    assert distributed.rank() == 0


@pytest.mark.parametrize(("home", "code"), [("/root", 0), (None, 1)])
def test_a_user_without_an_entry_is_named_by_number(ends, monkeypatch, home, code):
    """Containers start users that the system does not know; libraries ask for a name, and for a home."""
    monkeypatch.setattr(os, "getuid", lambda: 987654)
    for name in ("USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", home) if home else monkeypatch.delenv("HOME")
    found, err = ends(UserError("the command ran"))
    assert found == 1 and ("the command ran" in err) is (code == 0)
    assert ("HOME" in err and "987654" in err) is (code == 1)
    assert getpass.getuser() == "987654"


def test_an_interpreter_without_docstrings_is_refused():
    command = [sys.executable, "-OO", "-m", "rlhf", "recipes"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "PYTHONOPTIMIZE" in done.stderr and len(done.stderr.splitlines()) == 1
