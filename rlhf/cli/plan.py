"""`rlhf plan`: memory, time and cost of a recipe before anything is started."""

from collections.abc import Sequence
from typing import Literal

import click

from rlhf import terminal
from rlhf.cli import plan_tables as tables
from rlhf.cli.choice import Choice
from rlhf.cli.options import PRICE, Number, OneOf, StrictCommand, memory_limit
from rlhf.cli.recipe_options import SET_HELP, chooses_recipe
from rlhf.errors import UserError
from rlhf.plan import plan as planning
from rlhf.plan import published_figures, side_by_side, strategies
from rlhf.plan.buying import BreakEven, break_even
from rlhf.plan.fit import USABLE, refuse_less_than_the_base
from rlhf.plan.fit import fit as fitting
from rlhf.plan.phases import ON_HOST
from rlhf.plan.predict import Predictor, predicted_stages
from rlhf.recipe import PinnedRecipe, StageName, shape
from rlhf.recipe.folders import no_section
from rlhf.recipe.stages import PRETRAIN, SFT, STAGES, TRAINING_STAGES
from rlhf.terminal.progress import working


@click.command(cls=StrictCommand)
@chooses_recipe(data="Project the hours of training on this file. May be repeated.", changes=SET_HELP)
@click.option("--stage", type=OneOf([s for s in STAGES if s != PRETRAIN]), help="Plan only this stage.")
@click.option(
    "--fit",
    callback=memory_limit,
    metavar="12GB|card",
    help="Search for the fastest settings that need at most this memory, or the memory of the recipe's card; on a CPU, "
    "what is free.",
)
@click.option("--fastest", is_flag=True, help="Search as --fit card does.")
@click.option(
    "--strategies",
    "by_strategy",
    is_flag=True,
    help="Show what each way to save memory changes, beside published effects.",
)
@click.option("--published", is_flag=True, help="Show every published figure beside its prediction.")
@PRICE
@click.option(
    "--buy",
    type=Number(min=0, min_open=True),
    metavar="USD",
    help="Price of buying one card; with --price, says after how much use buying costs less. [default: the guide's]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def plan(
    choice: Choice,
    stage: StageName | None,
    price: float | None,
    buy: float | None,
    fit: int | Literal["card"] | None,
    fastest: bool,
    by_strategy: bool,
    published: bool,
    as_json: bool,
) -> None:
    """Predict memory, time and cost of a recipe without a GPU.

    Nothing is started. The exit code is 1 if the recipe does not fit its card, or on a CPU this machine.
    """
    if fastest and fit is not None:
        raise click.UsageError("--fastest is --fit card: give one of the two")
    modes = {"--fit": fit is not None, "--fastest": fastest, "--strategies": by_strategy, "--published": published}
    chosen = [name for name, is_chosen in modes.items() if is_chosen]
    if len(chosen) > 1:
        raise click.UsageError(f"{' and '.join(chosen)} answer different questions: ask one at a time")
    if price is not None and by_strategy:
        raise click.UsageError("--price goes with the plan, and with settings that fit, not with --strategies")
    if buy is not None and (price is None or chosen):
        raise click.UsageError("--buy goes with --price, of an hour of a rented card, and with the plan itself")
    loaded = choice.load()
    if warning := shape.check(loaded):
        terminal.say(warning)
    stages = predicted_stages(loaded.recipe)
    if stage and stage not in stages:
        raise UserError(no_section(stage, loaded))
    planned = [stage] if stage else stages
    if fit is not None or fastest:
        limit = fit if isinstance(fit, int) else round(USABLE * planning.card_bytes(loaded))
        _show_fits(loaded, planned, limit, price, as_json)
    elif by_strategy:
        _show_strategies(loaded, planned, as_json)
    elif published:
        _show_published(loaded, stage, price, as_json)
    else:
        _show_plan(loaded, planned, price, as_json, break_even(loaded, price, buy))


def _show_fits(
    loaded: PinnedRecipe, stages: Sequence[StageName], limit: int, price: float | None, as_json: bool
) -> None:
    """Search for the fastest settings with which the stages need at most `limit` bytes, and print them."""
    on_card = [stage for stage in stages if stage not in ON_HOST]
    if not on_card:
        raise click.UsageError(f"{stages[0]} uses the host's memory and none of the card's: there is nothing to fit")
    refuse_less_than_the_base(loaded, on_card, limit)
    with Predictor() as predictor, working("looking for settings that fit") as say:
        fits = fitting(predictor.predict, loaded, on_card, limit, say)
        timed = not fits.too_large and (price is not None or not as_json)
        hours = planning.hours_before_and_after(predictor, loaded, fits) if timed else None
    if price is not None and hours is None and not fits.too_large:
        terminal.say("no cost: `rlhf plan` without --fit says why the hours are unknown")
    tables.show_fits(loaded, fits, limit, as_json, hours, price)


def _show_strategies(loaded: PinnedRecipe, stages: Sequence[StageName], as_json: bool) -> None:
    """Print the effect of each way to save memory on the stages that train."""
    learning = [stage for stage in stages if stage in TRAINING_STAGES]
    if not learning:
        raise click.UsageError(f"--strategies compares what training needs; {stages[0]} does not train")
    with Predictor() as predictor, working("rehearsing each strategy") as say:
        costs = {stage: strategies.costs_alone(predictor.predict, loaded, stage, say) for stage in learning}
    tables.show_strategies(loaded, costs, as_json)


def _show_published(loaded: PinnedRecipe, stage: StageName | None, price: float | None, as_json: bool) -> None:
    """Print the published figures of a stage, or of all, beside their predictions."""
    figures = tuple(figure for figure in loaded.figures if stage in (None, figure.stage))
    effects = loaded.recipe.sft and any((figure.metric or "").startswith("effect.") for figure in figures)
    with Predictor() as predictor, working("rehearsing the stages") as say:
        made = planning.make_plan(predictor, loaded, predicted_stages(loaded.recipe), price, say)
        costs = strategies.costs_alone(predictor.predict, loaded, SFT, say) if effects else {}
    rows = published_figures.compare(loaded._replace(figures=figures), made, costs)
    tables.show_published(loaded, rows, as_json)
    if not as_json:
        root = loaded.directory.resolve().parents[1]
        side_by_side.show(side_by_side.lines(root, root.parent / "results", loaded.name))


def _show_plan(
    loaded: PinnedRecipe,
    stages: Sequence[StageName],
    price: float | None,
    as_json: bool,
    buying: BreakEven | None,
) -> None:
    """Print the plan. Raises UserError if a stage does not fit the card."""
    with Predictor() as predictor, working("rehearsing the stages") as say:
        made = planning.make_plan(predictor, loaded, stages, price, say)
    tables.show(made, as_json, buying)
    if any(planned.fits is False for planned in made.stages.values()):
        what = "this machine" if made.free_bytes is not None else "its card"
        raise UserError(f"the recipe does not fit {what}: --fastest looks for settings that do")
