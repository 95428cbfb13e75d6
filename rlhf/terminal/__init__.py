"""What is printed for people: text without control characters, consoles, progress, tables, numbers in words."""

from rlhf.terminal.text import LONGEST_LINE, counted, excerpt, harmless, message_of, say

__all__ = ["LONGEST_LINE", "counted", "excerpt", "harmless", "message_of", "say"]
