"""What is printed for people: text without control characters, consoles, progress, tables, numbers in words."""

from rlhf.terminal.text import (
    EXCERPT,
    LONGEST_COMMAND,
    LONGEST_LINE,
    counted,
    excerpt,
    harmless,
    message_of,
    one_line,
    prints,
    say,
    shortened,
    visible,
)

__all__ = [
    "EXCERPT",
    "LONGEST_COMMAND",
    "LONGEST_LINE",
    "counted",
    "excerpt",
    "harmless",
    "message_of",
    "one_line",
    "prints",
    "say",
    "shortened",
    "visible",
]
