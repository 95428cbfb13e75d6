"""Messages of a command that make has started are in make's spelling: `--set a=1` is SET=a=1, `rlhf run ppo` make ppo.

An option is the variable of its name; the Makefile hands variables on by the same rule. Everything else speaks of
options and of `rlhf`, and what make has no target or variable for stays as it is.
"""

import os
import re
import shlex
from collections.abc import Sequence

STARTED = "RLHF_MAKE"  # environment: the command with which make was started, such as `make RUNTIME=local`
VARIABLES = frozenset(
    {
        "HW",
        "GUIDE",
        "RECIPE",
        "DATA",
        "WEIGHTS",
        "SET",
        "SEED",
        "SEEDS",
        "OUT",
        "REUSE",
        "RESUME",
        "STOP_ON",
        "REPORT_TO",
        "ONLY",
    }
    | {"REWARD", "FIT", "PRICE", "STAGE", "TEMPERATURE", "PORT", "PROMPT", "RESPONSE", "SUMMARY", "URL", "MODEL"}
    | {"PROMPTS", "STAGES", "N", "BUY"}
)
NOT_OF_MAKE = ("new", "compare", "results", "ratings", "convert", "pairs")  # commands without a target
SWITCHES = {
    "--resume": "RESUME=1",
    "--restart": "RESUME=0",
    "--guide": "GUIDE=1",
    "--summary": "SUMMARY=1",
    "--fastest": "FIT=card",
    "--save": "BENCH_ARGS=--save",
}
IMPLIED = ("--with-parents", "--if-needed")  # what a target adds of itself
_COMMAND = re.compile(r"`rlhf ([^`]*)`")
_OPTION = re.compile(r"(?<![\w-])(--[a-z]+(?:-[a-z]+)*)(?: (?=[A-Z]+\b|[^\s`]*[=/\d]|[^\s`]+:)([^\s`]*[^\s`;:,.)]))?")
POSITIONAL = {"data": "DATA", "reward": "REWARD"}  # variables of a command's words without an option
_NAMES = {"FILES...": "DATA", "REWARDS": "REWARD", "RLHF_VRAM_CAP": "VRAM_CAP"}


def variable(option: str) -> str:
    """Return the name of an option as make's variables are called."""
    return option.removeprefix("--").replace("-", "_").upper()


def in_make_words(text: str) -> str:
    """Return a message, in make's spelling if make started this command."""
    make = os.environ.get(STARTED)
    if make is None:
        return text
    text = _COMMAND.sub(lambda found: f"`{_line(found[1], make) or f'rlhf {found[1]}'}`", text)
    parts = re.split(r"(`rlhf [^`]*`)", text)  # a command that make does not have keeps its options
    parts[::2] = [_OPTION.sub(lambda found: _assignment(found[1], found[2]) or found[0], part) for part in parts[::2]]
    text = "".join(parts)
    for name, made in _NAMES.items():
        text = text.replace(name, made)
    return text


def settings(pairs: Sequence[str]) -> str:
    """Return changes of keys, KEY=VALUE, as words of a command line: for make one variable, if that can hold them."""
    joined = " ".join(pairs)
    if STARTED in os.environ and len(joined.split()) == len(pairs) and "'" not in joined:
        return f"SET='{joined}'"
    return " ".join(f"--set {shlex.quote(pair)}" for pair in pairs)


def run_word(path: str) -> str:
    """Return a run directory as it is named on the command line."""
    return f"RUN={shlex.quote(path)}" if STARTED in os.environ else path


def _assignment(option: str, value: str | None) -> str | None:
    """Return an option as a variable of make, with its value if it has one; None if there is no such variable."""
    if option in SWITCHES:
        return SWITCHES[option] + (f" {value}" if value else "")
    name = variable(option)
    return None if name not in VARIABLES else f"{name}={value}" if value else name


def _line(command: str, make: str) -> str | None:
    """Return the command of make for a command of `rlhf`; None if make cannot say it."""
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    if words == ["run"]:
        return None
    if "--help" in words:
        return f"{make} help-all"
    head = 2 if words[0] in ("run", "data") else 1
    target = "-".join(words[:head]).removeprefix("run-")
    if not {*words[:head]}.isdisjoint(NOT_OF_MAKE) or not re.fullmatch(r"[a-z][a-z-]*|[A-Z]+|…", target):
        return None
    values: dict[str, list[str]] = {}
    rest = iter(words[head:])
    for word in rest:
        if word in SWITCHES:
            name, _, value = SWITCHES[word].partition("=")
        elif word.startswith("--"):
            name, value = variable(word), "" if word in IMPLIED else next(rest, "")
        else:
            name, value = POSITIONAL.get(words[0], "RUN"), word
        if word not in IMPLIED:
            values.setdefault(name, []).append(value)
    if not values.keys() <= VARIABLES | {"RUN"}:
        return None
    return " ".join([make, target, *(f"{name}={shlex.quote(' '.join(of))}" for name, of in values.items())])
