"""`rlhf rehearse`: the chain of a recipe for a card, for a few real steps on a CPU."""

import sys

import click

from rlhf import recipe as recipes
from rlhf.cli import report
from rlhf.cli.choice import RUN, Choice, chooses_recipe
from rlhf.errors import OptionError, UserError
from rlhf.files import remove
from rlhf.process.task import run_child, task_of
from rlhf.recipe import rehearsal as content
from rlhf.recipe.folders import default_root
from rlhf.run.lock import locked
from rlhf.terminal import say, screen


@click.command()
@RUN
@chooses_recipe
def rehearse(choice: Choice) -> None:
    """Run a card recipe's chain on a CPU, two steps of each stage.

    A small model stands for the recipe's: SmolLM2-135M, or what --weights names. Made rows stand for data of the hub;
    lengths and batches are cut, and all else is as the recipe has it. An earlier rehearsal of the recipe in
    <out>/rehearsal is replaced. A stage that fails, or computes a number that is not finite, ends it.
    """
    if choice.weights == "random":
        raise OptionError("--weights random: a rehearsal needs a tokenizer too: name the folder of a small checkpoint")
    loaded = choice.load()
    folder = (choice.root / "rehearsal" / loaded.name / loaded.version).absolute()
    rows_file = folder / "rows.jsonl"
    # A checkpoint that --weights names is in the model's place already, and has its own architecture.
    small: recipes.Changes = {"model.architecture": None}
    if not choice.weights:
        small = content.small_model(recipes.load(default_root() / content.STAND_IN).recipe)
    changes = content.changes(loaded.recipe, small, rows_file)
    try:
        changed = loaded.with_changes(changes | recipes.parse_overrides(choice.changes))
    except UserError as error:
        way_out = "change that key with --set, or name another small model with --weights"
        raise UserError(f"it cannot be rehearsed: {error}; {way_out}") from error
    with locked(folder):
        remove(folder)
        folder.mkdir()
        content.write_rows(loaded.recipe, rows_file)
        for stage in changed.recipe.sections():
            screen.OUT.print(f"rehearsal of {stage}", style="bold")
            if code := run_child(task_of(changed, stage, choice.root / "rehearsal", stop_on=["nan"])):
                say(f"error: {stage}: see above; to run it alone: `rlhf run {stage} {folder}`")
                sys.exit(code)
    report.after_run(folder)
