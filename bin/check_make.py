"""Prints what is wrong with the targets and variables that `make` was given, in one line; nothing if all is well.

make ignores a misspelt variable, and it installs packages before `rlhf` could refuse a value. The Makefile therefore
runs `python bin/check_make.py TARGET ... -- NAME:ORIGIN=VALUE ...` first, with the variables that were set on its
command line or in the environment. This program needs no package, because none may be installed yet.
"""

import difflib
import glob
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

TEXT = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
VARIABLES = re.findall(r"^([A-Z_]+) \?=", TEXT, re.M)
TARGETS = re.findall(r"^([a-z-]+):.*## ", TEXT, re.M)
INNER_TARGETS = ("engine",)  # of other targets; no one needs to ask for them

STAGES = ("pretrain", "sft", "rm", "ppo", "rloo", "grpo", "dpo", "evaluate", "merge")
TRAIN = (*STAGES, "all")
RUN_STAGES = (*TRAIN, "serve")  # which first merges
OF_RUNS = (*TRAIN, "chat", "score", "serve", "report", "ab", "judge")
ON_DEVICE = (*TRAIN, "chat", "score", "serve", "reproduce", "bench", "bench-ablation", "bench-gpu", "bench-memory")
IN_CONTAINER = (*ON_DEVICE, "fetch", "image", "shell", "engine")
BENCHMARKS = ("bench", "bench-ablation", "bench-memory", "bench-peer-supervised")
OF_RECIPES = ("setup", *OF_RUNS, "reproduce", "plan", "fetch", *BENCHMARKS, "bench-gpu", "image", "shell", "engine")

# The targets that read a variable; it would change nothing in others. Variables that are not listed are for all.
READ_BY: Mapping[str, tuple[str, ...]] = {
    "HW": OF_RECIPES,
    "RECIPE": OF_RECIPES,
    "DATA": (*OF_RUNS, "reproduce", "data-check", "data-show", "shell"),
    "WEIGHTS": (*OF_RUNS, "reproduce", "shell"),
    "SET": (*TRAIN, "chat", "score", "serve", "setup", "reproduce", "plan", "fetch", *BENCHMARKS),
    "SEED": (*OF_RUNS, "fuzz", "shell"),  # that of a run is part of its folder
    "SEEDS": ("reproduce",),
    "OUT": (*OF_RUNS, "reproduce", "shell"),
    "REUSE": (*RUN_STAGES, "shell"),
    "RESUME": RUN_STAGES,
    "STOP_ON": RUN_STAGES,
    "REPORT_TO": (*RUN_STAGES, "setup"),
    "FIT": ("plan",),
    "PRICE": (*RUN_STAGES, "report", "reproduce", "plan", "bench"),
    "VRAM_CAP": ON_DEVICE,
    "CHECK_ARGS": ("data-check",),
    "SHOW_ARGS": ("data-show",),
    "BENCH_ARGS": tuple(target for target in TARGETS if target.startswith("bench") or target == "budgets"),
    "STAGE": ("chat",),
    "TEMPERATURE": ("chat",),
    "PORT": ("serve",),
    "PROMPT": ("score",),
    "RESPONSE": ("score",),
    "FILES": ("score",),
    "SCORE_ARGS": ("score",),
    "AB_ARGS": ("ab", "judge"),
    "SUMMARY": ("ab",),
    "URL": ("judge",),
    "MODEL": ("judge",),
    "TEST_ARGS": ("test",),
    "CASES": ("fuzz",),
    "KILLS": ("fuzz",),
    "ONLY": ("fuzz",),
    "BASE": (*IN_CONTAINER, "test-image"),
    "FLASH_ATTN": IN_CONTAINER,
}
INSTEAD = {
    "FIT": ". First `make plan FIT={value}`, then its SET=",
    "SEED": '. Several seeds are SEEDS="0 1", for `make reproduce`',
    "VRAM_CAP": ". For `make plan` the limit is FIT",
}
# Their values stand between apostrophes in the Makefile's commands.
QUOTED = (
    *("BASE", "DATA", "FILES", "FIT", "HW", "MODEL", "ONLY", "OUT", "PRICE", "RECIPE", "REPORT_TO", "REUSE", "SEEDS"),
    *("SET", "STOP_ON", "TEMPERATURE", "URL", "WEIGHTS"),
)
ONE_WORD = ("RECIPE", "RUNTIME", "STAGE", "VENV")
NEEDED = ("IMAGE", "OUT", "PYTHON", "STAGE", "VENV")  # an empty value would stand for none
CHOICES = {
    "STAGE": ("base", "sft", "ppo", "rloo", "grpo", "dpo", "merge"),
    "REPORT_TO": ("tensorboard", "trackio", "wandb", "none"),
    "STOP_ON": (
        *("nan", "flat_loss", "rising_loss", "flat_reward", "large_updates", "same_scores", "chance", "overconfident"),
        *("high_kl", "negative_kl", "longer", "fewer_ends", "repetition", "entropy_collapse", "no_signal", "clipping"),
        *("value_explosion", "all"),
    ),
}
SWITCH = r"(1|yes|true|0|no|false)?", "write 1 or 0 (yes, true, no and false mean the same)"
COUNT = r"\d*", "a whole number"
NUMBER = r"((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?)?", "a number, 0 or more"
SIZE = r"\d{1,9}(\.\d{1,9})? ?(?i:gi?b)"
# What a value must match, and what is said of another.
FORMS: Mapping[str, tuple[str, str]] = {
    "RESUME": SWITCH,
    "SUMMARY": SWITCH,
    "FLASH_ATTN": SWITCH,
    "SEED": (r"\d{0,10}", 'one whole number; several are SEEDS="0 1", for `make reproduce`'),
    "SEEDS": (r"[\s,]*\d{1,10}([\s,]+\d{1,10})*[\s,]*", 'whole numbers, for example "0 1 2"'),
    "CASES": COUNT,
    "KILLS": COUNT,
    "PRICE": NUMBER,
    "TEMPERATURE": NUMBER,
    "FIT": (f"(card|{SIZE})?", "a size such as 12GB, or card"),
    "VRAM_CAP": (f"({SIZE})?", "a size such as 24GB"),
}
LARGEST_SEED = 2**32 - 1
MOST = 6  # targets that a message names
DATA_FILE = r"\.(jsonl|json|gz|parquet|csv|tsv)$"


class Variable(NamedTuple):
    """A variable that was set."""

    name: str
    origin: str  # "command" (line), or "environment"
    value: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}" + " (from the environment)" * (self.origin == "environment")


def problems(targets: Sequence[str], given: Mapping[str, Variable]) -> Iterator[str]:
    """Yield what is wrong, what to mend first before the rest."""
    # In the environment a variable may be meant for another program: its value counts only where a target reads it.
    read = [variable for variable in given.values() if not {*targets}.isdisjoint(READ_BY.get(variable.name, targets))]
    yield from _unknown_variables(given.values())
    yield from _values_for_no_shell([v for v in given.values() if v.origin == "command" or v in read])
    yield from _missing_variables(targets, given)
    yield from _variables_without_effect(targets, given.values())
    yield from _wrong_values(read)
    yield from _missing_files(targets, read)
    yield from _unknown_targets(targets)


def _unknown_variables(given: Iterable[Variable]) -> Iterator[str]:
    for name in (variable.name for variable in given if variable.name not in VARIABLES):
        way_out = f'A recipe\'s key is set with SET="ppo.steps=10". {_did_you_mean(_spelt_like(name, VARIABLES))}'
        yield f"there is no variable '{name}'. {way_out}"


def _values_for_no_shell(given: Iterable[Variable]) -> Iterator[str]:
    for variable in given:
        if variable.name in QUOTED and "'" in variable.value:
            yield f"{variable.name}: an apostrophe cannot pass through make; use `rlhf` itself"
        if variable.name in NEEDED and variable.origin == "command" and not variable.value.strip():
            yield f"{variable.name} is empty: give it a value, or leave it out"
        if variable.name in ONE_WORD and len(variable.value.split()) > 1:
            yield f"{variable}: give one word; a folder whose name has spaces goes to `rlhf` itself"


def _missing_variables(targets: Sequence[str], given: Mapping[str, Variable]) -> Iterator[str]:
    """Yield a line for each target whose command `rlhf` would refuse, after make has installed packages."""

    def there(*names: str) -> bool:
        return all(name in given and given[name].value for name in names)

    for target in targets:
        if target in ("data-check", "data-show") and not there("DATA"):
            yield f'{target} needs DATA="file ..."'
        if target == "score" and not there("FILES") and not there("PROMPT", "RESPONSE"):
            yield 'score needs PROMPT="..." and RESPONSE="...", or FILES="file ..."'
        if target == "judge" and not there("URL", "MODEL"):
            yield "judge needs URL=http://HOST:PORT/v1 and MODEL=NAME, the judging model's"


def _variables_without_effect(targets: Sequence[str], given: Iterable[Variable]) -> Iterator[str]:
    for name, origin, value in given:
        read_by = READ_BY.get(name)
        if targets and read_by and origin == "command" and {*targets}.isdisjoint(read_by):
            instead = INSTEAD.get(name, "").format(value=value)
            some = read_by if len(read_by) <= MOST else (*read_by[:3], f"and {len(read_by) - 3} more targets")
            yield f"{name} changes nothing in `make {' '.join(targets)}`; it is for {' '.join(some)}{instead}"


def _wrong_values(read: Iterable[Variable]) -> Iterator[str]:
    for variable in read:
        name, words = variable.name, variable.value.split()
        form, expected = FORMS.get(name, (".*", ""))
        if not re.fullmatch(form, variable.value, re.S):
            yield f"{variable}: {expected}"
        if name in CHOICES and not {*words} <= {*CHOICES[name]}:
            yield f"{variable}: {_or(CHOICES[name])}"
        if name in ("SEED", "SEEDS") and any(int(seed) > LARGEST_SEED for seed in re.findall(r"\d+", variable.value)):
            yield f"{variable}: seeds are below 2^32"
        if name == "PORT" and not (re.fullmatch(r"\d{1,5}", variable.value) and 1 <= int(variable.value) <= 65535):
            yield f"{variable}: a whole number from 1 to 65535"
        if name == "SET" and (wrong := [word for word in words if not re.match(r"\w+(\.\w+)*=", word)]):
            yield f"SET: '{wrong[0]}' is no KEY=VALUE; spaces separate changes, so a list is written [1,2]"


def _missing_files(targets: Sequence[str], read: Sequence[Variable]) -> Iterator[str]:
    for variable in read:
        folder = variable.value if variable.name == "WEIGHTS" else ""
        if folder not in ("", "random") and not os.path.isdir(os.path.expanduser(folder)):
            yield f"{variable}: no such folder; a checkpoint's folder, or random"
    for name, _, value in (variable for variable in read if variable.name in ("DATA", "FILES")):
        for word in value.split():
            if found := glob.glob(os.path.expanduser(word.replace("[^", "[!"))):
                if any(map(os.path.isdir, found)):
                    yield f"{name}='{word}' is a folder; name its files, for example '{word}/*.jsonl'"
                continue
            looks_at = next((t for t in targets if t in ("data-check", "data-show")), None)
            command = "score" if name == "FILES" else looks_at.replace("-", " ") if looks_at else "run --data"
            of_hub = re.fullmatch(r"[^/.~][^/]*/[^/]+", word) and not re.search(DATA_FILE, word)
            hint = ""
            if name == "DATA" and of_hub and not looks_at:
                key = f'SET="data.source=hub data.name={word} data.revision=COMMIT"'
                hint = f"A data set of the hub is named by its commit: {key}. "
            hint += f"A name with spaces cannot pass through make: use `rlhf {command}`"
            yield f"{name}='{word}': no such file. {hint}"


def _unknown_targets(targets: Sequence[str]) -> Iterator[str]:
    """Yield a line for each misspelt target, also where a folder has that name, which make would call up to date."""
    meant = {"train": TRAIN, "install": ("setup",)}
    for target in targets:
        if target not in (*TARGETS, *INNER_TARGETS):
            yield f"no target '{target}'. {_did_you_mean(meant.get(target) or _spelt_like(target, TARGETS))}"


def _spelt_like(word: str, names: Iterable[str]) -> list[str]:
    """Return up to three names that are spelt like a word, in whatever case."""
    by_lower = {name.lower(): name for name in names}
    return [by_lower[near] for near in difflib.get_close_matches(word.lower(), by_lower)]


def _did_you_mean(names: Sequence[str]) -> str:
    question = f"Did you mean {'one of: ' * (len(names) > 1)}{' '.join(names)}? " if names else ""
    return f"{question}`make help-all` lists them"


def _or(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def main(arguments: Sequence[str]) -> None:
    """Print the first problem, if there is one."""
    at = arguments.index("--")
    given = {}
    for argument in arguments[at + 1 :]:
        name, origin, value = re.fullmatch(r"(.*?):(.*?)=(.*)", argument, re.S).groups()  # type: ignore[union-attr]
        given[name] = Variable(name, origin, value)
    print(next(problems(arguments[:at], given), ""))


if __name__ == "__main__":
    main(sys.argv[1:])
