"""`rlhf compare`: two runs on the same held-out prompts."""

import json
from pathlib import Path

import click

from rlhf.cli.options import OneOf, StrictCommand, existing_files, run_directory
from rlhf.commands import compare
from rlhf.commands.compare import COMPARED_POLICIES


@click.command("compare", cls=StrictCommand)
@click.argument("a", type=click.Path(path_type=Path), callback=run_directory)
@click.argument("b", type=click.Path(path_type=Path), callback=run_directory)
@click.option(
    "--stage",
    default="ppo",
    show_default=True,
    type=OneOf(COMPARED_POLICIES),
    help="Policy to compare: of A, and of B too unless --stage-b is given.",
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
    a: Path,
    b: Path,
    stage: compare.PolicyLabel,
    stage_b: compare.PolicyLabel | None,
    scored: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Compare two runs on the same held-out prompts.

    A and B are run directories, <out>/<recipe>/<version>, with a finished evaluation.
    """
    if len(scored) not in (0, 2):
        raise click.BadParameter("give it twice, first for A and then for B", param_hint="--scored")
    files = scored or (None, None)
    result = compare.compare_runs(compare.load(a, stage, files[0]), compare.load(b, stage_b or stage, files[1]))
    if as_json:
        click.echo(json.dumps(result.as_json(), indent=2))
    else:
        compare.show(result)
