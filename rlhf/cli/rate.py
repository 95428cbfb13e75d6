"""`rlhf ab` and `rlhf judge`: commands with which people and models rate two policies' answers."""

import json
import os
from pathlib import Path

import click

from rlhf.cli.choice import Choice, pair_options
from rlhf.errors import UserError
from rlhf.observe import console
from rlhf.rating import server as rating
from rlhf.rating.pairs import compare
from rlhf.rating.summary import show, summarize


@click.command("ab")
@pair_options
@click.option("--rater", metavar="NAME", default="", help="Name of the rater. [default: the page asks]")
@click.option("--seed", default=0, show_default=True, help="Seed of the order in which answers are shown.")
@click.option(
    "--port",
    default=rating.PORT,
    type=click.IntRange(0, 65535),
    show_default=True,
    help="Port of the page; 0 takes a free one.",
)
@click.option("--summary", is_flag=True, help="Print win rates and agreement so far, and serve no page.")
@click.option("--json", "as_json", is_flag=True, help="Print that summary as one JSON object.")
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
    as_json: bool,
) -> None:
    """Rate answers of two policies blind, on a local page.

    Only this machine can open the page.
    """
    if rater and not rating.RATER.fullmatch(rater):
        raise click.BadParameter(f"{rater!r}: up to 40 letters, digits, . _ and -", param_hint="--rater")
    loaded = choice.load()
    comparison = compare(out / loaded.name / loaded.version, a, b)
    if as_json:
        click.echo(json.dumps(summarize(comparison), indent=2))
    elif summary:
        show(summarize(comparison), comparison.file)
    else:
        rating.serve(rating.Server(comparison, port, rater=rater, seed=seed, limit=limit))


@click.command()
@pair_options
@click.option(
    "--url", required=True, help="Address of an OpenAI-compatible endpoint, up to /v1; its key is in OPENAI_API_KEY."
)
@click.option("--model", required=True, metavar="NAME", help="Name of the model at the endpoint.")
@click.option(
    "--parallel",
    default=4,
    type=click.IntRange(1, 64),
    show_default=True,
    help="Number of pairs that are judged at once.",
)
def judge(
    choice: Choice, out: Path, a: str | None, b: str | None, limit: int | None, url: str, model: str, parallel: int
) -> None:
    """Let a model rate the pairs of `rlhf ab`, in both orders."""
    try:
        from rlhf.rating import judge as judging
    except ModuleNotFoundError as error:
        raise UserError(f"a judge needs {error.name}: {console.install_command('judge')}") from None
    if not model.strip() or not model.isprintable():
        raise click.BadParameter(f"{model!r}: the model's name, as the endpoint calls it", param_hint="--model")
    loaded = choice.load()
    comparison = compare(out / loaded.name / loaded.version, a, b)
    endpoint = judging.Judge(url, model, os.environ.get("OPENAI_API_KEY", "").strip())
    judging.run(endpoint, comparison, limit=limit, at_once=parallel)
    show(summarize(comparison), comparison.file)
