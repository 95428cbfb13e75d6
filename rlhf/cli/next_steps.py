"""What may follow a finished stage: commands with the options that were typed, so that a copied line works."""

import shlex
from collections.abc import Sequence

import click

from rlhf.cli.typed import typed_options
from rlhf.recipe import EVALUATE, MERGE, POLICIES, TRAINING_STAGES, Recipe, StageName, parents
from rlhf.terminal import make_words, screen

# Variables of a run that change nothing in a target, which therefore refuses them; `serve` also merges.
NOT_FOR = {"report": {"SET", "REUSE"}, "ab": {"SET", "REUSE", "PRICE"}, "chat": {"REUSE", "PRICE"}}

ALIGNED = 80  # columns: longer commands are not lined up with others

Step = tuple[tuple[str, ...], str]  # words after `rlhf`, and what the command does


def steps(stage: StageName, recipe: Recipe) -> list[Step]:
    """Return the commands that may follow a stage of a recipe."""
    report = (("report",), "one page about the run")
    if stage in POLICIES:
        return [(("chat", "--stage", stage), "talk with it"), (("run", EVALUATE), "compare policies"), report]
    if stage == EVALUATE:
        ab: list[Step] = [(("ab",), "rate answers blind")] if recipe.policies() else []
        merge: list[Step] = [(("run", MERGE), "one checkpoint")] if recipe.merge else []
        return [report, *ab, *merge]
    if stage == MERGE:
        return [(("serve",), "an OpenAI-compatible address"), (("chat", "--stage", stage), "talk with it")]
    present = [name for name in TRAINING_STAGES if recipe.section(name) is not None]
    following = [name for name in present if parents(recipe, name)[-1:] == [stage]]
    return [*((("run", name), f"train {name}") for name in following), report]


def show(stage: StageName, recipe: Recipe, more_data: Sequence[str] = ()) -> None:
    """Print what may follow the stage that the running command has finished.

    The lines are make's if make started this command. `more_data` are further files in `--data a.jsonl b.jsonl`.
    """
    lines = [
        (typed_make_line(words) or _rlhf_line(words, more_data), purpose) for words, purpose in steps(stage, recipe)
    ]
    width = max((len(line) for line, _ in lines if len(line) <= ALIGNED), default=0)
    screen.OUT.print("next:", style="dim")
    for line, purpose in lines:
        screen.OUT.print(f"  {line:<{width}}  # {purpose}", style="dim", soft_wrap=True)


def typed_make_line(words: Sequence[str]) -> str | None:
    """Return `make_line` with the variables that make was given; None if make did not start this command."""
    variables = make_words.variables()
    return None if variables is None else make_line(words, variables)


def make_line(words: Sequence[str], variables: Sequence[str]) -> str:
    """Return the command of make for a command of `rlhf`, with those variables that make was given and the target has.

    `variables` are unquoted: `SET=ppo.steps=10 ppo.kl_coef=0.1`.
    """
    target, *options = words[1:] if words[0] == "run" else words
    stage = [f"STAGE={options[1]}"] if options else []
    pairs = (assignment.partition("=") for assignment in variables)
    refused = NOT_FOR.get(target, ())
    assignments = [f"{name}={shlex.quote(value)}" for name, _, value in pairs if name not in refused]
    return " ".join(["make", target, *assignments, *stage])


def _rlhf_line(words: Sequence[str], more_data: Sequence[str]) -> str:
    """Return a command of `rlhf` with those options of the running command that it has too."""
    group = click.get_current_context().find_root().command
    assert isinstance(group, click.Group)
    known = {str(option.name) for option in group.commands[words[0]].params}
    own = {"seed"} if words[0] == "ab" else set()  # there it is the seed of the order in which answers are shown
    typed = typed_options(only=known - own - {"resume", "if_needed", "with_parents", "stage"})
    files = [word for file in more_data if "data" in known for word in ("--data", file)]
    parents = ["--with-parents"] if words[0] == "run" else []
    return shlex.join(["rlhf", *words, *parents, *typed, *files])
