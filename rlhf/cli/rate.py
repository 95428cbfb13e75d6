"""`rlhf ab`, `rlhf judge` and `rlhf ratings`: commands that rate two policies' answers and export the ratings."""

import json
from collections.abc import Callable
from pathlib import Path

import click

from rlhf.cli.choice import Choice, tell_if_edited
from rlhf.cli.options import OUTPUT, SEED, StrictCommand, WholeNumber, refuse_inputs, run_directory
from rlhf.cli.recipe_options import pair_options
from rlhf.errors import UserError
from rlhf.files import json_lines, write_output
from rlhf.rating import server
from rlhf.rating.export import export
from rlhf.rating.pairs import PairedAnswers, pair_answers
from rlhf.rating.summary import show_summary, summarize
from rlhf.recipe.stages import EVALUATE, POLICIES
from rlhf.run.finished import read_manifest
from rlhf.run.layout import SAMPLES
from rlhf.run.packages import install_command
from rlhf.terminal import counted, say, screen, streams


@click.command("ab", cls=StrictCommand)
@pair_options
@click.option("--rater", metavar="NAME", default="", help="Name of the rater. [default: the page asks]")
@click.option(
    "--seed",
    default=0,
    type=SEED,
    metavar="N",
    show_default=True,
    help="Seed of the order in which answers are shown.",
)
@click.option(
    "--port",
    default=server.PORT,
    type=WholeNumber(0, 65535),
    metavar="N",
    show_default=True,
    help="Port of the page; 0 takes a free one.",
)
@click.option("--summary", is_flag=True, help="Print win rates and agreement so far, and serve no page.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print win rates and agreement as one JSON object; serve no page."
)
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

    RUN is a run directory, <out>/<recipe>/<version>; without it --hw or --recipe names the run. Only this machine can
    open the page.
    """
    if rater and not server.RATER.fullmatch(rater):
        raise click.BadParameter(f"{rater!r}: up to 40 letters, digits, . _ and -", param_hint="--rater")
    paired = _pairs(choice, out, a, b)
    if as_json:
        click.echo(json.dumps(summarize(paired).as_json(), indent=2))
    elif summary:
        show_summary(summarize(paired), paired.file)
    else:
        server.serve(server.Server(paired, port, rater=rater, seed=seed, limit=limit))


def judge_options(required: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds what names a judge: --url, --model and --parallel."""
    options = (
        click.option(
            "--url",
            required=required,
            metavar="URL",
            help="Address of an OpenAI-compatible endpoint, up to /v1; its key is in OPENAI_API_KEY.",
        ),
        click.option("--model", required=required, metavar="NAME", help="Name of the model at the endpoint."),
        click.option(
            "--parallel",
            default=4,
            type=WholeNumber(1, 64),
            metavar="N",
            show_default=True,
            help="Number of pairs that are judged at once.",
        ),
    )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.command(cls=StrictCommand)
@pair_options
@judge_options(required=True)
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
    judged(url, model, paired, parallel, limit)
    show_summary(summarize(paired), paired.file)


def judged(url: str, model: str, paired: PairedAnswers, parallel: int, limit: int | None = None) -> str:
    """Let a model judge the pairs that it has not judged yet, and return its name as a rater. Raises UserError."""
    streams.outlast()
    try:
        from rlhf.rating import judge as judging
    except ModuleNotFoundError as error:
        raise UserError(f"a judge needs {error.name}: {install_command('judge')}") from None
    if not model.strip() or not model.isprintable():
        raise click.BadParameter(f"{model!r}: the model's name, as the endpoint calls it", param_hint="--model")
    endpoint = judging.Judge(url, model)
    judging.run(endpoint, paired, limit=limit, at_once=parallel)
    return endpoint.rater


def _pairs(choice: Choice, out: Path, a: str | None, b: str | None) -> PairedAnswers:
    """Return the pairs of two policies' answers in a run, or in that of the chosen recipe below the runs root `out`."""
    if choice.run is not None:
        tell_if_edited([choice.run.directory])
        return pair_answers(choice.run.directory, a, b)
    loaded = choice.load()
    return pair_answers(out / loaded.name / loaded.version, a, b)


@click.group("ratings")
def ratings_group() -> None:
    """Export ratings of answers as preference rows."""


@ratings_group.command("export", cls=StrictCommand)
@click.argument("directory", type=click.Path(path_type=Path), metavar="RUN", callback=run_directory)
@click.option(
    "--a",
    metavar="POLICY",
    help="Policy that the pairs were compared against. [default: sft, or base]",
)
@click.option(
    "--b",
    metavar="POLICY",
    help=f"Policy whose wins were counted. [default: the first of {', '.join(POLICIES)} that was trained]",
)
@click.option("--rater", "raters", multiple=True, metavar="NAME", help="Count only this rater. May be repeated.")
@click.option(
    "--keep-ties", is_flag=True, help="Write a tie as two rows with opposite labels. [default: ties are left out]"
)
@click.option("--to", type=OUTPUT, required=True, metavar="FILE", help="JSON lines file to write.")
def export_ratings(
    directory: Path, a: str | None, b: str | None, raters: tuple[str, ...], keep_ties: bool, to: Path
) -> None:
    """Write the rated pairs of a run as preference rows.

    RUN is a run directory, <out>/<recipe>/<version>. The rows are for --data and `rlhf data check`.
    """
    tell_if_edited([directory])
    paired, samples = pair_answers(directory, a, b), directory / EVALUATE / SAMPLES
    refuse_inputs(to, [paired.file, samples])
    manifest = read_manifest(directory / EVALUATE)
    template = manifest.settings.tokenizer.template
    exported = export(paired, samples, template, raters=raters, keep_ties=keep_ties)
    left_out = "as two rows each" if keep_ties else "left out"
    counts = f"{counted(exported.rated, 'rated pair')}; {counted(exported.ties, 'tie')} {left_out}"
    counts += f", {exported.empty} with an empty answer" if exported.empty else ""
    if not exported.rows:
        raise UserError(f"{paired.file}: nothing to export of {counts}")
    write_output(to, json_lines(exported.rows))
    screen.OUT.print(f"{counted(len(exported.rows), 'preference row')} of {counts}; written to {to}")
    say(
        f"note: these prompts were held out with seed {manifest.seed}: train on them with another --seed, and do not "
        "evaluate on prompts that were trained on"
    )
