"""`rlhf sample`: answers of a run's policies to prompts of one's own, side by side."""

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Group
from rich.rule import Rule
from rich.text import Text

from rlhf.cli.choice import Choice
from rlhf.cli.options import ANSWER_TEMPERATURE, ANSWER_TOKENS, FILE, OUTPUT, listed, refuse_inputs
from rlhf.cli.recipe_options import RUN, RUN_HELP, chooses_recipe
from rlhf.data import show
from rlhf.errors import OptionError
from rlhf.evaluation import own_prompts
from rlhf.files import json_lines, write_output
from rlhf.process.libraries import quiet_libraries
from rlhf.rating.pairs import turns
from rlhf.recipe.stages import EVALUATE, PolicyLabel
from rlhf.report.answers import write_answers
from rlhf.run.directory import StageRun
from rlhf.run.outcomes import SampleLine, by_prompt
from rlhf.terminal import counted, say, screen


def policies(context: click.Context, parameter: click.Parameter, typed: str) -> list[PolicyLabel]:
    """Return the policies that --stages lists, each once. Raises BadParameter for another word."""
    words = list(dict.fromkeys(listed(typed)))
    if unknown := [word for word in words if word not in own_prompts.LABELS]:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(own_prompts.LABELS)}")
    return [label for label in own_prompts.LABELS if label in words]


@click.command()
@RUN
@chooses_recipe(**RUN_HELP, out=True, on_device=True)
@click.option(
    "--prompts",
    required=True,
    type=FILE,
    metavar="FILE",
    help="Prompts: a .txt file with one on each line, or a data file, of whose rows the prompts are taken.",
)
@click.option(
    "--stages",
    default="",
    callback=policies,
    metavar="NAMES",
    help='Policies that answer, for example "base sft ppo". [default: base, SFT and every policy that was trained]',
)
@click.option(
    "--n",
    "count",
    default=1,
    type=click.IntRange(min=1),
    metavar="N",
    show_default=True,
    help="Answers of each policy to a prompt.",
)
@ANSWER_TEMPERATURE
@ANSWER_TOKENS
@click.option("--to", type=OUTPUT, metavar="FILE", help="JSON lines file to write the answers to.")
@click.option("--page", type=OUTPUT, metavar="FILE", help="HTML file to write the answers to, side by side.")
def sample(
    choice: Choice,
    out: Path,
    prompts: Path,
    stages: list[PolicyLabel],
    count: int,
    temperature: float | None,
    tokens: int | None,
    to: Path | None,
    page: Path | None,
) -> None:
    """Let a run's policies answer your own prompts, side by side.

    RUN is a run directory, <out>/<recipe>/<version>, or a stage's folder in it, and has all settings. Without it, name
    the recipe and its changes as for the run. Sampling is that of the recipe's evaluation, so the same prompts get the
    same answers again. Where a reward model is finished, answers have its score.
    """
    for file in filter(None, (to, page)):
        refuse_inputs(file, [prompts])
    if to is not None and page is not None and to.resolve() == page.resolve():
        raise OptionError("--to and --page name the same file; name another one")
    own = own_prompts.read(prompts)
    loaded = choice.load()
    run = StageRun(out, loaded, EVALUATE)  # sampling is that of evaluation
    labels = own_prompts.require(run, stages)
    with quiet_libraries():
        answers, cut = own_prompts.sample(run, labels, own, count, temperature, tokens)
    lines = [SampleLine.model_validate(row) for row in answers]
    title = f"{loaded.name} {loaded.version}: answers to {prompts.name}"
    _show(lines)
    if cut:
        limit = loaded.recipe.evaluate.max_prompt_length
        say(f"{counted(cut, 'prompt')} cut to the last {limit} tokens (evaluate.max_prompt_length)")
    if to is not None:
        rows = ({"step": 0, **row} for row in answers)  # as a stage logs its samples
        write_output(to, json_lines(rows))
        screen.OUT.print(f"{counted(len(lines), 'row')} written to {to}")
    if page is not None:
        write_answers(title, lines, page)
        screen.OUT.print(f"written to {page}")


def _cell(line: SampleLine, name: str) -> Text:
    """Return an answer, with its score below it where there is one."""
    answer = line.answers[name]
    text = show.visible(answer.response.strip())
    return text if answer.score is None else text.append(f"\nscore {answer.score:.3f}", "dim")


def _show(lines: Sequence[SampleLine]) -> None:
    """Print each prompt, and below it a column for each policy with its answers, one below the other."""
    for number, same in enumerate(by_prompt(lines).values(), 1):
        names = list(same[0].answers)
        rows = [[_cell(line, name) for name in names] for line in same]
        prompt = [show.visible(f"{speaker}: {text}") for speaker, text in turns(same[0].prompt, same[0].messages)]
        screen.OUT.print(Group(Rule(str(number), align="left", style="dim"), *prompt, show.side_by_side(names, rows)))
