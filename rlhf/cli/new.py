"""`rlhf new`: a recipe for a model and a card."""

import os
import shlex
from pathlib import Path
from typing import Any, get_args

import click

from rlhf.new import make as new_recipe
from rlhf.new.options import STAGES, NewOptions, Wanted, card_of
from rlhf.plan.predict import Predictor, card_needed_bytes
from rlhf.recipe import parse_overrides
from rlhf.recipe.stages import PolicyStart
from rlhf.terminal import screen
from rlhf.terminal.progress import working
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import gb

OWN = "my-recipes"  # a folder here, which git ignores: what is in recipes/ belongs to the project's indexes and tests


@click.command
@click.option(
    "--model",
    required=True,
    metavar="NAME|DIR|FILE.gguf",
    help="Model on the hub, folder of a checkpoint, or GGUF file.",
)
@click.option(
    "--card",
    required=True,
    metavar="24GB|4090|cpu",
    help="Memory of the card (24GB: 10^9 bytes; 24GiB: 2^30), or its name; cpu: this machine without a card.",
)
@click.option("--data", multiple=True, metavar="FILE", help="File of rows; or hh or ultrafeedback from the hub.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Key about the rows of --data.")
@click.option("--task", metavar="NAME", help="Task of reasoning-gym instead of --data; its verifier is the reward.")
@click.option(
    "--stages",
    multiple=True,
    type=click.Choice(STAGES),
    help="Stage that trains a policy. [default: ppo and dpo; with --task grpo]",
)
@click.option("--reward", "rewards", multiple=True, metavar="NAME", help="Function (docs/rewards.md), or model.")
@click.option(
    "--start",
    type=click.Choice(get_args(PolicyStart)),
    help="Where policies start. [default: base with --reward, otherwise sft]",
)
@click.option("--revision", metavar="COMMIT", help="Commit of the model on the hub. [default: the newest]")
@click.option("--max-length", type=click.IntRange(min=16), help="Tokens of the longest prompt and response together.")
@click.option("--name", help="Name of the recipe. [default: <card>-<model>, and -<task> with --task]")
def new(
    card: str,
    changes: tuple[str, ...],
    task: str | None,
    stages: tuple[Wanted, ...],
    rewards: tuple[str, ...],
    **others: Any,
) -> None:
    """Write a recipe for a model and a card: the nearest one, with your model and rows and settings that fit.

    It is written into my-recipes/ here, or the folder that RLHF_RECIPES names. From the hub only config.json and the
    tokenizer are downloaded. Settings need at most 93 % of the card, or of the memory that is free here, as predicted.
    --data, --set, --stages and --reward may be repeated.
    """
    chosen = card_of(card)
    options = NewOptions(
        card=chosen,
        stages=stages or (("grpo",) if task else ("ppo", "dpo")),
        rewards=rewards or (("reasoning_gym",) if task else ()),
        task=task,
        changes=parse_overrides(changes),
        **others,
    )
    with Predictor() as predictor, working("reading what the options name") as say:
        created = new_recipe.make(Path(os.environ.get("RLHF_RECIPES") or OWN), options, predictor, say)
    rows = [
        (stage, gb(predicted.whole.peak_bytes), gb(card_needed_bytes(predicted.whole)))
        for stage, predicted in created.fit.stages.items()
    ]
    title = f"{created.loaded.name} {created.loaded.version}: predicted, of {chosen.memory_gb:g} GB"
    if rows:
        rows_table(title, ("stage", "peak, GB", "needs, GB"), rows)
    else:
        screen.OUT.print("memory of this type of model is not predicted (docs/own-model.md): settings need little")
    recipe = f"--recipe {shlex.quote(str(created.folder))}"
    screen.OUT.print(f"written to {created.folder}; next:", soft_wrap=True)
    screen.OUT.print(f"  rlhf plan {recipe}", soft_wrap=True)
    screen.OUT.print(f"  rlhf run {options.stages[-1]} --with-parents {recipe}", soft_wrap=True)
