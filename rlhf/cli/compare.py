"""`rlhf compare`: two runs on the same held-out prompts."""

import json
from pathlib import Path

import click

from rlhf.cli.choice import tell_if_edited
from rlhf.cli.options import OneOf, StrictCommand, existing_files, run_or_stage
from rlhf.evaluation import compare
from rlhf.evaluation.compare import COMPARED_POLICIES
from rlhf.recipe.stages import PolicyLabel
from rlhf.run.evidence import IS_BETTER, IS_WORSE, NOT_KNOWN, way_to_know
from rlhf.run.named import NamedRun
from rlhf.terminal import harmless, screen, wording
from rlhf.terminal.tables import rows_table

KEYS_SHOWN = 6  # different settings that are printed


@click.command("compare", cls=StrictCommand)
@click.argument("a", type=click.Path(path_type=Path), callback=run_or_stage)
@click.argument("b", type=click.Path(path_type=Path), callback=run_or_stage)
@click.option(
    "--stage",
    type=OneOf(COMPARED_POLICIES),
    help="Policy to compare: of A, and of B too unless --stage-b is given. [default: that of a stage's folder, or the "
    "first trained one of A]",
)
@click.option("--stage-b", type=OneOf(COMPARED_POLICIES), help="Policy of B to compare. [default: that of --stage]")
@click.option(
    "--scored",
    multiple=True,
    type=click.Path(path_type=Path),
    callback=existing_files,
    metavar="FILE",
    help="File that `rlhf score` wrote. Given twice, for A and then for B.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def compare_runs(
    a: NamedRun,
    b: NamedRun,
    stage: PolicyLabel | None,
    stage_b: PolicyLabel | None,
    scored: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Compare two runs on the same held-out prompts.

    A and B are run directories, <out>/<recipe>/<version>, with a finished evaluation, or a policy's folder in one.
    """
    if len(scored) not in (0, 2):
        raise click.BadParameter("give it twice, first for A and then for B", param_hint="--scored")
    files = scored or (None, None)
    tell_if_edited((a.directory, b.directory))
    first = compare.load(a.directory, stage or _policy(a), files[0])
    second = compare.load(b.directory, stage_b or _policy(b) or first.policy, files[1])
    result = compare.compare_runs(first, second)
    if as_json:
        click.echo(json.dumps(result.as_json(), indent=2))
    else:
        _show(result)


def _policy(run: NamedRun) -> PolicyLabel | None:
    """Return the policy whose folder was named, if one was."""
    return next((policy for policy in COMPARED_POLICIES if policy == run.stage), None)


def _show(comparison: compare.PolicyComparison) -> None:
    """Print the comparison as a table, with the settings in which the two runs differ."""
    rows = []
    for row in comparison.rows:
        interval = f"{row.interval[0]:+.4g} to {row.interval[1]:+.4g}" if row.interval else ""
        difference = f"{row.difference:+.4g}" if row.difference is not None else ""
        verdict = f"B {row.verdict}" if row.verdict in (IS_BETTER, IS_WORSE) else row.verdict or ""
        rows.append((row.name, wording.number(row.a), wording.number(row.b), difference, interval, verdict))
    title = f"A: {comparison.a}\nB: {comparison.b}\n{comparison.prompts} held-out prompts"
    rows_table(harmless(title), ("", "A", "B", "B − A", "95 %", ""), rows, numbers=True)
    for row in comparison.rows[:1]:
        if row.verdict == NOT_KNOWN and row.difference:
            way = way_to_know(row.difference, row.interval, comparison.prompts)
            screen.OUT.print(f"{row.name}: {NOT_KNOWN} which is better; {way}")
    keys = comparison.settings_that_differ
    more = f" and {len(keys) - KEYS_SHOWN} more" if len(keys) > KEYS_SHOWN else ""
    message = f"settings that differ: {', '.join(keys[:KEYS_SHOWN])}{more}" if keys else "the settings are the same"
    screen.OUT.print(message, style="dim")
    if any(row.name == "score" and row.difference is None for row in comparison.rows):
        screen.OUT.print(
            "each run has scores of its own reward model, without a common unit: `rlhf score` both samples.jsonl "
            "with one of them, then give the two files with --scored",
            style="dim",
        )
