"""Text for the terminal: of limited length, and without control characters from files, options, servers or models."""

import sys
from contextlib import suppress

LONGEST_LINE = 2000  # characters of a message
LONGEST_COMMAND = 500  # characters of a command in it
EXCERPT = 300  # characters of what another program says within one


def harmless(text: str) -> str:
    """Return the text without control characters, text-direction marks and other characters that do not print."""
    return text if text.isprintable() else "".join(c for c in text if prints(c))


def visible(text: str) -> str:
    """Return the text with the characters that `harmless` removes written as escapes: `\\x1b`, `\\u202e`."""
    return "".join(c if prints(c) else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, longest: int = LONGEST_LINE) -> str:
    """Return the text, or its beginning and end with the number of characters between them."""
    if len(text) <= longest:
        return text
    half = max(longest // 2 - 20, 1)  # leaves room for the words in the middle
    return f"{text[:half]} … ({len(text) - 2 * half:,} more) … {text[-half:]}"


def one_line(text: str) -> str:
    """Return a message as one visible line of bounded length."""
    folded = " ".join(part for line in text.splitlines() if (part := line.strip()))
    return shortened(visible(shortened(folded)))  # escapes make it longer


def excerpt(text: str, longest: int = EXCERPT) -> str:
    """Return a text, or its beginning of at most `longest` characters, as one line; "…" stands where it is cut."""
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def message_of(error: BaseException) -> str:
    """Return the excerpt of an error's message; the name of its type if it has none."""
    return excerpt(str(error)) or type(error).__name__


def counted(number: int, noun: str) -> str:
    """Return a number of things in words: `1 row`, `2,000 rows`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def say(text: str) -> None:
    """Write one line to stderr. A stderr that is gone, such as that of a closed terminal, is not an error."""
    with suppress(OSError, ValueError):
        print(one_line(text), file=sys.stderr, flush=True)


def prints(character: str) -> bool:
    """Return whether a terminal shows a character, or breaks the line or joins emoji at it."""
    return character in "\n\t" or character.isprintable() or character == "\u200d"  # the last one joins emoji
