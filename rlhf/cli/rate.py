"""`rlhf ab` and `rlhf judge`: people and a model rate two policies' answers."""

from pathlib import Path

import click

from rlhf.cli.choice import Choice
from rlhf.cli.options import SEED
from rlhf.cli.recipe_options import pair_options
from rlhf.rating import judge as judging
from rlhf.rating import server
from rlhf.rating.pairs import PairedAnswers, pair_answers
from rlhf.rating.ratings import show_summary


@click.command("ab")
@pair_options
@click.option("--rater", metavar="NAME", default="", help="Name of the rater. [default: the page asks]")
@click.option("--seed", default=0, type=SEED, metavar="N", show_default=True, help="Seed of the order of two answers.")
@click.option(
    "--port",
    default=server.PORT,
    type=click.IntRange(0, 65535),
    metavar="N",
    show_default=True,
    help="Port of the page; 0 takes a free one.",
)
@click.option("--summary", is_flag=True, help="Print win rates so far, and serve no page.")
def rate(
    choice: Choice,
    out: Path,
    a: str | None,
    b: str | None,
    limit: int | None,
    rater: str,
    seed: int,
    port: int,
    summary: bool,
) -> None:
    """Rate answers of two policies blind, on a local page.

    RUN is a run directory, <out>/<recipe>/<version>; without it --hw or --recipe names the run. Only this machine can
    open the page.
    """
    if rater and not server.RATER.fullmatch(rater):
        raise click.BadParameter(f"{rater!r}: up to 40 letters, digits, . _ and -", param_hint="--rater")
    paired = _pairs(choice, out, a, b)
    if summary:
        show_summary(paired)
    else:
        server.serve(server.Server(paired, port, rater=rater, seed=seed, limit=limit))


@click.command()
@pair_options
@click.option(
    "--url",
    required=True,
    metavar="URL",
    help="Address of an OpenAI-compatible endpoint, up to /v1; its key is in OPENAI_API_KEY.",
)
@click.option("--model", required=True, metavar="NAME", help="Name of the model at the endpoint.")
@click.option(
    "--parallel",
    default=4,
    type=click.IntRange(1, 64),
    metavar="N",
    show_default=True,
    help="Number of pairs that are judged at once.",
)
def judge(
    choice: Choice,
    out: Path,
    a: str | None,
    b: str | None,
    limit: int | None,
    url: str,
    model: str,
    parallel: int,
) -> None:
    """Let a model rate answers of two policies, in both orders.

    RUN is a run directory, <out>/<recipe>/<version>; without it --hw or --recipe names the run. It rates the pairs that
    `rlhf ab` shows to people; a choice counts if it is the same in both orders.
    """
    paired = _pairs(choice, out, a, b)
    judging.run(paired, url, model, limit=limit, at_once=parallel)
    show_summary(paired)


def _pairs(choice: Choice, out: Path, a: str | None, b: str | None) -> PairedAnswers:
    """Return the pairs of two policies' answers in a run, or in that of the chosen recipe below the runs root `out`."""
    if choice.run is not None:
        return pair_answers(choice.run.directory, a, b)
    loaded = choice.load()
    return pair_answers(out / loaded.name / loaded.version, a, b)
