"""`python -m bench.roofline RECIPE`: the least time of a step on a recipe's card, and what changes would gain.

bench/roofline/counts.py counts operations and bytes; peakmem/cards.py has the cards' published rates. The
larger of the two quotients is an estimate of the least time: at nominal rates, and if every tensor between two products
goes through memory. Predicted; nothing here is measured.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import click

from bench import options
from peakmem.cards import CARDS, Rates, rates_of
from rlhf import recipe as recipes
from rlhf.cli import guarded
from rlhf.cli.options import OneOf
from rlhf.errors import UserError
from rlhf.plan.padding import row_tokens
from rlhf.process.libraries import quiet_libraries
from rlhf.recipe import ONLINE, Changes, OnlineName, PinnedRecipe, Recipe
from rlhf.terminal.screen import OUT
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import gb

with quiet_libraries():
    from bench.roofline.counts import phases
    from bench.roofline.times import bound, seconds

ON_LEAN: Changes = {"hardware.trunk": "lean", "lora.lora_dropout": 0.0}
KEPT: Changes = {"{stage}.gradient_checkpointing": False}
FROM_SAMPLING: Changes = {"{stage}.old_logprobs": "rollout", "{stage}.rollout_weights": "adapter"}
CHANGES: dict[str, Changes] = {  # recipe keys; {stage} is the stage
    "old log-probabilities from sampling": FROM_SAMPLING,
    "no gradient checkpointing": KEPT,
    "lean trunk": ON_LEAN,
    "lean trunk, no gradient checkpointing": ON_LEAN | KEPT,
    "lean trunk, no gradient checkpointing, adapters in the upper half": ON_LEAN | KEPT | {"lora.layers": "upper_half"},
    "the same, old log-probabilities from sampling": ON_LEAN | KEPT | {"lora.layers": "upper_half"} | FROM_SAMPLING,
    "merged weights for sampling": {"{stage}.rollout_weights": "merged", "{stage}.old_logprobs": "recompute"},
    "4-bit products in row groups": {"{stage}.rollout_4bit": "row_groups"},
    "16-bit copy of a 4-bit base for sampling": {"{stage}.rollout_4bit": "unpacked"},
}


class CardRates(TypedDict):
    """A card's published rates."""

    name: str
    flops: float  # operations per second
    bandwidth: float  # bytes per second
    source: str  # where they stand
    link: float | None  # bytes per second from other cards; None for one card


class PhaseWork(TypedDict):
    """What a phase computes and moves at least, what bounds it, and its least seconds."""

    flops: float
    bytes: float
    bound: str  # compute or memory
    seconds: float


class Change(TypedDict):
    """The least seconds of a step with one change, and how many times as fast that is."""

    seconds: float
    factor: float


class Roofline(TypedDict):
    """What is predicted for a step of a recipe's stage; --json prints it. Nothing in it is measured."""

    recipe: str
    stage: OnlineName
    card: CardRates
    prompt_tokens: float  # the mean
    response_tokens: int
    phases: dict[str, PhaseWork]
    seconds: float
    changes: dict[str, Change]


def predict(loaded: PinnedRecipe, stage: OnlineName) -> Roofline:
    """Return work, bound and seconds of each phase, and the seconds with each change. Raises UserError.

    Prompts have the mean length of those in the recipe's data, or the longest where that is not known.
    """
    recipe = loaded.recipe
    options = recipe.online().get(stage)
    if options is None:
        raise UserError(f"{loaded.directory}: the recipe has no section {stage}")
    card = rates_of(recipe.hardware.name)
    if card is None or recipe.hardware.count > 1:
        known = ", ".join(name for name, card in CARDS.items() if card.rates and card.rates.link is None)
        raise UserError(f"{loaded.directory}: the roofline knows recipes for one card: {known}")
    prompt = row_tokens(recipe, stage, 1) - options.response_length
    work = phases(recipe, stage, prompt)
    now = seconds(work, card)
    return {
        "recipe": f"{loaded.name} {loaded.version}",
        "stage": stage,
        "card": {
            "name": recipe.hardware.name,
            "flops": card.flops,
            "bandwidth": card.bandwidth,
            "source": card.source,
            "link": card.link,
        },
        "prompt_tokens": prompt,
        "response_tokens": options.response_length,
        "phases": {
            name: {"flops": p.flops, "bytes": p.moved, "bound": bound(p, card), "seconds": p.seconds(card)}
            for name, p in work.items()
        },
        "seconds": now,
        "changes": gains(recipe, stage, prompt, card),
    }


def gains(recipe: Recipe, stage: OnlineName, prompt: float, card: Rates) -> dict[str, Change]:
    """Return the least seconds of a step with each of CHANGES that applies, and how many times as fast that is."""
    now = seconds(phases(recipe, stage, prompt), card)
    changes: dict[str, Change] = {}
    for name, keys in CHANGES.items():
        keys = {key.format(stage=stage): value for key, value in keys.items()}
        if any(key.endswith(".rollout_4bit") for key in keys) and recipe.model.quantization == "none":
            continue
        least = seconds(phases(changed(recipe, keys), stage, prompt), card)
        changes[name] = {"seconds": least, "factor": now / least}
    if recipe.online()[stage].samples_per_prompt > 1:
        lean = changed(recipe, {key.format(stage=stage): value for key, value in ON_LEAN.items()})
        apart, shared = (seconds(phases(lean, stage, prompt, once), card) for once in (False, True))
        name = "prompts once for a group, in the lean trunk"
        changes[name] = {"seconds": shared, "factor": apart / shared}
    return changes


def changed(recipe: Recipe, keys: Mapping[str, object]) -> Recipe:
    """Return a recipe with other values, unchecked."""
    for key, value in keys.items():
        section, name = key.split(".")
        part = getattr(recipe, section).model_copy(update={name: value})
        recipe = recipe.model_copy(update={section: part})
    return recipe


def show(row: Roofline) -> None:
    """Print the tables of a recipe."""
    card, total = row["card"], row["seconds"]
    rates = f"{card['flops'] / 1e12:.0f} TFLOP/s, {card['bandwidth'] / 1e12:.2f} TB/s"
    lines = [
        (
            phase,
            f"{part['flops'] / 1e12:.1f}",
            gb(part["bytes"], 1),
            part["bound"],
            f"{part['seconds']:.2f}",
            f"{part['seconds'] / total:.0%}",
        )
        for phase, part in row["phases"].items()
    ]
    lines.append(("all", "", "", "", f"{total:.2f}", ""))
    columns = ("phase", "TFLOP", "GB", "bound by", "s", "share")
    rows_table(f"{row['recipe']}, a step of {row['stage']}, predicted roofline seconds at {rates}", columns, lines)
    rows = [(name, f"{change['seconds']:.2f}", f"x {change['factor']:.2f}") for name, change in row["changes"].items()]
    rows_table("predicted, each change alone", ("change", "s", "as fast"), rows)


def markdown(rows: Sequence[Roofline]) -> str:
    """Return the two tables of several recipes side by side, as docs/internals.md shows them."""
    names = [row["recipe"] for row in rows]
    head = ["| phase | " + " | ".join(names) + " |", "|---|" + "---:|" * len(rows)]
    for phase in _union([row["phases"] for row in rows]):
        parts = [row["phases"].get(phase) for row in rows]
        head.append(f"| {phase} | {' | '.join('–' if part is None else _cell(part) for part in parts)} |")
    totals = (f"**{row['seconds']:.2f} s**" for row in rows)
    head.append(f"| **all** | {' | '.join(totals)} |")
    gains = ["| change | " + " | ".join(names) + " |", "|---|" + "---:|" * len(rows)]
    for name in _union([row["changes"] for row in rows]):
        changes = [row["changes"].get(name) for row in rows]
        cells = ("–" if c is None else f"x {c['factor']:.2f}" for c in changes)
        gains.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*head, "", *gains])


def _cell(part: PhaseWork) -> str:
    return f"{part['flops'] / 1e12:.0f}, {gb(part['bytes'], 0)}: {part['seconds']:.2f} s, {part['bound']}"


def _union(tables: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the keys of several tables in their order."""
    return list(dict.fromkeys(key for table in sorted(tables, key=len, reverse=True) for key in table))


@options.command()
@click.argument("directories", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RECIPE...")
@click.option("--stage", type=OneOf(ONLINE), default="ppo", show_default=True)
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each recipe.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the tables of docs/internals.md.")
def main(
    directories: Sequence[Path], stage: OnlineName, changes: tuple[str, ...], as_json: bool, as_markdown: bool
) -> None:
    """Estimate the time of a step on a recipe's card by phase, and what changes would gain. Needs no GPU."""
    rows = [predict(recipes.load(folder, recipes.parse_overrides(changes)), stage) for folder in directories]
    if as_markdown:
        print(markdown(rows))
        return
    for row in rows:
        if as_json:
            OUT.print_json(json.dumps(row))
        else:
            show(row)


if __name__ == "__main__":
    guarded(main)
