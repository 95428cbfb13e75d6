"""`rlhf score`: score answers with a run's reward model."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import click

from rlhf.cli.choice import TO, Choice, chooses_recipe
from rlhf.data.parsing import parse_prompt
from rlhf.evaluation import score as scoring
from rlhf.process.libraries import quiet_libraries
from rlhf.recipe.stages import EVALUATE
from rlhf.run.directory import StageRun
from rlhf.run.named import is_run, named_run
from rlhf.terminal import counted, excerpt, screen, wording
from rlhf.terminal.progress import working
from rlhf.terminal.tables import rows_table

SHOWN = 20  # rows of the table
SHORT = 120  # characters of a prompt in the table


@click.command()
@click.argument("files", nargs=-1, metavar="[RUN] [FILES]...", type=click.Path(exists=True))
@chooses_recipe
@click.option("--prompt", metavar="TEXT", help="Score answers to this prompt instead of FILES.")
@click.option("--response", "responses", multiple=True, help="Answer to --prompt. May be repeated.")
@TO
def score(
    choice: Choice, files: tuple[str, ...], prompt: str | None, responses: tuple[str, ...], to: Path | None
) -> None:
    """Score answers with a run's reward model.

    FILES are data files with pairs, or prompts with completions.
    """
    if files and is_run(Path(files[0])):
        choice, files = replace(choice, run=named_run(Path(files[0]))), files[1:]
    if bool(files) == bool(prompt) or bool(responses) != bool(prompt):
        raise click.UsageError("name FILES to score, or one --prompt with at least one --response, and not both")
    if prompt:
        asked = parse_prompt(prompt, "--prompt")
        items = [scoring.Item("", asked, {"response": response}) for response in responses]
    else:
        items = scoring.read(files)
    run = StageRun(choice.root, choice.load(on_device=True), EVALUATE)
    with quiet_libraries():
        with working("scoring"):
            model = scoring.RewardModel(run)
            scored, cut = model.score(items)
        _show(scored)
        for what, count in cut.items():
            if count and what in ("prompts_cut", "responses_cut", "dropped"):
                screen.OUT.print(f"{count:,} {what.replace('_', ' ')} (rm.max_prompt_length, rm.max_length)")
        if to:
            scoring.write(scored, model.digest, to)


def _show(scored: Sequence[scoring.ScoredItem]) -> None:
    """Print the first rows and the summary as tables."""
    names = list(dict.fromkeys(name for row in scored for name in row.scores))
    rows = [
        (excerpt(row.item.prompt[-1].content, SHORT), *(wording.number(row.scores.get(name)) for name in names))
        for row in scored[:SHOWN]
    ]
    rows_table(f"scores of {counted(len(scored), 'row')}, the first {len(rows)}", ("prompt", *names), rows)
    margins = [row.margin for row in scored if row.margin is not None]
    if accuracy := scoring.accuracy(scored):
        value, low, high = accuracy
        screen.OUT.print(
            f"the chosen answer scores higher in {value:.1%} of {len(margins):,} pairs (95 %: {100 * low:.1f} to "
            f"{100 * high:.1f}), by {fmean(margins):.4g} on average"
        )
