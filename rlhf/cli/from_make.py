"""`python -m rlhf.cli.from_make TARGET`: a target of the Makefile as a command, with make's variables as its options.

A target is the command of `rlhf` that has its name, and takes a variable if the command has its option; or it is a
module in `MODULES`. Of other targets the Makefile names the variables. The Makefile first calls `check`, before it
installs or builds anything large. Under `make -n` the command is printed.
"""

import difflib
import glob
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click

from rlhf import recipe as recipes
from rlhf.cli.choice import Choice, recipes_root
from rlhf.cli.entry import cli
from rlhf.cli.guard import guarded
from rlhf.errors import OptionError
from rlhf.recipe import STAGES
from rlhf.terminal import excerpt
from rlhf.terminal.make_words import OPTION_NAMES, STARTED

MAKEFILE = Path(__file__).parents[2] / "Makefile"
RUNTIMES = ("docker", "podman", "local")
COMMAND_GROUPS = ("data",)  # of commands: `data-check` is `rlhf data check`
_OF_RECIPE = "HW GUIDE RECIPE SET BENCH_ARGS"
MODULES: Mapping[str, tuple[str, str]] = {  # targets that run a module of Python: its name, and the variables
    "bench": ("bench", f"{_OF_RECIPE} PRICE"),
    "bench-against": ("bench.against", f"{_OF_RECIPE} REV"),
    "bench-ablation": ("bench.ablation", _OF_RECIPE),
    "bench-memory": ("bench.memory measure", _OF_RECIPE),
    "bench-gpu": ("bench.gpu", "BENCH_ARGS VRAM_CAP GPU"),
    "bench-peer": ("bench.peer", "BENCH_ARGS"),
    "bench-peer-real": ("bench.peer --weights recipe", f"{_OF_RECIPE} DATA"),
    "bench-peer-supervised": ("bench.peer --weights random", _OF_RECIPE),
    "budgets": ("bench.memory pinned", "BENCH_ARGS"),
    "results-index": ("bench.results", ""),
    "docs-tables": ("bench.docs_tables", ""),
    "fuzz": ("tests.fuzz", "SEED CASES KILLS ONLY"),
}
OTHERS: Mapping[str, str] = {  # variables that are no option of `rlhf`, and what they are
    "RUN": "run directory or a stage's, runs/NAME/vN/ppo, given instead of HW, OUT, SET and all of how it was made",
    "FILES": "files for `make score`, instead of PROMPT and RESPONSE; no spaces in their names",
    "VRAM_CAP": "limit on the memory used of a card, for example 24GB, to try what fits a smaller one",
    "GPU": "which card to use, by its number in nvidia-smi or its UUID; several: 0,1 [the first; all for torchrun]",
    "REV": "commit, branch or tag for `make bench-against` [where the branch left main; on main the commit before]",
    "CHECK_ARGS": 'more arguments for `make data-check`, for example "--heldout test.jsonl --to report.json"',
    "SHOW_ARGS": 'more arguments for `make data-show`, for example "--rows 20 --only unfinished"',
    "SCORE_ARGS": 'more arguments for `make score`, for example "--to runs/scores.jsonl"',
    "AB_ARGS": 'more arguments for `make ab` and `make judge`, for example "--a sft --b dpo --limit 50"',
    "BENCH_ARGS": 'more arguments for a benchmark, for example "--steps 4 --shape longest" for `make bench`',
    "TEST_ARGS": "more arguments for pytest, for example \"-m 'not slow'\"",
    "CASES": "number of malformed inputs that `make fuzz` tries [1050]",
    "KILLS": "number of times that `make fuzz` interrupts stages [119]",
    "ONLY": "one group of `make fuzz`, or one case, for example run_dirs, kills or run_dirs:17",
    "RUNTIME": "docker, podman: stages run in the container image; local: in .venv",
    "IMAGE": "an existing image, used instead of one built from this folder",
    "BASE": "base of the image, used instead of the one pinned in Dockerfile",
    "FLASH_ATTN": "1: compile flash-attn into the image; BASE must have nvcc [0: attention is torch's own]",
    "PYTHON": "interpreter for `make setup`, 3.11 to 3.13 [python3]",
    "VENV": "folder of the installed packages [.venv]",
    "EXTRAS": "extras of pyproject.toml [gpu,math,report,serve,tracking; dev, docs, wandb, trackio when needed]",
    "PIP_ARGS": "more arguments for pip",
}
ANYWHERE = ("RUNTIME", "PYTHON", "VENV", "EXTRAS", "PIP_ARGS")  # any target may install what it needs
OF_CONTAINER = ("IMAGE", "BASE", "FLASH_ATTN")
OF_CARD = ("VRAM_CAP", "GPU")
CARD = r"\d+(,\d+)*|(GPU|MIG)-[\w-]+"  # what GPU may be
WORDS = ("DATA", "SET", "STOP_ON", "REPORT_TO")  # several values, which spaces separate
SWITCHES = ("GUIDE", "RESUME", "SUMMARY", "FLASH_ATTN")
ON, OFF = ("1", "yes", "true"), ("0", "no", "false")
PATHS = ("RECIPE", "RUN", "DATA", "WEIGHTS", "OUT", "REUSE", "FILES")
NOT_EMPTY = ("OUT", "PORT")  # others count as not given where they are empty
ARGUMENTS = {  # targets, and the variable with their further arguments
    "data-check": "CHECK_ARGS",
    "data-show": "SHOW_ARGS",
    "score": "SCORE_ARGS",
    "ab": "AB_ARGS",
    "judge": "AB_ARGS",
}
OF_A_RUN = (  # what the commands that are named as next, or as missing, repeat
    *(
        "HW",
        "GUIDE",
        "RECIPE",
        "RUN",
        "DATA",
        "OUT",
        "REUSE",
        "WEIGHTS",
        "SET",
        "SEED",
        "PRICE",
        "RUNTIME",
        "IMAGE",
        "VENV",
    ),
)
MOST = 6  # targets that a message names
HELP = 105  # characters of a variable's help

Values = Mapping[str, str]


class Given(NamedTuple):
    """The variables that make was given."""

    typed: Values  # on its command line
    values: Values  # these and those of the environment, without empty ones
    dry_run: bool  # make -n

    @staticmethod
    def read(environment: Mapping[str, str]) -> "Given":
        """Return them as make hands them to a command: those typed in MAKEFLAGS, where no `$` is expanded yet."""
        flags, _, assignments = f" {environment.get('MAKEFLAGS', '')}".partition(" -- ")
        words = re.findall(r"(?:\\.|[^\\ \t])+", assignments, re.S)
        pairs = (re.sub(r"\\(.)|\$(\$)", r"\1\2", word, flags=re.S).partition("=") for word in words)
        typed = {name: value for name, _, value in pairs}
        inherited = {name: environment[name] for name in (*OPTION_NAMES, *OTHERS) if environment.get(name)}
        values = {name: value for name, value in (inherited | typed).items() if value or name in NOT_EMPTY}
        if typed.get("RECIPE") and "HW" not in typed:
            values.pop("HW", None)
        for name in values.keys() & set(PATHS):  # not every shell expands the `~` of `OUT=~/runs`
            values[name] = re.sub(r"(^|\s)~/", rf"\1{Path.home()}/", values[name])
        return Given(typed, values, "n" in flags[1:].split(" ")[0].partition("-")[0])


class Rule(NamedTuple):
    """A target of the Makefile."""

    prerequisites: list[str]
    text: str  # what it does


@cache
def rules() -> dict[str, Rule]:
    """Return the targets of the Makefile."""
    found = re.findall(r"^([a-z][a-z-]*):(.*)\n((?:\t.*\n)*)", MAKEFILE.read_text(encoding="utf-8"), re.M)
    return {target: Rule(line.partition("##")[0].split(), line + recipe) for target, line, recipe in found}


def command_of(target: str) -> click.Command | None:
    """Return the command of `rlhf` that a target runs, None for other targets."""
    group, _, name = target.partition("-")
    if group in COMMAND_GROUPS:
        of_group = cli.commands[group]
        assert isinstance(of_group, click.Group)
        return of_group.commands.get(name)
    return cli.commands.get("run" if target in STAGES else target)


def takes(target: str, variable: str) -> bool:
    """Return whether a variable changes something in a target, or in one that this one runs first."""
    rule = rules()[target]
    on_device = {"$(ready)", "$(image)"} & {*rule.prerequisites}
    if variable in ANYWHERE or (on_device and variable in (*OF_CONTAINER, *OF_CARD)):
        return True
    if any(takes(stage, variable) for stage in rule.prerequisites if stage in STAGES):
        return True
    if target in MODULES:
        return variable in MODULES[target][1].split()
    if command := cli.commands["run"] if target == "shell" else command_of(target):
        return variable == ARGUMENTS.get(target) or _has(command, variable)
    return variable in re.findall(r"[A-Z_]+", rule.text)


def _has(command: click.Command, variable: str) -> bool:
    """Return whether a command has the option or argument of a variable, or --out, whose default it changes."""
    options, arguments = _parameters(command)
    if variable not in OPTION_NAMES:
        return variable == _files_variable(command) or (variable == "RUN" and "RUN" in arguments)
    of_out = variable in ("DATA", "WEIGHTS", "SEED") and "--out" in options and "--seeds" not in options
    return OPTION_NAMES[variable] in options or of_out or variable == _files_variable(command)


def _parameters(command: click.Command) -> tuple[set[str], set[str]]:
    """Return the names of a command's options, and the words that name its arguments."""
    options = {name for option in command.params if isinstance(option, click.Option) for name in option.opts}
    named = [str(p.metavar or p.name).upper() for p in command.params if isinstance(p, click.Argument)]
    return options, {"RUN" if word == "RUNS" else word for text in named for word in re.findall("[A-Z]+", text)}


def _files_variable(command: click.Command) -> str | None:
    """Return the variable with the files that are a command's arguments: DATA, or FILES beside --data."""
    options, arguments = _parameters(command)
    return ("FILES" if "--data" in options else "DATA") if "FILES" in arguments else None


# ---- what is refused


def check(goals: Sequence[str], given: Given, runtime: str) -> None:
    """Refuse variables that make would ignore, and values that a target's command would refuse.

    A variable of the environment may be meant for another program: it counts only where a target takes it. Raises
    OptionError and what the commands raise for their options.
    """
    for name in given.typed:
        _check_name(name, goals, runtime)
    for name, value in given.values.items():
        if any(takes(goal, name) for goal in goals):
            _check_value(name, value)
    if runtime not in RUNTIMES and any("$(ready)" in rules()[goal].prerequisites for goal in goals):
        raise OptionError(f"RUNTIME={runtime}: {', '.join(RUNTIMES)}")
    if any(takes(goal, "HW") for goal in goals) and "RUN" not in given.values:
        _recipe_folder(given.values)
    for target in goals:
        if command := command_of(target):
            group, _, name = target.partition("-")
            words = words_of(target, given.values)[2 if group in COMMAND_GROUPS else 1 :]
            info_name = f"rlhf {group} {name}" if group in COMMAND_GROUPS else f"rlhf {command.name}"
            command.make_context(info_name, words)


def _check_name(name: str, goals: Sequence[str], runtime: str) -> None:
    """Raise OptionError for a variable that there is not, or that changes nothing in these targets."""
    if name not in OPTION_NAMES and name not in OTHERS:
        near = difflib.get_close_matches(name.upper(), [*OPTION_NAMES, *OTHERS], 1)
        meant = f"; did you mean {near[0]}?" if near else ";"
        raise OptionError(f'there is no variable {name}{meant} SET="ppo.steps=10" changes a key of the recipe')
    if not any(takes(goal, name) for goal in goals):
        raise OptionError(f"{name} changes nothing in `make {' '.join(goals)}`; it is for {_targets_with(name)}")
    if name in OF_CONTAINER and runtime == "local" and {*goals}.isdisjoint(("image", "shell", "test-image")):
        raise OptionError(f"{name} changes nothing without a container (RUNTIME=local)")


def _check_value(name: str, value: str) -> None:
    """Raise OptionError for the value of a variable that no command checks."""
    if name in SWITCHES and value not in (*ON, *OFF):
        raise OptionError(f"{name}={value}: write 1 or 0")
    if name == "GPU" and not re.fullmatch(CARD, value):
        raise OptionError(f"GPU={value}: a card's number in nvidia-smi, such as 1, or its UUID")


def _recipe_folder(values: Values) -> Path:
    """Return the folder of the recipe that RECIPE or HW names. Raises OptionError if there is none."""
    if "RECIPE" not in values:
        return Choice(values.get("HW", "cpu"), guide=values.get("GUIDE") in ON).directory_of_recipe()
    recipes.check_directory(Path(values["RECIPE"]), recipes_root())
    return Path(values["RECIPE"])


def _targets_with(variable: str) -> str:
    targets = [target for target in rules() if takes(target, variable)]
    return " ".join(targets if len(targets) <= MOST else [*targets[:3], f"and {len(targets) - 3} more targets"])


# ---- the command


def command_line(target: str, given: Given, runtime: str, image: str, *, gpu: bool, asked: bool) -> list[str]:
    """Return the command that a target runs, here or in a container.

    `asked` is whether the target itself was asked for: a stage that another target needs may be finished, or absent.
    """
    values = given.values
    own_out = values.get("OUT", default_out(values))
    if target == "shell":
        return [*in_container(values, own_out, runtime, gpu), "--entrypoint", "bash", image]
    is_module = target in MODULES
    words = module_words(target, values) if is_module else words_of(target, values, asked)
    if runtime == "local":
        return [f"{values.get('VENV', '.venv')}/bin/{'python' if is_module else 'rlhf'}", *words]
    out = words[words.index("--out") + 1] if "--out" in words else own_out
    shown = in_container(values, out, runtime, gpu)
    if is_module:
        return [*shown, "--entrypoint", "python", image, *words]
    if target == "serve":
        return [*shown, "--port", values.get("PORT", "8000"), image, *words, "--host", "0.0.0.0"]
    return [*shown, image, *words]


def words_of(target: str, values: Values, asked: bool = True) -> list[str]:
    """Return the words of the command of `rlhf` that a target runs. `asked`: see `command_line`."""
    command = command_of(target)
    assert command is not None
    words = target.split("-")
    if target in STAGES:
        words = ["run", target, "--with-parents", *([] if asked else ["--if-needed"])]
    options, arguments = _parameters(command)
    if "RUN" in values and "RUN" in arguments:
        words.append(values["RUN"])
        chosen = dict(values)
    else:
        chosen = {"OUT": default_out(values, of_seed="--seeds" not in options)} | dict(values)
        chosen = chosen if "RECIPE" in values else {"HW": "cpu"} | chosen
    if target == "ab":  # its --seed is that of the order in which answers are shown
        chosen.pop("SEED", None)
    words += _options({name: value for name, value in chosen.items() if OPTION_NAMES.get(name) in options})
    words += files(values.get(_files_variable(command) or "", ""))
    return words + shlex.split(values.get(ARGUMENTS.get(target, ""), ""))


def module_words(target: str, values: Values) -> list[str]:
    """Return the words that follow `python` for a target that runs a module."""
    module, variables = MODULES[target]
    own = {name: values[name] for name in variables.split() if name in values}
    return ["-m", *module.split(), *_options(own), *shlex.split(own.get("BENCH_ARGS", ""))]


def _options(values: Values) -> list[str]:
    """Return the words of options: of `rlhf`, and of the fuzzer, whose variables are called as they are."""
    words = []
    for name, value in values.items():
        option = OPTION_NAMES.get(name, f"--{name.lower()}")
        if name in SWITCHES:
            off = ["--restart"] if name == "RESUME" else []
            words += [option] if value in ON else off
        elif name in WORDS:
            several = files(value) if name == "DATA" else value.split()
            words += [word for one in several if (name, one) != ("REPORT_TO", "none") for word in (option, one)]
        elif name not in ("BENCH_ARGS", *OF_CARD):
            words += [option, value]
    return words


def files(value: str) -> list[str]:
    """Return the files that words or patterns name; a word that is no file stays as it is, for `rlhf` to refuse."""
    return [file for word in value.split() for file in sorted(glob.glob(word)) or [word]]


def default_out(values: Values, of_seed: bool = True) -> str:
    """Return the root of runs: one of its own for other weights, on other data and with another seed."""
    root = "runs"
    if weights := values.get("WEIGHTS"):
        root += f"/weights-{Path(weights).name}"
    if data := files(values.get("DATA", "")):
        root += f"/data-{Path(data[0].removesuffix('.gz')).stem}"
    return f"{root}/seed-{values['SEED']}" if of_seed and "SEED" in values else root


def in_container(values: Values, out: str, engine: str, gpu: bool) -> list[str]:
    """Return bin/in-container with what it must show the command: the same paths as the caller has.

    `out` is the root of runs that the command writes to.
    """
    words = ["bin/in-container", "--engine", "docker" if engine == "local" else engine, *(["--gpu"] if gpu else [])]
    run = values.get("RUN")
    written = [str(Path(run).parent) if run else out, "results"]
    read = [*files(values.get("DATA", "")), *files(values.get("FILES", "")), *_named_by_recipe(values)]
    read += [values[name] for name in ("RECIPE", "REUSE", "WEIGHTS") if name in values]
    read += [str(recipes_root())]
    shown = {os.path.abspath("recipes"), *map(os.path.abspath, written)}
    for path in dict.fromkeys(map(os.path.abspath, filter(os.path.exists, read))):
        words += [] if path in shown else ["--read", path]
    return words + [word for path in written for word in ("--write", os.path.abspath(path))]


def _named_by_recipe(values: Values) -> Iterator[str]:
    """Yield the folders and files that a recipe or SET may name: a checkpoint, an encoder."""
    if "RUN" in values:
        run = Path(values["RUN"])
        manifests = sorted((*run.glob("manifest.json"), *run.glob("*/manifest.json")))
        texts = [json.dumps(json.loads(file.read_text(encoding="utf-8"))["settings"]) for file in manifests]
    else:
        text = (_recipe_folder(values) / "recipe.yaml").read_text(encoding="utf-8")
        texts = [re.sub(r"(^|\s)#.*", "", text, flags=re.M)]
    for text in (*texts, values.get("SET", "")):
        yield from re.findall(r"(?<![\w.~/-])(\.{0,2}/[^]\s\"'#,}]+)", text)


# ---- make's side


def _of_card(target: str, values: Values) -> dict[str, str]:
    """Return the variables of the environment that say which card a target uses, and how much of its memory."""
    chosen = {name: values[name] for name in OF_CARD if name in values and takes(target, name)}
    found = {"RLHF_VRAM_CAP": chosen["VRAM_CAP"]} if "VRAM_CAP" in chosen else {}
    if "GPU" in chosen:  # the order makes the numbers those of nvidia-smi
        found |= {"CUDA_VISIBLE_DEVICES": chosen["GPU"], "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return found


def variables_help() -> Iterator[str]:
    """Yield a line for each variable that the Makefile does not explain itself: the help of its option."""
    texts: dict[str, str] = {}
    for option in (o for command in cli.commands.values() for o in command.params if isinstance(o, click.Option)):
        texts |= {name: re.split(r"(?<=\.) ", option.help or "")[0] for name in option.opts if name not in texts}
    explained = re.findall(r"^## ([A-Z_]+)", MAKEFILE.read_text(encoding="utf-8"), re.M)
    for name, text in ({name: texts[option] for name, option in OPTION_NAMES.items()} | dict(OTHERS)).items():
        if name not in explained:
            yield f"  {name:<12} {excerpt(text, HELP)}"


@click.command()
@click.option("--goals", default="", help="Targets that make was asked for.")
@click.option("--runtime", default="local", help="Where the command runs: docker, podman or local.")
@click.option("--image", default="", help="Image of the container.")
@click.option("--gpu", is_flag=True, help="Show the container all GPUs.")
@click.argument("target")
def main(goals: str, runtime: str, image: str, gpu: bool, target: str) -> None:
    """Run a target of the Makefile; `check` only refuses what is wrong, and `help` lists variables."""
    given, asked_for = Given.read(os.environ), goals.split()
    os.environ[STARTED] = shlex.join(f"{name}={given.values[name]}" for name in OF_A_RUN if name in given.values)
    if target == "check":
        check(asked_for, given, runtime)
    elif target == "help":
        click.echo("\n".join(variables_help()))
    else:
        os.environ |= _of_card(target, given.values)
        words = command_line(target, given, runtime, image, gpu=gpu, asked=target in asked_for)
        if given.dry_run:
            click.echo(shlex.join(words))
        else:
            sys.stdout.flush()
            os.execvp(words[0], words)


if __name__ == "__main__":
    guarded(main, "make")
