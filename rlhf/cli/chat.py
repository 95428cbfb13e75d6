"""`rlhf chat`: talk with a trained model in the terminal."""

import sys
from pathlib import Path

import click

from rlhf.cli.choice import Choice
from rlhf.cli.options import OneOf, StrictCommand, WholeNumber, ZeroOrMore
from rlhf.cli.recipe_options import RUN_HELP, chooses_recipe
from rlhf.cli.run_argument import RUN
from rlhf.commands import chat as chatting
from rlhf.process.libraries import quiet_libraries
from rlhf.recipe import EVALUATE
from rlhf.run.directory import StageRun
from rlhf.terminal import screen
from rlhf.terminal.progress import working


@click.command(cls=StrictCommand)
@RUN
@chooses_recipe(**RUN_HELP, out=True)
@click.option(
    "--stage",
    show_default="the recipe's first policy",
    type=OneOf(chatting.CHAT_STAGES),
    help="Stage whose model to load.",
)
@click.option(
    "--temperature",
    type=ZeroOrMore(min=0.01, max=100),
    metavar="T",
    show_default="the recipe's",
    help="Temperature of sampling; 0 takes the likeliest token.",
)
@click.option(
    "--tokens",
    type=WholeNumber(min=1),
    metavar="N",
    show_default="the recipe's",
    help="Longest answer, in tokens.",
)
def chat(
    choice: Choice, out: Path, stage: chatting.ChatStage | None, temperature: float | None, tokens: int | None
) -> None:
    """Talk with a trained model in the terminal.

    RUN is a run directory, <out>/<recipe>/<version>, or a stage's folder in it, and has all settings. Without it, name
    the recipe and its changes as for the run.
    """
    loaded = choice.load()
    stage = stage or chatting.stage_of(choice.run) or chatting.first_policy(loaded.recipe)
    options = loaded.recipe.evaluate
    run = StageRun(out, loaded, EVALUATE)  # sampling is that of evaluation
    folder = chatting.trained_stage(run, stage)
    with quiet_libraries():
        with working(f"loading {stage}"):
            speaker = chatting.Speaker(run, stage, folder)
        chosen_temperature = options.temperature if temperature is None else temperature
        if sys.stdin.isatty():
            screen.OUT.print(chatting.greeting(loaded, stage, chosen_temperature), style="dim")
        chatting.talk(speaker, chatting.input_lines(), chosen_temperature, tokens or options.response_length)
