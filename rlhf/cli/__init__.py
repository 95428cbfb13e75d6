"""The command `rlhf`."""

from rlhf.cli.entry import cli, main
from rlhf.cli.guard import guarded

__all__ = ["cli", "guarded", "main"]
