"""`rlhf reproduce`: a recipe with several seeds, and the table of its record."""

import os
from collections.abc import Mapping

import click

from rlhf.cli.choice import PRICE, RUN, SEED, Choice, chooses_recipe
from rlhf.errors import OptionError
from rlhf.evaluation import reproduce as reproducing
from rlhf.process import endings
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.stages import STAGES
from rlhf.run.records import Summary
from rlhf.terminal import screen
from rlhf.terminal.tables import rows_table

CONTINUES = "the same command continues: finished stages are kept, the interrupted one is resumed"


@click.command()
@RUN
@chooses_recipe
@click.option("--seeds", multiple=True, default=(0, 1, 2), type=SEED, metavar="N", help="Seed; name it for each.")
@click.option("--stage", "stages", multiple=True, type=click.Choice(STAGES), help="Stage to end with. [default: all]")
@PRICE
def reproduce(choice: Choice, seeds: tuple[int, ...], stages: tuple[StageName, ...], price: float | None) -> None:
    """Run a recipe's stages with several seeds and print mean ± sd.

    The table has a row for each target, and the main figure of a stage without one. Finished stages are kept,
    interrupted ones are resumed.
    """
    if choice.seed is not None:
        raise OptionError("--seed: the seeds of this command are --seeds")
    loaded, out, numbers = choice.load(on_device=True), choice.root, list(dict.fromkeys(seeds))
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
