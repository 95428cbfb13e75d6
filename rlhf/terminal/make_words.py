"""What the options of `rlhf` are called in `make`, for messages of a command that make has started.

`rlhf/cli/from_make.py` hands a target's variables to its command as these options. This module alone knows their names,
so that all other messages speak of options.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence

STARTED = "RLHF_MAKE"  # environment: the variables of a run that make was given, as shell words
_VARIABLES = """HW GUIDE RECIPE DATA WEIGHTS SET SEED SEEDS OUT REUSE RESUME STOP_ON REPORT_TO FIT PRICE STAGE
    TEMPERATURE PORT PROMPT RESPONSE SUMMARY URL MODEL"""
OPTION_NAMES: Mapping[str, str] = {name: f"--{name.lower().replace('_', '-')}" for name in _VARIABLES.split()}
_SPELT = {option: f"{name}=…" for name, option in OPTION_NAMES.items()} | {
    "--resume": "RESUME=1",
    "--restart": "RESUME=0",
    "--fastest": "FIT=card",
    "--summary": "SUMMARY=1",
    "--guide": "GUIDE=1",
    "--save": "BENCH_ARGS=--save",
    "FILES...": "DATA=…",
    "RLHF_VRAM_CAP": "VRAM_CAP=…",
}
_COMMAND = re.compile(r"`rlhf[^`…]*`")  # a whole command, which may be copied as it is


def variables() -> list[str] | None:
    """Return the variables that make was given, such as `SET=ppo.steps=10 sft.lr=1`; None if make started nothing."""
    words = os.environ.get(STARTED)
    return None if words is None else shlex.split(words)


def with_make_words(text: str) -> str:
    """Return a message, followed by make's words for the options that it names if make started this command."""
    if variables() is None:
        return text
    named = re.findall(r"--[a-z]+(?:-[a-z]+)*|FILES\.\.\.|RLHF_VRAM_CAP", _COMMAND.sub("", text))
    words = [f"{option} is {_SPELT[option]}" for option in dict.fromkeys(named) if option in _SPELT]
    return f"{text} (make: {', '.join(words)})" if words else text


def settings(pairs: Sequence[str]) -> str | None:
    """Return KEY=VALUE pairs as a variable of make; None if make started nothing, or could not hold them."""
    joined = " ".join(pairs)
    holds = len(joined.split()) == len(pairs) and "'" not in joined
    return f"SET='{joined}'" if holds and variables() is not None else None


def setup(hardware: str) -> str:
    """Return the command that installs what a recipe for that hardware needs, in a checkout."""
    return f"`make setup HW={hardware}`"
