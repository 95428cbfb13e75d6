"""Text for the terminal: of limited length, and without control characters from files, options, servers or models."""

import sys
from contextlib import suppress

LONGEST_LINE = 2000  # characters of a message
EXCERPT = 300  # characters of what another program says within one


def harmless(text: str) -> str:
    """Return the text with control characters, text-direction marks and others that do not print as escapes: `\\x1b`.

    What breaks the line and what joins emoji stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t\u200d" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def excerpt(text: str, longest: int = EXCERPT) -> str:
    """Return a text as one harmless line; of one with more than `longest` characters the beginning and the end."""
    line = harmless(" ".join(text.split()))
    half = longest // 2 - 20  # leaves room for the words in the middle
    return line if len(line) <= longest else f"{line[:half]} … ({len(line) - 2 * half:,} more) … {line[-half:]}"


def message_of(error: BaseException) -> str:
    """Return the excerpt of an error's message; the name of its type if it has none."""
    return excerpt(str(error)) or type(error).__name__


def counted(number: int, noun: str) -> str:
    """Return a number of things in words: `1 row`, `2,000 rows`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def say(text: str) -> None:
    """Write one line to stderr. A stderr that is gone, such as that of a closed terminal, is not an error."""
    with suppress(OSError, ValueError):
        print(excerpt(text, LONGEST_LINE), file=sys.stderr, flush=True)
