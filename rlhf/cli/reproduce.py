"""`rlhf reproduce`: a recipe with several seeds, and the table of their results."""

import os
from collections.abc import Mapping
from pathlib import Path

import click

from rlhf.cli.choice import Choice
from rlhf.cli.options import LARGEST_SEED, PRICE, listed
from rlhf.cli.recipe_options import TRAINING_HELP, chooses_recipe
from rlhf.errors import OptionError, UserError
from rlhf.evaluation import reproduce as reproducing
from rlhf.process import endings
from rlhf.recipe import PinnedRecipe, StageName, parse_overrides
from rlhf.recipe.stages import stage_name
from rlhf.run.records import Summary
from rlhf.terminal import screen
from rlhf.terminal.tables import rows_table

CONTINUES = "the same command continues: finished stages are kept, the interrupted one is resumed"


@click.command()
@chooses_recipe(**TRAINING_HELP, out=True, on_device=True)
@click.option("--seeds", metavar="LIST", default="0,1,2", show_default=True, help="Seeds, separated by commas.")
@click.option(
    "--stage",
    metavar="LIST",
    show_default="all that train, and evaluate if a target needs it",
    help="Stages to end with, such as dpo, separated by commas.",
)
@PRICE
def reproduce(choice: Choice, out: Path, seeds: str, stage: str | None, price: float | None) -> None:
    """Run a recipe's stages with several seeds and print mean ± sd.

    The table has a row for each target, and the main figure of a stage without one. Finished stages are kept,
    interrupted ones are resumed.
    """
    numbers, stages = _seeds(seeds), _stages(stage)
    loaded = choice.load()
    if "seed" in parse_overrides(choice.changes):
        raise OptionError("--set seed: the seeds of this command are --seeds")
    chain = reproducing.chain(loaded, stages or reproducing.final_stages(loaded))
    with endings.reporting_progress(lambda: CONTINUES):
        reproducing.run_seeds(loaded, chain, numbers, out)
    reproduction = reproducing.write_record(loaded, chain, numbers, out, price)
    _show(loaded, reproduction.seeds, price)
    screen.OUT.print(f"written to {out / f'{loaded.name}-{loaded.version}.json'}", style="dim")


def _show(loaded: PinnedRecipe, seeds: Mapping[str, Mapping[str, Summary]], price: float | None) -> None:
    """Print the table of every seed's summaries, beside the figures of the recipe's newest record if it has one."""
    title = f"{loaded.name} {loaded.version}, seeds {' '.join(seeds)}"
    if loaded.released_sha256:
        title += f", modified recipe ({loaded.status})"
    found = reproducing.record_of(loaded)
    columns, *body = reproducing.rows(seeds, price, found[1].seeds if found else None)
    rows_table(title, columns, body)
    if found:
        file, record = found
        screen.OUT.print(f"recorded: {os.path.relpath(file)}, {record.device.text()}", style="dim", soft_wrap=True)


def _seeds(text: str) -> list[int]:
    """Return the seeds of a list. Raises BadParameter if a word is none, or if one is named twice."""
    for word in listed(text) or [""]:
        if not word.isdecimal() or len(word) > 10 or int(word) > LARGEST_SEED:
            raise click.BadParameter(f"{text!r}: whole numbers below 2^32, separated by commas", param_hint="--seeds")
    seeds = [int(word) for word in listed(text)]
    if len(set(seeds)) < len(seeds):
        raise click.BadParameter(f"{text!r} names a seed twice; each seed counts once", param_hint="--seeds")
    return seeds


def _stages(text: str | None) -> list[StageName] | None:
    """Return the stages of a list, None without one. Raises BadParameter if a word is none."""
    try:
        return None if text is None else [stage_name(word) for word in listed(text) or [""]]
    except UserError as error:
        raise click.BadParameter(str(error), param_hint="--stage") from None
