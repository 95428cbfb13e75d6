"""Prints what is wrong with the targets and variables that `make` was given, or what make needs to know of the recipe.

make ignores a misspelt variable, and it installs packages before `rlhf` could refuse a value. The Makefile therefore
runs `python bin/check_make.py TARGET ... -- NAME:ORIGIN=VALUE ...` first, with the variables that were set on its
command line or in the environment. It prints one line: a problem, or `ok`, the device that the recipe trains on (cpu or
cuda) and the paths that the recipe names. This program needs no package, because none may be installed yet.
"""

import difflib
import functools
import glob
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

if sys.version_info < (3, 10):  # noqa: UP036 before what they cannot read; the Makefile says what to do
    sys.exit(f"this is Python {sys.version_info[0]}.{sys.version_info[1]}")

TEXT = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
DEFAULTS = dict(re.findall(r"^([A-Z_]+) \?= ?(.*)", TEXT, re.M))
VARIABLES = list(DEFAULTS)
TARGETS = re.findall(r"^([a-z-]+):.*## ", TEXT, re.M)
INNER_TARGETS = ("engine",)  # of other targets; no one needs to ask for them

STAGES = ("pretrain", "sft", "rm", "ppo", "rloo", "grpo", "dpo", "evaluate", "merge")
TRAIN = (*STAGES, "all")
RUN_STAGES = (*TRAIN, "serve")  # which first merges
OF_RUNS = (*TRAIN, "chat", "score", "serve", "report", "ab", "judge")
ON_DEVICE = (*TRAIN, "chat", "score", "serve", "reproduce", "bench", "bench-ablation", "bench-memory")
IN_CONTAINER = (*ON_DEVICE, "fetch", "image", "shell", "engine")
BENCHMARKS = ("bench", "bench-against", "bench-ablation", "bench-memory", "bench-peer-supervised")
OF_RECIPES = ("setup", *OF_RUNS, "reproduce", "plan", "fetch", *BENCHMARKS, "bench-gpu", "image", "shell", "engine")

# The targets that read a variable; it would change nothing in others. Variables that are not listed are for all.
READ_BY: Mapping[str, tuple[str, ...]] = {
    "HW": OF_RECIPES,
    "RECIPE": OF_RECIPES,
    "RUN": OF_RUNS,
    "DATA": (*OF_RUNS, "reproduce", "plan", "data-check", "data-show", "shell"),
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
    "VRAM_CAP": (*ON_DEVICE, "bench-gpu"),
    "GPU": (*ON_DEVICE, "bench-gpu", "shell"),
    "CHECK_ARGS": ("data-check",),
    "SHOW_ARGS": ("data-show",),
    "REV": ("bench-against",),
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
    "RUNTIME": IN_CONTAINER,
    "BASE": (*IN_CONTAINER, "test-image"),
    "FLASH_ATTN": IN_CONTAINER,
}
ANYWHERE = ("RUNTIME",)  # may be typed for any target
INSTEAD = {
    "FIT": ". First `make plan FIT={value}`, then its SET=",
    "SEED": '. Several seeds are SEEDS="0 1", for `make reproduce`',
    "VRAM_CAP": ". For `make plan` the limit is FIT",
}
# Their values stand between apostrophes in the Makefile's commands.
QUOTED = (
    *("BASE", "DATA", "FILES", "FIT", "HW", "MODEL", "ONLY", "OUT", "PRICE", "RECIPE", "REPORT_TO", "REUSE", "REV"),
    *("RUN", "SEEDS", "SET", "STOP_ON", "TEMPERATURE", "URL", "WEIGHTS"),
)
ONE_WORD = ("RECIPE", "REV", "RUN", "RUNTIME", "STAGE", "VENV", "WEIGHTS")
OF_A_RUN = ("HW", "RECIPE", "DATA", "WEIGHTS", "OUT", "SEED")  # a run directory names their values
NEEDED = ("IMAGE", "OUT", "PYTHON", "VENV")  # an empty value would stand for none
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
    "RUNTIME": ("docker|podman|local", "docker, podman or local"),
    "FLASH_ATTN": SWITCH,
    "SEED": (r"\d{0,10}", 'one whole number; several are SEEDS="0 1", for `make reproduce`'),
    "SEEDS": (r"[\s,]*\d{1,10}([\s,]+\d{1,10})*[\s,]*", 'whole numbers, for example "0 1 2"'),
    "CASES": COUNT,
    "KILLS": COUNT,
    "PRICE": NUMBER,
    "TEMPERATURE": NUMBER,
    "FIT": (f"(card|{SIZE})?", "a size such as 12GB, or card"),
    "VRAM_CAP": (f"({SIZE})?", "a size such as 24GB"),
    "GPU": (r"(\d+(,\d+)*|(GPU|MIG)-[\w-]+)?", "a card's number in nvidia-smi, such as 1, or its UUID"),
}
LARGEST_SEED = 2**32 - 1
MOST = 6  # targets that a message names
DATA_FILE = r"\.(jsonl|json|gz|parquet|csv|tsv)$"


class Variable(NamedTuple):
    """A variable that was set."""

    name: str
    origin: str  # "command" (line), or "environment"
    value: str

    @property
    def source(self) -> str:
        """Return what tells a value that nobody typed; "" for one of the command line."""
        return " (from the environment)" * (self.origin == "environment")

    def __str__(self) -> str:
        return f"{self.name}={self.value}{self.source}"


class Recipe(NamedTuple):
    """What is read of a recipe.yaml without a library for YAML, which may not be installed yet."""

    hardware: str | None
    device: str
    rank: tuple[bool, bool, int]  # default, released, version: of those for one hardware `rlhf --hw` takes the highest
    paths: tuple[str, ...]  # folders and files that it names: a checkpoint, an encoder


def problems(targets: Sequence[str], given: Mapping[str, Variable]) -> Iterator[str]:
    """Yield what is wrong, what to mend first before the rest."""
    read = that_count(targets, given)
    yield from _unknown_variables(given.values())
    yield from _values_for_no_shell(read.values())
    yield from _missing_variables(targets, given)
    yield from _variables_without_effect(targets, given.values())
    yield from _wrong_values(read.values())
    yield from _missing_files(targets, [*read.values()])
    yield from _unknown_targets(targets)
    yield from _wrong_recipe(targets, read)
    yield from _wrong_with_containers(targets, read)


def that_count(targets: Sequence[str], given: Mapping[str, Variable]) -> dict[str, Variable]:
    """Return the variables that were typed, and those of the environment that a target reads.

    In the environment a variable may be meant for another program.
    """
    reads = {name: not {*targets}.isdisjoint(READ_BY.get(name, targets)) for name in given}
    return {name: variable for name, variable in given.items() if variable.origin == "command" or reads[name]}


def needs(targets: Sequence[str], read: Mapping[str, Variable]) -> list[str]:
    """Return the device that the targets' recipe trains on, and the paths that the recipe or SET names."""
    recipe, changes = _recipe(targets, read), _of(read, "SET").value
    of_changes = re.findall(r"(?:^|\s)hardware\.device=(\w+)", changes)
    device = [recipe.device if recipe else "cpu", *of_changes][-1]
    return [device, *(recipe.paths if recipe else ()), *_paths(changes)]


def _recipe(targets: Sequence[str], read: Mapping[str, Variable]) -> Recipe | None:
    """Return the recipe that RUN, RECIPE or HW names; None if there is none, or if no target needs it."""
    if {*targets}.isdisjoint(OF_RECIPES):
        return None
    if run := _of(read, "RUN").value:
        return _recipe_of_run(Path(os.path.expanduser(run)))
    if folder := _of(read, "RECIPE").value:
        file = Path(os.path.expanduser(folder.removesuffix("/recipe.yaml")), "recipe.yaml")
        return _recipe_in(file) if file.is_file() else None
    for_hardware = (recipe for recipe in _default_recipes() if recipe.hardware == _of(read, "HW").value)
    return max(for_hardware, key=lambda recipe: recipe.rank, default=None)


@functools.cache
def _default_recipes() -> list[Recipe]:
    """Return the recipes that HW may choose, by the rule of rlhf/recipe/folders.py."""
    files = (file for file in _recipes_root().glob("*/v*/recipe.yaml") if file.is_file() and _version(file) >= 0)
    return [recipe for recipe in map(_recipe_in, files) if recipe.rank[0]]


def _recipes_root() -> Path:
    """Return the folder of recipes."""
    return Path(os.environ.get("RLHF_RECIPES") or "recipes")


def _recipe_in(file: Path) -> Recipe:
    text = re.sub(r"(^|\s)#.*", "", file.read_text(encoding="utf-8", errors="replace"), flags=re.M)
    section = re.search(r"^hardware:(.*(\n([ \t].*)?)*)", text, re.M)
    hardware = dict(re.findall(r"\b(name|device): *[\"']?([\w.-]+)", section[1] if section else ""))
    rank = bool(re.search(r"^default: *true\b", text, re.M)), bool(re.search(r"^status: *released\b", text, re.M))
    return Recipe(hardware.get("name"), hardware.get("device", "cuda"), (*rank, _version(file)), _paths(text))


def _recipe_of_run(folder: Path) -> Recipe | None:
    """Return the recipe of a run directory, or of a stage's, as its first manifest has it; None without one."""
    for file in sorted((*folder.glob("manifest.json"), *folder.glob("*/manifest.json"))):
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))["settings"]
            hardware = settings["hardware"]
            return Recipe(hardware["name"], hardware["device"], (False, False, 0), _paths(json.dumps(settings)))
        except (ValueError, LookupError, TypeError):
            continue
    return None


def _version(file: Path) -> int:
    version = re.fullmatch(r"v(\d+)", file.parent.name)
    return int(version[1]) if version else -1


def _paths(text: str) -> tuple[str, ...]:
    """Return the folders and files that a text names and that exist."""
    named = re.findall(r"(?<![\w.~/-])(\.{0,2}/[^]\s\"'#,}]+)", text)
    return tuple(path for path in dict.fromkeys(named) if os.path.exists(path))


def _of(read: Mapping[str, Variable], name: str) -> Variable:
    return read.get(name) or Variable(name, "default", DEFAULTS[name])


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
        if targets and read_by and origin == "command" and name not in ANYWHERE and {*targets}.isdisjoint(read_by):
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
            yield f"SET{variable.source}: '{wrong[0]}' is no KEY=VALUE; spaces separate changes: write lists as [1,2]"


def _missing_files(targets: Sequence[str], read: Sequence[Variable]) -> Iterator[str]:
    for variable in read:
        folder = variable.value if variable.name == "WEIGHTS" else ""
        if folder not in ("", "random") and not os.path.isdir(os.path.expanduser(folder)):
            yield f"{variable}: no such folder; a checkpoint's folder, or random"
    for variable in (variable for variable in read if variable.name in ("DATA", "FILES")):
        name = variable.name
        for word in variable.value.split():
            if found := glob.glob(os.path.expanduser(word.replace("[^", "[!"))):
                if any(map(os.path.isdir, found)):
                    yield f"{name}='{word}'{variable.source} is a folder; name its files, for example '{word}/*.jsonl'"
                continue
            looks_at = next((t for t in targets if t in ("data-check", "data-show")), None)
            command = "score" if name == "FILES" else looks_at.replace("-", " ") if looks_at else "run --data"
            of_hub = re.fullmatch(r"[^/.~][^/]*/[^/]+", word) and not re.search(DATA_FILE, word)
            hint = ""
            if name == "DATA" and of_hub and not looks_at:
                key = f'SET="data.source=hub data.name={word} data.revision=COMMIT"'
                hint = f"A data set of the hub is named by its commit: {key}. "
            if len(variable.value.split()) > 1:
                hint += f"A name with spaces cannot pass through make: use `rlhf {command}`"
            problem = f"{name}='{word}'{variable.source}: no such file"
            yield f"{problem}. {hint}".removesuffix(". ")  # make adds a full stop


def _wrong_recipe(targets: Sequence[str], read: Mapping[str, Variable]) -> Iterator[str]:
    folder, hardware, run = _of(read, "RECIPE"), _of(read, "HW"), _of(read, "RUN")
    if run.value:
        for variable in (read[name] for name in OF_A_RUN if name in read and read[name].value):
            yield f"{variable}: {run} has the settings that it was made with; leave {variable.name} out"
        if not {*targets}.isdisjoint(OF_RUNS) and not _recipe(targets, read):
            way_out = "name a run directory, runs/NAME/vN, or a stage's folder in it"
            yield f"{run}: no run there, for no stage has a manifest.json; {way_out}"
        return
    if folder.value and hardware.origin == "command":
        yield f"{hardware} and {folder} both choose a recipe; leave one of them out"
    if {*targets}.isdisjoint(OF_RECIPES) or _recipe(targets, read):
        return
    if folder.value:
        versions = sorted(Path(folder.value).glob("v*/recipe.yaml"), key=_version)
        roots = (_recipes_root(), Path("my-recipes"))  # the latter is where `rlhf new` writes
        everywhere = [str(file.parent) for root in roots for file in root.glob("*/v*/recipe.yaml")]
        alike = difflib.get_close_matches(folder.value.rstrip("/"), everywhere, 3)
        such_as = str(versions[-1].parent) if versions else " or ".join(alike) or "recipes/cpu-tiny/v2"
        yield f"{folder}: no recipe.yaml there; name the folder of a version, such as {such_as}"
    elif not any(_recipes_root().glob("*/v*/recipe.yaml")):
        yield f"{_recipes_root()}: no recipes there. RLHF_RECIPES names their folder; without it this is recipes/"
    else:
        others = sorted({recipe.hardware for recipe in _default_recipes() if recipe.hardware})
        only = f", only for {', '.join(others)}" * bool(others)
        near = _spelt_like(hardware.value, others)[:1]
        question = f"Did you mean {near[0]}? " if near else ""
        yield f"{hardware}: no recipe for such hardware{only}. {question}`make recipes` lists them"


def _wrong_with_containers(targets: Sequence[str], read: Mapping[str, Variable]) -> Iterator[str]:
    """Yield what cannot pass into a container, or changes nothing without one."""
    default = "local" if needs(targets, read)[0] == "cpu" else "docker"
    if read.get("RUNTIME", Variable("RUNTIME", "default", default)).value != "local":
        for variable in (_of(read, name) for name in ("OUT", "REUSE") if not {*targets}.isdisjoint(IN_CONTAINER)):
            if variable.origin != "default" and len(variable.value.split()) > 1:
                yield f"{variable}: no spaces, which cannot pass into a container"
    elif {*targets}.isdisjoint(("image", "shell", "engine", "test-image")):
        for name in ("IMAGE", "BASE", "FLASH_ATTN"):
            if _of(read, name).origin == "command":
                yield f"{name} changes nothing without a container (RUNTIME=local)"


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
    """Print the first problem, or what make needs."""
    at = arguments.index("--")
    given = {}
    for argument in arguments[at + 1 :]:
        name, origin, value = re.fullmatch(r"(.*?):(.*?)=(.*)", argument, re.S).groups()  # type: ignore[union-attr]
        given[name] = Variable(name, origin, value)
    targets = arguments[:at]
    try:
        print(next(problems(targets, given), "") or " ".join(["ok", *needs(targets, that_count(targets, given))]))
    except OSError as error:  # otherwise make would blame Python
        print(f"{error.filename} cannot be read: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
