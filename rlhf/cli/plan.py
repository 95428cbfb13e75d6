"""`rlhf plan`: memory, time and cost of a recipe before anything is started."""

import json
from collections.abc import Sequence
from typing import Literal

import click

from rlhf import terminal
from rlhf.cli import plan_tables as tables
from rlhf.cli.choice import Choice
from rlhf.cli.options import PRICE, memory_limit
from rlhf.cli.recipe_options import SET_HELP, chooses_recipe
from rlhf.errors import UserError
from rlhf.plan import plan as planning
from rlhf.plan import published_figures
from rlhf.plan.fit import USABLE, refuse_less_than_the_base
from rlhf.plan.fit import fit as fitting
from rlhf.plan.phases import ON_HOST
from rlhf.plan.predict import Predictor, predicted_stages
from rlhf.recipe import PinnedRecipe, StageName, shape
from rlhf.recipe.folders import no_section
from rlhf.recipe.stages import PRETRAIN, STAGES
from rlhf.terminal.progress import working


@click.command()
@chooses_recipe(data="Project the hours of training on this file. May be repeated.", changes=SET_HELP)
@click.option("--stage", type=click.Choice([s for s in STAGES if s != PRETRAIN]), help="Plan only this stage.")
@click.option(
    "--fit",
    callback=memory_limit,
    metavar="12GB|card",
    help="Search for settings that need at most this memory, or the memory of the recipe's card; on a CPU, what is "
    "free.",
)
@click.option("--phases", is_flag=True, help="Show what each phase of a stage holds at its peak.")
@click.option("--published", is_flag=True, help="Show every published figure beside its prediction.")
@PRICE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def plan(
    choice: Choice,
    stage: StageName | None,
    price: float | None,
    fit: int | Literal["card"] | None,
    phases: bool,
    published: bool,
    as_json: bool,
) -> None:
    """Predict memory, time and cost of a recipe without a GPU.

    Nothing is started. The exit code is 1 if the recipe does not fit its card, or on a CPU this machine.
    """
    if fit is not None and published:
        raise click.UsageError("--fit and --published answer different questions: ask one at a time")
    loaded = choice.load()
    if warning := shape.check(loaded):
        terminal.say(warning)
    stages = predicted_stages(loaded.recipe)
    if stage and stage not in stages:
        raise UserError(no_section(stage, loaded))
    planned = [stage] if stage else stages
    if fit is not None:
        limit = fit if isinstance(fit, int) else round(USABLE * planning.card_bytes(loaded))
        _show_fits(loaded, planned, limit, price, as_json)
        return
    with Predictor() as predictor, working("rehearsing the stages") as say:
        made = planning.make_plan(predictor, loaded, stages if published else planned, price, say)
    if published:
        figures = tuple(figure for figure in loaded.figures if stage in (None, figure.stage))
        tables.show_published(loaded, published_figures.compare(loaded._replace(figures=figures), made), as_json)
        return
    if as_json:
        click.echo(json.dumps(made.as_json(), indent=2))
    else:
        tables.show(made, phases)
    if any(row.fits is False for row in made.stages.values()):
        what = "this machine" if made.free_bytes is not None else "its card"
        raise UserError(f"the recipe does not fit {what}: --fit card looks for settings that do")


def _show_fits(
    loaded: PinnedRecipe, stages: Sequence[StageName], limit: int, price: float | None, as_json: bool
) -> None:
    """Search for settings with which the stages need at most `limit` bytes, and print them."""
    on_card = [stage for stage in stages if stage not in ON_HOST]
    if not on_card:
        raise click.UsageError(f"{stages[0]} uses the host's memory and none of the card's: there is nothing to fit")
    refuse_less_than_the_base(loaded, on_card, limit)
    with Predictor() as predictor, working("looking for settings that fit") as say:
        fits = fitting(predictor.predict, loaded, on_card, limit, say)
        hours = None if fits.too_large else planning.hours_before_and_after(predictor, loaded, fits)
    tables.show_fits(loaded, fits, limit, as_json, hours, price)
