"""The end of a command: one line for a known failure, a traceback for a bug."""

import io
import itertools
import os
import pwd
import sys
import traceback
from collections.abc import Sequence

import click

from rlhf.errors import OptionError, UserError
from rlhf.process import children, distributed, endings, exhaustion
from rlhf.terminal import message_of, one_line, say, visible

MISTAKE = 2  # exit code of a mistake in the command, as click has it
BUG = 70  # exit code of a bug, as in sysexits.h


def guarded(command: click.Command, name: str | None = None) -> None:
    """Run a command and end the process. A known failure becomes one line and a non-zero exit code.

    `name` is the program's name in its messages; None takes it from the command line.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a character that the terminal cannot show
    try:
        with endings.listening():
            _check_process()
            _check_arguments(sys.argv[1:])
            command.main(prog_name=name, standalone_mode=False)
            print(end="", flush=True)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()  # a group without a command shows its help
        sys.exit(error.exit_code)
    except click.ClickException as error:
        say(_in_one_line(error))
        sys.exit(error.exit_code)
    except (endings.Stopped, KeyboardInterrupt, click.Abort) as error:
        sys.exit(_stopped(error))
    except BrokenPipeError:  # the reader has left, as in `rlhf plan … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter would write to it again
        sys.exit(1)
    except Exception as error:
        sys.exit(_failed(error))


def fail(message: str, *advice: str) -> int:
    """Print why the command ends, on stderr or to the process that started this one. Returns the exit code.

    The message becomes one line, and so does each piece of advice.
    """
    if not distributed.pass_on(one_line(" ".join((message, *advice)))):
        say(f"error: {message}")
        for line in advice:
            say(line)
    return 1


def _failed(error: Exception) -> int:
    """Explain an error, with its traceback if RLHF_DEBUG is set. Returns the exit code."""
    exhausted = exhaustion.out_of_memory(error)
    if os.environ.get("RLHF_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, UserError):
        code = fail(*error.lines)
        return exhaustion.EXHAUSTED if exhausted else MISTAKE if isinstance(error, OptionError) else code
    if exhausted:
        fail(f"out of memory: free some, or allow more ({message_of(error)})")
        return exhaustion.EXHAUSTED
    if isinstance(error, OSError):
        return fail(f"{error.filename or 'the operating system'}: {error.strerror or error}")
    if distributed.other_rank_ended(error):
        if not distributed.pass_on("another rank has ended"):
            say("error: another rank has ended; its own message says why")
        return distributed.LOST
    print(visible("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    advice = "please report the lines above, your command and `rlhf --version`"
    say(f"error: this is a bug in rlhf and not your mistake: {advice}")
    return BUG


def _stopped(error: BaseException) -> int:
    """Print that a signal ended the command; of several processes one prints it.

    Returns the exit code of a shell: 128 plus the signal's number.
    """
    line = str(error) if isinstance(error, endings.Stopped) else "stopped"
    if not (distributed.pass_on(one_line(line)) or distributed.rank() or children.part_of_command()):
        say(line)
    return 128 + error.number if isinstance(error, endings.Stopped) else 130


def _in_one_line(error: click.ClickException) -> str:
    """Return click's message, with the command that prints the help."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = _as_key(error.option_name, sys.argv[1:]) if isinstance(error, click.NoSuchOption) else ""
    return f"error: {error.format_message()}{hint}" + (f" (`{context.command_path} --help`)" if context else "")


def _as_key(option: str, words: Sequence[str]) -> str:
    """Return how a key of the recipe is set that was typed as an option: `--steps 10` is `--set ppo.steps=10`."""
    from rlhf.recipe.schema import Recipe
    from rlhf.recipe.strict import dotted_keys

    name = option.lstrip("-").replace("-", "_")
    keys = [key for key in dotted_keys(Recipe) if key.rpartition(".")[2] == name]
    keys = [key for key in keys if key.partition(".")[0] in words] or keys
    values = [after for word, after in itertools.pairwise(words) if word == option]
    return f" A key of the recipe: --set {keys[0]}={next(iter(values), 'VALUE')}." if keys else ""


def _check_process() -> None:
    """Name the user for libraries that ask, where the system knows none, as in containers.

    Raises UserError without a home, and for an interpreter that takes out the docstrings that transformers reads.
    """
    if sys.flags.optimize > 1:
        raise UserError("PYTHONOPTIMIZE=2 (python -OO) takes out docstrings, which transformers reads: unset it, or 1")
    user = str(os.getuid())
    try:
        pwd.getpwuid(int(user))
    except KeyError:
        os.environ.setdefault("USER", user)
        if "HOME" not in os.environ:
            raise UserError(
                f"HOME is not set and user {user} has no passwd entry: set HOME to a folder of its own"
            ) from None


def _check_arguments(words: Sequence[str]) -> None:
    """Raise UsageError for an argument that no manifest could hold."""
    for word in words:
        if "\0" in word or any("\ud800" <= character <= "\udfff" for character in word):
            raise click.UsageError(f"{one_line(word)}: bytes that are not UTF-8; rename the file, or type it in UTF-8")
