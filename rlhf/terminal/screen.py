"""The two consoles that print for people, on stdout and stderr. Text is printed as it is: no markup, no emoji codes.

Neither passes control characters to a terminal.
"""

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rlhf.terminal.text import harmless

WIDTH = 140  # of tables without a terminal
_TERMINAL = sys.stdout is not None and sys.stdout.isatty()


class Screen(Console):
    """A console that passes rich's own control codes to the terminal, but none of the printed text."""

    def __init__(self, **options: Any):
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of `renderable`, with control characters removed from their text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


OUT = Screen(soft_wrap=not _TERMINAL, width=None if _TERMINAL else WIDTH)
ERR = Screen(stderr=True)
