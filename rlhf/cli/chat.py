"""`rlhf chat`: talk with a trained model in the terminal."""

import importlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import click

from rlhf.cli.choice import Choice
from rlhf.cli.options import ANSWER_TEMPERATURE, ANSWER_TOKENS
from rlhf.cli.recipe_options import RUN, RUN_HELP, chooses_recipe
from rlhf.data.rows import Message
from rlhf.errors import OptionError
from rlhf.process.libraries import quiet_libraries
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.stages import EVALUATE
from rlhf.rollout import speaker as chatting
from rlhf.run.directory import StageRun
from rlhf.terminal import screen
from rlhf.terminal.progress import working

HELP = "/new forgets the conversation, /quit (or Ctrl-D) ends it, /help says this again"


@click.command()
@RUN
@chooses_recipe(**RUN_HELP, out=True, on_device=True)
@click.option(
    "--stage",
    show_default="the recipe's first policy",
    type=click.Choice(chatting.CHAT_STAGES),
    help="Stage whose model to load.",
)
@ANSWER_TEMPERATURE
@ANSWER_TOKENS
def chat(
    choice: Choice, out: Path, stage: chatting.ChatStage | None, temperature: float | None, tokens: int | None
) -> None:
    """Talk with a trained model in the terminal.

    RUN is a run directory, <out>/<recipe>/<version>, or a stage's folder in it, and has all settings. Without it, name
    the recipe and its changes as for the run.
    """
    loaded = choice.load()
    named = chatting.stage_of(choice.run)
    if choice.run and choice.run.stage and not (stage or named):
        raise OptionError(f"{choice.run}: {choice.run.stage} makes no answers; name another stage's folder, or --stage")
    stage = stage or named or chatting.first_policy(loaded.recipe)
    options = loaded.recipe.evaluate
    run = StageRun(out, loaded, EVALUATE)  # sampling is that of evaluation
    folder = chatting.trained_stage(run, stage)
    with quiet_libraries():
        with working(f"loading {stage}"):
            speaker = chatting.Speaker(run, stage, folder)
        chosen_temperature = options.temperature if temperature is None else temperature
        if sys.stdin.isatty():
            screen.OUT.print(greeting(loaded, stage, chosen_temperature), style="dim")
        talk(speaker, input_lines(), chosen_temperature, tokens or options.response_length)


def greeting(loaded: PinnedRecipe, stage: str, temperature: float) -> str:
    """Return the line before a conversation: the stage and recipe that answer, the temperature, the commands."""
    return f"{stage} of {loaded.name} {loaded.version}, temperature {temperature:g}; {HELP}"


def talk(speaker: chatting.Speaker, lines: Iterable[str], temperature: float, tokens: int) -> None:
    """Answer each line of `lines` on stdout, as one conversation."""
    messages: list[Message] = []
    for line in lines:
        text = line.strip()
        if text == "/quit":
            return
        if text == "/new":
            messages = []
        elif text.startswith("/"):
            print(HELP if text == "/help" else f"there is no {text.split()[0]}: {HELP}")
        if not text or text.startswith("/"):
            continue
        messages.append(Message("user", text))
        answer = ""
        for piece in speaker.answer(messages, temperature, tokens):
            print(piece if answer else piece.lstrip(), end="", flush=True)
            answer += piece if answer else piece.lstrip()  # a transcript puts a space before an answer
        print()
        messages.append(Message("assistant", answer.strip()))


def input_lines() -> Iterator[str]:
    """Yield lines from the keyboard, or from a pipe."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.encode("utf-8", "replace").decode("utf-8")  # bytes that are not UTF-8 arrive as surrogates
        return
    with suppress(ImportError):
        importlib.import_module("readline")  # arrow keys then edit the line and recall earlier ones
    while True:
        try:
            yield input("you: ")
        except EOFError:
            print()
            return
