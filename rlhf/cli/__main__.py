"""`python -m rlhf.cli` is the command `rlhf`."""

from rlhf.cli import main

main()
