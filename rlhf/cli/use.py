"""`rlhf chat`, `score`, `serve`, `compare`, `report`: commands that use finished runs."""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from rlhf import report as reporting
from rlhf.cli.choice import Choice
from rlhf.cli.options import (
    OUTPUT,
    PRICE,
    Number,
    OneOf,
    StrictCommand,
    WholeNumber,
    existing_files,
    refuse_inputs,
    run_directories,
    run_directory,
)
from rlhf.cli.recipe_options import RUN_HELP, chooses_recipe
from rlhf.cli.typed import NAMES_RECIPE, typed_options
from rlhf.errors import OptionError, UserError
from rlhf.evaluation import comparison
from rlhf.evaluation.comparison import COMPARED_POLICIES
from rlhf.process.libraries import quiet_libraries
from rlhf.recipe import StageName
from rlhf.run.directory import Run
from rlhf.run.packages import install_command
from rlhf.run.parents import ParentMissing
from rlhf.terminal import screen
from rlhf.terminal.progress import working
from rlhf.use import chat as chatting
from rlhf.use import score as scoring
from rlhf.use import score_items
from rlhf.use import serve as serving


@contextmanager
def _advising(command: str, stage: StageName) -> Iterator[None]:
    """Name the command that runs `stage`, with what it builds on, where a stage is missing."""
    try:
        yield
    except ParentMissing as error:
        options = [*typed_options(only=("hw", "directory", "out", *RUN_HELP)), "--with-parents"]
        resume, variable = (["--resume"], " RESUME=1") if error.begun else ([], "")
        line = shlex.join(["rlhf", "run", stage, *options, *resume])
        raise UserError(f"{command} {error.needs}: first `{line}` (make: {stage}{variable})") from error


@click.command(cls=StrictCommand)
@chooses_recipe(**RUN_HELP, out=True)
@click.option(
    "--stage",
    default="ppo",
    show_default=True,
    type=OneOf(chatting.CHAT_STAGES),
    help="Stage whose model to load.",
)
@click.option(
    "--temperature",
    type=Number(min=0),
    metavar="T",
    help="Temperature of sampling; 0 takes the likeliest token. [default: the recipe's]",
)
@click.option(
    "--tokens", type=WholeNumber(min=1), metavar="N", help="Longest answer, in tokens. [default: the recipe's]"
)
def chat(choice: Choice, out: Path, stage: chatting.ChatStage, temperature: float | None, tokens: int | None) -> None:
    """Talk with a trained model in the terminal.

    Name the recipe and its changes as for the run.
    """
    if temperature is not None and not (temperature == 0 or 0.01 <= temperature <= 100):
        raise click.BadParameter(f"{temperature}: 0, or from 0.01 to 100", param_hint="--temperature")
    loaded = choice.load()
    options = loaded.recipe.evaluate
    run = Run(out, loaded, "evaluate")  # sampling is that of evaluation
    with _advising("chat", "pretrain" if stage == "base" else stage):
        folder = chatting.trained_stage(run, stage)
    with quiet_libraries():
        with working(f"loading {stage}"):
            speaker = chatting.Speaker(run, stage, folder)
        chosen_temperature = options.temperature if temperature is None else temperature
        if sys.stdin.isatty():
            screen.OUT.print(chatting.greeting(loaded, stage, chosen_temperature), style="dim", markup=False)
        chatting.talk(speaker, chatting.input_lines(), chosen_temperature, tokens or options.response_length)


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
    with _advising("score", "rm"):
        stages = scoring.finished_stages(choice.load(), out)
    with quiet_libraries():
        scoring.run(stages, items, to)


@click.command(cls=StrictCommand)
@chooses_recipe(**RUN_HELP, out=True)
@click.option(
    "--engine",
    default="auto",
    show_default=True,
    type=OneOf(serving.ENGINES),
    help="Server to use; auto takes vLLM if it is installed.",
)
@click.option(
    "--host", metavar="NAME", default="127.0.0.1", show_default=True, help="Address to listen on; clients need no key."
)
@click.option(
    "--port", default=8000, show_default=True, type=WholeNumber(1, 65535), metavar="N", help="Port to listen on."
)
def serve(choice: Choice, out: Path, engine: serving.Engine, host: str, port: int) -> None:
    """Serve the merged model to OpenAI's clients.

    Name the recipe and its changes as for the run.
    """
    with _advising("serve", "merge"):
        serving.run(choice.load(), out, engine, host, port)


@click.command(cls=StrictCommand)
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), callback=run_directories)
@chooses_recipe(out=True)
@PRICE
@click.option("--to", type=OUTPUT, metavar="FILE", help="HTML file to write. [default: report.html in the first run]")
def report(choice: Choice, runs: Sequence[Path], out: Path, to: Path | None, price: float | None) -> None:
    """Write an HTML page about one or several runs.

    RUNS are run directories, <out>/<recipe>/<version>. Without them --hw or --recipe names the run.
    """
    if runs and typed_options(only=(*NAMES_RECIPE, "out")):
        raise click.UsageError("run directories, or --hw, --recipe and --out name the runs: leave one of them out")
    if not runs and choice.hw is None and choice.directory is None:
        raise OptionError("name run directories, or a recipe: --hw NAME or --recipe DIR; `rlhf recipes` lists them")
    if not runs:
        loaded = choice.load()
        runs = [out / loaded.name / loaded.version]
    file = to or runs[0] / "report.html"
    try:
        refuse_inputs(file, reporting.data_files(runs))
        reporting.write(runs, file, price)
    except ModuleNotFoundError as error:
        raise UserError(f"a report needs {error.name}: {install_command('report')}") from None
    screen.OUT.print(f"written to {file}", markup=False)


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
    stage: comparison.PolicyLabel,
    stage_b: comparison.PolicyLabel | None,
    scored: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Compare two runs on the same held-out prompts.

    A and B are run directories, <out>/<recipe>/<version>, with a finished evaluation.
    """
    if len(scored) not in (0, 2):
        raise click.BadParameter("give it twice, first for A and then for B", param_hint="--scored")
    files = scored or (None, None)
    result = comparison.compare_runs(
        comparison.load(a, stage, files[0]), comparison.load(b, stage_b or stage, files[1])
    )
    if as_json:
        click.echo(json.dumps(result.as_json(), indent=2))
    else:
        comparison.show(result)
