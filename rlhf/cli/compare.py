"""`rlhf compare`: runs on the held-out prompts that they share."""

import sys
from pathlib import Path

import click

from rlhf.cli.choice import PATH
from rlhf.cli.outcome import COLOURS, show_table
from rlhf.evaluation import compare
from rlhf.evaluation.compare import PolicyComparison
from rlhf.process.task import run_child, task_of
from rlhf.recipe.folders import default_root
from rlhf.recipe.stages import EVALUATE, LABELS, PolicyLabel
from rlhf.report import comparison
from rlhf.run.named import NamedRun, named_run, recipe_of
from rlhf.terminal import screen


@click.command("compare")
@click.argument("paths", nargs=-1, metavar="RUNS...", type=PATH)
def compare_runs(paths: tuple[Path, ...]) -> None:
    """Compare runs A B … on the held-out prompts that they share, and write a page into the last one.

    A policy's folder, such as <run>/dpo, names it; of a run the first that was trained is compared. Runs of one
    recipe with several seeds count as one side. What was not evaluated yet is evaluated; nothing is trained.
    """
    if len(paths) < 2:
        raise click.UsageError("name two runs or more (make: A=RUN B=RUN)")
    runs = [named_run(path) for path in paths]
    policy = _policy(runs[0])
    evaluations = []
    for run in runs:
        wanted = _policy(run) or policy
        _evaluate(run, wanted)
        evaluations.append(compare.load(run.directory, wanted))
        policy = policy or evaluations[0].policy
    first, *others = compare.sides_of(evaluations)
    found = [(first, other, compare.compare_runs(first, other)) for other in others]
    for _, _, one in found:
        _show(one)
    page = runs[-1].directory / comparison.PAGE
    comparison.write(found, page)
    screen.OUT.print(f"page: {page}", soft_wrap=True)


def _policy(run: NamedRun) -> PolicyLabel | None:
    """Return the policy whose folder was named, if one was."""
    return next((policy for policy in LABELS if policy == run.stage), None)


def _evaluate(run: NamedRun, policy: PolicyLabel | None) -> None:
    """Evaluate a run unless its evaluation has seen this policy. Exits with the exit code of one that fails."""
    policies = compare.policies_to_evaluate(run.directory, policy)
    if policies is None:
        return
    screen.OUT.print(f"{run.directory}: evaluating {', '.join(policies)}")
    loaded = recipe_of(NamedRun(run.directory, None), default_root())
    if code := run_child(task_of(loaded, EVALUATE, run.out, only=policies)):
        sys.exit(code)


def _show(found: PolicyComparison) -> None:
    """Print a comparison: as a table, and in words."""
    show_table(f"A: {found.a}\nB: {found.b}", comparison.figures(found))
    for text, kind in found.sentences():
        screen.OUT.print(text, style=COLOURS.get(kind, ""))
    if found.other_prompts:
        screen.OUT.print(f"{found.other_prompts:,} prompts that only one side answered are left out", style="dim")
    screen.OUT.print(f"settings that differ: {', '.join(found.settings) or 'none'}", style="dim")
