"""The end of a command: one line for a known failure, a traceback for a bug."""

import io
import os
import sys
import traceback

import click

from rlhf.errors import OptionError, UserError
from rlhf.process import children, distributed, endings, exhaustion
from rlhf.terminal import LONGEST_LINE, excerpt, harmless, message_of, say

MISTAKE = 2  # exit code of a mistake in the command, as click has it
BUG = 70  # exit code of a bug, as in sysexits.h


def guarded(command: click.Command, name: str | None = None) -> None:
    """Run a command and end the process. A known failure becomes one line and a non-zero exit code.

    `name` is the program's name in its messages; None takes it from the command line.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # bytes that are no text, a character that a terminal lacks
    os.environ.setdefault("USER", str(os.getuid()))  # libraries ask for it, and in a container the system knows none
    try:
        with endings.listening():
            command.main(prog_name=name, standalone_mode=False)
            print(end="", flush=True)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()  # a group without a command shows its help
        sys.exit(error.exit_code)
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        say(f"error: {error.format_message()}" + (f" (`{context.command_path} --help`)" if context else ""))
        sys.exit(error.exit_code)
    except (endings.Stopped, KeyboardInterrupt, click.Abort) as error:
        sys.exit(_stopped(error))
    except BrokenPipeError:  # the reader has left, as in `rlhf plan … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter would write to it again
        sys.exit(1)
    except Exception as error:
        sys.exit(_failed(error))


def _failed(error: Exception) -> int:
    """Explain an error, with its traceback if RLHF_DEBUG is set. Returns the exit code."""
    exhausted = exhaustion.ran_out(error) == "memory"
    if os.environ.get("RLHF_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, UserError):
        _say(*error.lines)
        return exhaustion.EXHAUSTED if exhausted else MISTAKE if isinstance(error, OptionError) else 1
    if exhausted:
        _say(f"out of memory: free some, or allow more ({message_of(error)})")
        return exhaustion.EXHAUSTED
    if isinstance(error, OSError):
        _say(f"{error.filename or 'the operating system'}: {error.strerror or error}")
        return 1
    if isinstance(error, UnicodeEncodeError):  # bytes of a name that are not UTF-8, which no record can hold
        _say(f"{error.object!r} is not UTF-8: rename the file")
        return 1
    if distributed.other_rank_ended(error):
        _say("another rank has ended; its own message says why")
        return distributed.LOST
    print(harmless("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    say("error: this is a bug in rlhf: please report the lines above, your command and `rlhf --version`")
    return BUG


def _say(message: str, *advice: str) -> None:
    """Print why the command ends, or tell it the process that started this one. Each piece of advice is a line."""
    if not distributed.pass_on(excerpt(" ".join((message, *advice)), LONGEST_LINE)):
        say(f"error: {message}")
        for line in advice:
            say(line)


def _stopped(error: BaseException) -> int:
    """Print that a signal ended the command; of several processes one prints it.

    Returns the exit code of a shell: 128 plus the signal's number.
    """
    line = str(error) if isinstance(error, endings.Stopped) else "stopped"
    if not (distributed.pass_on(line) or distributed.rank() or children.part_of_command()):
        say(line)
    return 128 + error.number if isinstance(error, endings.Stopped) else 130
