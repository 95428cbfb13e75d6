"""`rlhf score`: score answers with a run's reward model."""

from collections.abc import Sequence
from pathlib import Path

import click

from rlhf.cli.choice import Choice
from rlhf.cli.options import FILE, OUTPUT, refuse_inputs
from rlhf.cli.recipe_options import RUN_HELP, chooses_recipe
from rlhf.data.parsing import parse_prompt
from rlhf.evaluation import score as scoring
from rlhf.process.libraries import quiet_libraries
from rlhf.terminal import counted, excerpt, harmless, screen, wording
from rlhf.terminal.progress import working
from rlhf.terminal.tables import rows_table

TABLE_ROWS = 20  # rows of the table
SHORT = 60  # characters of a text in the table


@click.command()
@click.argument("files", nargs=-1, metavar="[RUN] [FILES]...", type=FILE)
@chooses_recipe(**RUN_HELP, out=True, on_device=True)
@click.option("--prompt", metavar="TEXT", help="Score answers to this prompt instead of FILES.")
@click.option("--response", "responses", multiple=True, help="Answer to --prompt. May be repeated.")
@click.option("--to", type=OUTPUT, metavar="FILE", help="JSON lines file to write the scores to.")
def score(
    choice: Choice,
    files: tuple[Path, ...],
    out: Path,
    prompt: str | None,
    responses: tuple[str, ...],
    to: Path | None,
) -> None:
    """Score answers with a run's reward model.

    RUN is a run directory, <out>/<recipe>/<version>, or a stage's folder in it, and has all settings. Without it, name
    the recipe and its changes as for the run. FILES have pairs, or prompts with responses, or are
    samples.jsonl of a run.
    """
    if files and prompt is not None:
        raise click.UsageError("FILES, or --prompt with --response, and not both: leave one out")
    if bool(files) == (prompt is not None) or bool(responses) != (prompt is not None):
        raise click.UsageError("name FILES to score, or one --prompt with at least one --response")
    if to:
        refuse_inputs(to, files)
    items = scoring.read(files)
    if prompt is not None:
        asked = parse_prompt(prompt, "--prompt")
        items = [scoring.Item("", asked, {"response": response}, {}) for response in responses]
    stages = scoring.finished_stages(choice.load(), out)
    with quiet_libraries():
        with working("scoring"):
            model = scoring.RewardModel(stages)
            scored, cut = model.score(items)
        _show(scored)
        _show_cut(cut, sum(score is None for row in scored for score in row.scores.values()))
        if to:
            scoring.write(scored, model.digest, to)


def _show(scored: Sequence[scoring.ScoredItem]) -> None:
    """Print the first rows and the summary as tables."""
    names = list(dict.fromkeys(name for row in scored for name in row.scores))
    paired = any(row.margin is not None for row in scored)
    single = names == ["response"]
    columns = ["prompt", *(["answer"] if single else []), *(["score"] if single else names)]
    rows = []
    for row in scored[:TABLE_ROWS]:
        cells = [_excerpt(row.item.prompt[-1].content), *([_excerpt(row.item.answers["response"])] if single else [])]
        cells += [wording.number(row.scores.get(name)) for name in names]
        rows.append([*cells, *([wording.number(row.margin)] if paired else [])])
    title = f"scores of {counted(len(scored), 'row')}" + (
        f", the first {TABLE_ROWS}" if len(scored) > TABLE_ROWS else ""
    )
    rows_table(title, [*columns, *(["margin"] if paired else [])], rows)
    totals = scoring.summary(scored)
    if len(scored) > 1:
        table = [(name, *map(wording.number, figures)) for name, figures in totals.scores.items()]
        rows_table("all scores", ("", "answers", "mean", "sd", "lowest", "highest"), table, numbers=True)
    if totals.accuracy is not None:
        value, low, high = totals.accuracy
        screen.OUT.print(
            f"the chosen answer scores higher in {value:.1%} of {totals.pairs:,} pairs (95 %: {100 * low:.1f} to "
            f"{100 * high:.1f}), by {totals.margin:.4g} on average"
        )


def _show_cut(cut: dict[str, int], not_scored: int) -> None:
    """Print how many texts the limits of lengths cut."""
    notes = {"prompts were cut": cut["prompts_cut"], "responses were cut": cut["responses_cut"]}
    notes["answers were cut away whole and have no score"] = not_scored
    for description, count in notes.items():
        if count:
            screen.OUT.print(f"{count:,} {description} (rm.max_prompt_length, rm.max_length)")


def _excerpt(text: str) -> str:
    """Return a text as one line of the table."""
    return excerpt(harmless(text), SHORT)
