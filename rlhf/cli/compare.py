"""`rlhf compare`: runs on the held-out prompts that they share."""

import json
import sys
from pathlib import Path

import click

from rlhf.cli.choice import recipes_root
from rlhf.cli.options import OUTPUT, run_or_stage
from rlhf.evaluation import compare
from rlhf.evaluation.compare import COMPARED_POLICIES, PolicyComparison, PolicyEvaluation
from rlhf.process.task import run_child, task_of
from rlhf.recipe.stages import EVALUATE, PolicyLabel
from rlhf.report import comparison
from rlhf.run.named import NamedRun, recipe_of
from rlhf.terminal import harmless, screen
from rlhf.terminal.tables import rows_table


def _runs(context: click.Context, parameter: click.Parameter, paths: tuple[Path, ...]) -> list[NamedRun]:
    """Return the runs, or the stages' folders in runs, that were named. Raises OptionError for one that is absent."""
    return [run_or_stage(context, parameter, path) for path in paths]


@click.command("compare")
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), callback=_runs)
@click.option(
    "--stage", type=click.Choice(COMPARED_POLICIES), help="Policy to compare. [default: the first trained one of A]"
)
@click.option(
    "--to", type=OUTPUT, metavar="FILE", help="HTML file to write. [default: comparison.html in the last run]"
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of words and tables, and write no page.")
def compare_runs(runs: list[NamedRun], stage: PolicyLabel | None, to: Path | None, as_json: bool) -> None:
    """Compare runs A B … on the held-out prompts that they share.

    RUNS are run directories, <out>/<recipe>/<version>, or a policy's folder in one, such as <run>/dpo. Runs of one
    recipe with several seeds count as one side. What was not evaluated yet is evaluated; nothing is trained.
    """
    if len(runs) < 2:
        raise click.UsageError("name two runs or more")
    policy = stage or _policy(runs[0])
    evaluations: list[PolicyEvaluation] = []
    for run in runs:
        _evaluate(run, wanted := (_policy(run) or policy))
        evaluations.append(compare.load(run.directory, wanted))
        policy = policy or evaluations[0].policy
    first, *others = compare.pooled(evaluations)
    found = [(first, other, compare.compare_runs(first, other)) for other in others]
    if as_json:
        click.echo(json.dumps([one.as_json() for _, _, one in found], indent=2))
        return
    for _, _, one in found:
        _show(one)
    file = to or runs[-1].directory / comparison.PAGE
    comparison.write(found, file)
    screen.OUT.print(f"page: {file}", soft_wrap=True)


def _policy(run: NamedRun) -> PolicyLabel | None:
    """Return the policy whose folder was named, if one was."""
    return next((policy for policy in COMPARED_POLICIES if policy == run.stage), None)


def _evaluate(run: NamedRun, policy: PolicyLabel | None) -> None:
    """Evaluate a run unless its evaluation has seen this policy. Exits with the exit code of one that fails."""
    policies = compare.policies_to_evaluate(run.directory, policy)
    if policies is None:
        return
    screen.OUT.print(f"{run.directory}: evaluating {', '.join(policies)}")
    loaded = recipe_of(NamedRun(run.directory, None), recipes_root())
    if code := run_child(task_of(loaded, EVALUATE, run.out, only=policies)):
        sys.exit(code)


def _show(found: PolicyComparison) -> None:
    """Print a comparison: in words, and as a table."""
    table = comparison.figures(found)
    title = f"A: {found.a}\nB: {found.b}"
    if table:
        rows_table(harmless(title), table.columns, [[cell.text for cell in row] for row in table.rows], numbers=True)
    for text, kind in found.sentences():
        screen.OUT.print(text, style={"good": "green", "bad": "red"}.get(kind, ""))
    if found.other_prompts:
        screen.OUT.print(f"{found.other_prompts:,} prompts that only one side answered are left out", style="dim")
    keys = ", ".join(found.settings) or "none"
    screen.OUT.print(f"settings that differ: {keys}", style="dim")
    if any(row.name == "score" and row.difference is None for row in found.rows):
        note = "scores are of two reward models, without a common unit: `rlhf score` both runs' samples with one"
        screen.OUT.print(note, style="dim")
