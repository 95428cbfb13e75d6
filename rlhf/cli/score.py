"""`rlhf score`: score answers with a run's reward model."""

from pathlib import Path

import click

from rlhf.cli.choice import Choice
from rlhf.cli.missing import naming_the_run
from rlhf.cli.options import OUTPUT, StrictCommand, existing_files, refuse_inputs
from rlhf.cli.recipe_options import RUN_HELP, chooses_recipe
from rlhf.commands import score as scoring
from rlhf.commands import score_items
from rlhf.process.libraries import quiet_libraries


@click.command(cls=StrictCommand)
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), callback=existing_files)
@chooses_recipe(**RUN_HELP, out=True)
@click.option("--prompt", metavar="TEXT", help="Score answers to this prompt instead of FILES.")
@click.option("--response", "responses", multiple=True, help="Answer to --prompt. May be repeated.")
@click.option("--to", type=OUTPUT, metavar="FILE", help="JSON lines file to write the scores to.")
def score(
    choice: Choice, files: tuple[Path, ...], out: Path, prompt: str | None, responses: tuple[str, ...], to: Path | None
) -> None:
    """Score answers with a run's reward model.

    FILES have pairs, or prompts with responses, or are samples.jsonl of a run.
    """
    if files and prompt is not None:
        raise click.UsageError("FILES, or --prompt with --response, and not both: leave one out")
    if bool(files) == (prompt is not None) or bool(responses) != (prompt is not None):
        raise click.UsageError("name FILES to score, or one --prompt with at least one --response")
    if to:
        refuse_inputs(to, files)
    items = score_items.read(files) if prompt is None else score_items.command_line_items(prompt, responses)
    with naming_the_run("score", "rm"):
        stages = scoring.finished_stages(choice.load(), out)
    with quiet_libraries():
        scoring.run(stages, items, to)
