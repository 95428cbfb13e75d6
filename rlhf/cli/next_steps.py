"""What may follow a finished stage: commands on its run directory, which has all settings."""

import shlex
from pathlib import Path

from rlhf.recipe import Recipe, StageName, parents
from rlhf.recipe.stages import EVALUATE, MERGE, POLICIES, TRAINING_STAGES, stage_name
from rlhf.terminal import screen
from rlhf.terminal.make_words import in_make_words

Step = tuple[tuple[str, ...], bool, str]  # words after `rlhf`, whether they are on the stage alone, what they do


def steps(stage: StageName, recipe: Recipe) -> list[Step]:
    """Return the commands that may follow a stage of a recipe."""
    report: Step = (("report",), False, "one page about the run")
    if stage in POLICIES:
        return [(("chat",), True, "talk with it"), (("run", EVALUATE), False, "compare policies"), report]
    if stage == EVALUATE:
        ab: list[Step] = [(("ab",), False, "rate answers blind")] if recipe.policies() else []
        merge: list[Step] = [(("run", MERGE), False, "one checkpoint")] if recipe.merge else []
        return [report, *ab, *merge]
    if stage == MERGE:
        return [(("serve",), False, "an OpenAI-compatible address"), (("chat",), True, "talk with it")]
    present = [name for name in TRAINING_STAGES if recipe.section(name) is not None]
    following = [name for name in present if parents(recipe, name)[-1:] == [stage]]
    return [*((("run", name), False, f"train {name}") for name in following), report]


def show(path: Path, recipe: Recipe) -> None:
    """Print what may follow the stage that is finished in `path`, with make's targets if make runs this command."""
    lines = []
    for words, of_stage, purpose in steps(stage_name(path.name), recipe):
        more = ["--with-parents"] if words[0] == "run" else []
        command = shlex.join(["rlhf", *words, str(path if of_stage else path.parent), *more])
        lines.append((in_make_words(f"`{command}`").strip("`"), purpose))
    width = max(len(line) for line, _ in lines)
    screen.OUT.print("next:", style="dim")
    for line, purpose in lines:
        screen.OUT.print(f"  {line:<{width}}  # {purpose}", style="dim", soft_wrap=True)
