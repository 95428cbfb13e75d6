"""`rlhf rehearse`: the chain of a recipe for a card, for a few real steps on a CPU."""

import sys
from pathlib import Path

import click

from rlhf import recipe as recipes
from rlhf.cli.choice import Choice, recipes_root
from rlhf.cli.recipe_options import chooses_recipe
from rlhf.errors import OptionError, UserError
from rlhf.files import remove
from rlhf.recipe import rehearsal as content
from rlhf.run.lock import locked
from rlhf.stages import rehearsal as rehearsing
from rlhf.stages.rehearsal import Outcome
from rlhf.terminal import say, screen
from rlhf.terminal.tables import rows_table


@click.command()
@chooses_recipe(
    data="Take the rows of this file, not made ones. May be repeated.",
    weights="A small checkpoint's folder or GGUF file that stands for the recipe's model. [default: SmolLM2-135M]",
    changes="Change a key of the recipe, also one that the rehearsal sets. May be repeated.",
    out=True,
)
def rehearse(choice: Choice, out: Path) -> None:
    """Run a card recipe's chain on a CPU, two steps of each stage.

    A small model stands for the recipe's, and made rows for data of the hub; lengths and batches are cut, and all else
    is as the recipe has it. Each stage that trains is stopped at its first checkpoint and resumed. An earlier rehearsal
    of the recipe in <out>/rehearsal is replaced. The exit code is not 0 if a stage failed, or computed a number that is
    not finite.
    """
    loaded = choice.load()
    folder = (out / "rehearsal" / loaded.name / loaded.version).absolute()
    rows = folder / "rows.jsonl"
    stand_in = _stand_in(choice)
    changes = content.changes(loaded.recipe, stand_in, rows)
    try:
        changed = loaded.with_changes(changes | recipes.parse_overrides(choice.changes))
    except UserError as error:
        way_out = "change that key with --set, or name another small model with --weights"
        raise UserError(f"it cannot be rehearsed: {error}; {way_out}") from error
    screen.OUT.print("not tried: " + "; ".join(content.untried(loaded.recipe)), soft_wrap=True)
    with locked(folder):
        remove(folder)
        folder.mkdir()
        if content.needs_rows(loaded.recipe):
            content.write_rows(loaded.recipe, rows)
        outcomes = [*rehearsing.outcomes(changed, out / "rehearsal")]
    columns = ("stage", "seconds", "all numbers finite", "resumed from", "found")
    rows_table(f"rehearsal of {loaded.name} {loaded.version}", columns, map(_cells, outcomes))
    if ill := [outcome for outcome in outcomes if not outcome.is_well]:
        say(f"error: {ill[0].stage}: see above; to run it alone: `rlhf run {ill[0].stage} {folder}`")
        sys.exit(ill[0].code or 1)


def _stand_in(choice: Choice) -> recipes.Changes:
    """Return the changes that put a small model in the place of the recipe's. Raises OptionError."""
    if choice.weights == "random":
        raise OptionError("--weights random: a rehearsal needs a tokenizer too: name the folder of a small checkpoint")
    if choice.weights:  # it is in its place already, and has its own architecture
        return {"model.architecture": None}
    folder = recipes_root() / content.STAND_IN
    if not folder.is_dir():
        raise OptionError(f"{folder}: no such recipe, whose model would stand in: name a small checkpoint, --weights")
    return content.small_model(recipes.load(folder).recipe)


def _cells(outcome: Outcome) -> tuple[str, ...]:
    """Return the row of the table for a stage."""
    numbers = outcome.not_finite
    finite = "" if numbers is None else f"no: {', '.join(numbers)}" if numbers else "yes"
    return outcome.stage, f"{outcome.seconds:.0f}", finite, outcome.resumed, outcome.found
