"""`rlhf chat`: talk with a trained model in the terminal."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress

import click

from rlhf.cli.choice import RUN, TEMPERATURE, Choice, chooses_recipe
from rlhf.data.rows import Message
from rlhf.process.libraries import quiet_libraries
from rlhf.recipe.stages import EVALUATE
from rlhf.rollout import speaker as chatting
from rlhf.run.directory import StageRun
from rlhf.terminal import screen
from rlhf.terminal.progress import working

HELP = "/new forgets the conversation, /quit (or Ctrl-D) ends it"


@click.command()
@RUN
@chooses_recipe
@TEMPERATURE
def chat(choice: Choice, temperature: float | None) -> None:
    """Talk with a trained model in the terminal.

    It is that of the stage whose folder RUN is, or the recipe's first policy. --set evaluate.response_length=N allows
    longer answers.
    """
    loaded = choice.load(on_device=True)
    stage = chatting.stage_of(choice.run, loaded.recipe)
    options = loaded.recipe.evaluate
    run = StageRun(choice.root, loaded, EVALUATE)  # sampling is that of evaluation
    with quiet_libraries():
        with working(f"loading {stage}"):
            speaker = chatting.Speaker(run, stage)
        if temperature is None:
            temperature = options.temperature
        if sys.stdin.isatty():
            about = f"{stage} of {loaded.name} {loaded.version}, temperature {temperature:g}; {HELP}"
            screen.OUT.print(about, style="dim")
        talk(speaker, _lines(), temperature, options.response_length)


def talk(speaker: chatting.Speaker, lines: Iterable[str], temperature: float, tokens: int) -> None:
    """Answer each line of `lines` on stdout, as one conversation."""
    messages: list[Message] = []
    for line in lines:
        text = line.strip()
        if text == "/quit":
            return
        if text == "/new":
            messages = []
        if text in ("", "/new"):
            continue
        messages.append(Message("user", text))
        answer = speaker.answer(messages, temperature, tokens, lambda piece: print(piece, end="", flush=True))
        print()
        messages.append(Message("assistant", answer))


def _lines() -> Iterator[str]:
    """Yield lines from the keyboard, where arrow keys edit them, or from a pipe."""
    prompt = "you: " if sys.stdin.isatty() else ""
    if prompt:
        import readline  # noqa: F401
    with suppress(EOFError):
        while True:
            yield input(prompt)
    if prompt:
        print()
