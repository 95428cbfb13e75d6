"""`rlhf sample`: answers of a run's policies to prompts of one's own."""

from pathlib import Path

import click

from rlhf.cli.choice import FILE, RUN, TEMPERATURE, TO, Choice, chooses_recipe
from rlhf.cli.outcome import show_sample
from rlhf.evaluation import own_prompts
from rlhf.files import json_lines, write_output
from rlhf.process.libraries import quiet_libraries
from rlhf.recipe.stages import EVALUATE, LABELS, PolicyLabel
from rlhf.run.directory import StageRun
from rlhf.run.records import SampleLine
from rlhf.terminal import counted, say


@click.command()
@RUN
@chooses_recipe
@click.option("--prompts", required=True, type=FILE, metavar="FILE", help="Text with a prompt a line, or a data file.")
@click.option("--stages", multiple=True, type=click.Choice(LABELS), help="Policy that answers. [default: all]")
@click.option("--n", "count", default=1, type=click.IntRange(min=1), help="Answers of each policy to a prompt.")
@TEMPERATURE
@TO
def sample(
    choice: Choice,
    prompts: Path,
    stages: tuple[PolicyLabel, ...],
    count: int,
    temperature: float | None,
    to: Path | None,
) -> None:
    """Let a run's policies answer your own prompts.

    Sampling is that of the recipe's evaluation, so the same prompts get the same answers again: --set
    evaluate.response_length=N allows longer ones. Where a reward model is finished, answers have its score.
    """
    own = own_prompts.read(prompts)
    loaded = choice.load(on_device=True)
    run = StageRun(choice.root, loaded, EVALUATE)  # sampling is that of evaluation
    with quiet_libraries():
        answers, cut = own_prompts.sample(run, stages, own, count, temperature)
    for row in answers:
        show_sample(SampleLine.model_validate(row))
    if cut:
        limit = loaded.recipe.evaluate.max_prompt_length
        say(f"{counted(cut, 'prompt')} cut to the last {limit} tokens (evaluate.max_prompt_length)")
    if to is not None:
        write_output(to, json_lines({"step": 0, **row} for row in answers))  # as a stage logs its samples
