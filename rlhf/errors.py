"""The one exception for what a user can put right. `rlhf/cli/guard.py` turns it into one line on stderr."""

from typing import Literal


class UserError(Exception):
    """Bad data, a bad recipe or option, a damaged file: something that the person at the keyboard can put right.

    `message` is one line that names the file, the line or the key and says what to do. Each `advice` is printed below
    it on a separate line. An exception of another class that reaches the top of a command is a bug of this project.
    """

    def __init__(self, message: str, *advice: str) -> None:
        super().__init__("\n".join((message, *advice)))
        self.lines = (message, *advice)


class Interrupted(UserError):
    """Something outside of a stage ended it. Once that is put right, the stage goes on from its newest checkpoint."""


class OptionError(UserError):
    """A mistake in the command itself: an option names what does not exist, or has the wrong form. Exit code 2."""


def no_such(kind: Literal["file", "folder"], name: object, way_out: str) -> str:
    """Return the message about a file or folder that is not there. An option may stand before its name."""
    return f"{str(name) or repr('')}: no such {kind}; {way_out}"
