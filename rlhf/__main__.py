"""`python -m rlhf` is the command `rlhf`."""

from rlhf.cli import main

main()
