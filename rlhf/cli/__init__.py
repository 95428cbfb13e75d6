"""`rlhf`: parses the command line, resolves the recipe, calls a stage."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from rlhf import __version__, ratings, recipe, stages, terminal
from rlhf import ab as rating
from rlhf import judge as judging
from rlhf import report as reporting
from rlhf.cli.data import data_group
from rlhf.cli.guard import guarded as guarded
from rlhf.cli.lookup import (
    CHANGES,
    FOLDER,
    NAMES_RECIPE,
    OUT,
    PARENTS,
    RECIPES,
    RUN_OPTIONS,
    RUN_SEED,
    TRAINING_OPTIONS,
    announce_version,
    hardware_options,
    pair_options,
    recipes_root,
    typed_options,
)
from rlhf.data.hub import hub_hint
from rlhf.errors import ParentMissing, UserError
from rlhf.evaluation import comparison
from rlhf.memory import plan as planning
from rlhf.memory.fit import fit as fitting
from rlhf.memory.predict import Predictor
from rlhf.memory.predict import stages as predicted_stages
from rlhf.memory.strategies import STAGES as LEARNING
from rlhf.observe import console, tracking, watch
from rlhf.options import LARGEST_SEED, OUTPUT, PRICE, SEED
from rlhf.process import distributed, endings
from rlhf.recipe import shape
from rlhf.run.directory import Run
from rlhf.run.finished import read_summary
from rlhf.use import chat as chatting
from rlhf.use import fetch as fetching
from rlhf.use import reproduce as reproducing
from rlhf.use import score as scoring
from rlhf.use import serve as serving

OF_A_CHAIN = ("with_parents", "if_needed")  # options of `rlhf run` that its parents are not run with
RANDOM_PAIRS = 4000  # stand-in dialogues that go with random weights
REHEARSAL = (
    "pretrain: this recipe trains a tiny model from nothing on your rows: a rehearsal of every step, not an assistant; "
    "recipes with a pretrained base make one (`rlhf recipes`)"
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__)
def cli() -> None:
    """Reproducible RLHF on one GPU."""


@cli.command()
@click.argument("stage", type=click.Choice(recipe.STAGES))
@click.argument("more_data", nargs=-1, metavar="")  # so that `--data a.jsonl b.jsonl` means what it says
@TRAINING_OPTIONS
@click.option("--seed", type=SEED, help="Seed to use instead of the recipe's.")
@PARENTS
@click.option("--resume", is_flag=True, help="Continue an unfinished run from its newest checkpoint.")
@click.option(
    "--report-to", multiple=True, type=click.Choice(tracking.TRACKERS), help="Also send the metrics to this tracker."
)
@click.option("--with-parents", is_flag=True, help="First run the stages that this one builds on, unless finished.")
@click.option("--if-needed", is_flag=True, help="Succeed if the stage is finished, or not part of the recipe.")
@click.option(
    "--stop-on", multiple=True, metavar="CHECK", help="End the stage when this check finds something; all: any check."
)
@click.option(
    "--preflight/--no-preflight",
    default=True,
    help="Refuse a stage that is predicted not to fit the card. [default: on]",
)
@PRICE
def run(
    stage: str,
    more_data: tuple[str, ...],
    hw: str | None,
    directory: Path | None,
    data: tuple[str, ...],
    weights: str | None,
    out: Path,
    changes: tuple[str, ...],
    seed: int | None,
    parents: Path | None,
    resume: bool,
    report_to: tuple[str, ...],
    with_parents: bool,
    if_needed: bool,
    stop_on: tuple[str, ...],
    preflight: bool,
    price: float | None,
) -> None:
    """Run one stage of a recipe.

    The stages that it builds on must be finished, or are run first with --with-parents.
    """
    if more_data and not data:
        raise click.UsageError(f"what is {more_data[0]!r}? Files to train on follow --data")
    if unknown := [name for name in stop_on if name not in (*watch.NAMES, "all")]:
        raise click.BadParameter(f"{unknown[0]} is none of {', '.join(watch.NAMES)}, all", param_hint="--stop-on")
    loaded = load_recipe(hw, directory, (*data, *more_data), weights, changes, seed)
    if if_needed and getattr(loaded.recipe, stage) is None:
        console.OUT.print(f"{stage}: not part of {loaded.name} {loaded.version}")
        return

    def command_for(other: str, *leave_out: str) -> list[str]:
        files = [word for file in more_data for word in ("--data", file)]
        return ["run", other, *typed_options({*leave_out, *OF_A_CHAIN}), *files]

    def report_done(other: str) -> bool:
        run = Run(out, loaded, other, parents)
        path = run.elsewhere(other) or (run.path if run.done() is not None else None)
        if path:
            console.OUT.print(f"{other}: done ({path})", markup=False)
        return path is not None

    if with_parents:
        for parent in recipe.stages_before(loaded.recipe, stage):
            if not report_done(parent):
                words = [
                    *command_for(parent, "hw", "directory"),
                    "--recipe",
                    str(loaded.directory),
                ]  # already announced
                code = endings.run_child([sys.executable, "-m", "rlhf.cli", *words])
                if code:
                    sys.exit(code)
    if if_needed and report_done(stage):
        return
    started = Run(out, loaded, stage, parents)
    if distributed.to_launch(loaded.recipe, stage) and started.done() is None:
        with endings.keeping(lambda: stages.kept(started)):
            distributed.launch(loaded, stage)
        return

    def predict_peak() -> int | None:
        if not preflight:
            return None
        with console.working(f"{stage}: predicting its memory"), Predictor() as predict:
            return planning.preflight(predict, loaded, stage, shlex.join(typed_options(only=NAMES_RECIPE)))

    try:
        summary, result, path = stages.execute(
            stage,
            loaded,
            out,
            resume=resume,
            report_to=report_to,
            preflight=predict_peak,
            stop_on=stop_on,
            parents_root=parents,
        )
    except ParentMissing as error:
        first = shlex.join(["rlhf", *command_for(error.parent, "" if error.begun else "resume")])
        raise UserError(f"{error}: first run `{first}`, or add --with-parents") from error
    if distributed.rank():
        return
    console.summary_table(summary, path)
    if stage == "pretrain" and data:
        terminal.say(REHEARSAL)
    if result and result.sample:
        console.show_sample("a held-out prompt", *result.sample)
    finished = [s for name in recipe.STAGES if (s := read_summary(path.parent / name))]
    console.targets_table(finished, price)
    console.say_next(stage, loaded.recipe)


@cli.command("recipes")
@RECIPES
def list_recipes() -> None:
    """List the recipes."""
    rows = []
    root = recipes_root()
    if not recipe.available(root):
        raise UserError(recipe.no_recipes(root))
    for directory in recipe.available(root):
        loaded = recipe.load(directory)
        found = loaded.recipe
        default = "default" if found.default and recipe.resolve(found.hardware.name, root) == directory else ""
        rows.append((str(directory), found.hardware.name, found.status, default, found.description))
    console.rows_table("recipes", ("folder", "hardware", "status", "", "description"), rows)


@cli.command()
@hardware_options
@FOLDER
@CHANGES
def fetch(hw: str | None, directory: Path | None, changes: tuple[str, ...]) -> None:
    """Download and check a recipe's pinned model and data.

    They go to the hub's cache. Stages then need no network.
    """
    loaded = load_recipe(hw, directory, (), None, changes, None)
    if not fetching.sources(loaded.recipe):
        console.OUT.print(f"{loaded.name} {loaded.version} takes nothing from the hub: there is nothing to fetch")
        return
    with console.quiet_libraries():
        fetching.show(list(fetching.fetch(loaded.recipe)))


@cli.command()
@RUN_OPTIONS
@RUN_SEED
@click.option(
    "--stage", default="ppo", show_default=True, type=click.Choice(chatting.STAGES), help="Stage whose model to load."
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    help="Temperature of sampling; 0 takes the likeliest token. [default: the recipe's]",
)
@click.option("--tokens", type=click.IntRange(min=1), help="Longest answer, in tokens. [default: the recipe's]")
def chat(
    hw: str | None,
    directory: Path | None,
    data: tuple[str, ...],
    weights: str | None,
    out: Path,
    changes: tuple[str, ...],
    seed: int | None,
    stage: str,
    temperature: float | None,
    tokens: int | None,
) -> None:
    """Talk with a trained model in the terminal.

    Name the recipe and its changes as for the run.
    """
    if temperature is not None and not (temperature == 0 or 0.01 <= temperature <= 100):
        raise click.BadParameter(f"{temperature}: 0, or from 0.01 to 100", param_hint="--temperature")
    loaded = load_recipe(hw, directory, data, weights, changes, seed)
    options = loaded.recipe.evaluate
    with console.quiet_libraries():
        with console.working(f"loading {stage}"):
            speaker = chatting.Speaker(loaded, out, stage)
        warmth = options.temperature if temperature is None else temperature
        if sys.stdin.isatty():
            console.OUT.print(chatting.greeting(loaded, stage, warmth), style="dim", markup=False)
        chatting.talk(speaker, chatting.typed(), warmth, tokens or options.response_length)


@cli.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@RUN_OPTIONS
@RUN_SEED
@click.option("--prompt", help="Score answers to this prompt instead of FILES.")
@click.option("--response", "responses", multiple=True, help="An answer to --prompt; may be repeated.")
@click.option("--to", type=OUTPUT, metavar="FILE", help="File for the scores, as JSON lines.")
def score(
    files: tuple[Path, ...],
    hw: str | None,
    directory: Path | None,
    data: tuple[str, ...],
    weights: str | None,
    out: Path,
    changes: tuple[str, ...],
    seed: int | None,
    prompt: str | None,
    responses: tuple[str, ...],
    to: Path | None,
) -> None:
    """Score answers with a run's reward model.

    FILES have pairs, or prompts with responses, or are samples.jsonl of a run.
    """
    items = scoring.items(files, prompt, responses, to)
    with console.quiet_libraries():
        scoring.run(load_recipe(hw, directory, data, weights, changes, seed), out, items, to)


@cli.command()
@RUN_OPTIONS
@RUN_SEED
@click.option(
    "--engine",
    default="auto",
    show_default=True,
    type=click.Choice(serving.ENGINES),
    help="Server to use; auto takes vLLM if it is installed.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; clients need no key.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(1, 65535), help="Port to listen on.")
def serve(
    hw: str | None,
    directory: Path | None,
    data: tuple[str, ...],
    weights: str | None,
    out: Path,
    changes: tuple[str, ...],
    seed: int | None,
    engine: str,
    host: str,
    port: int,
) -> None:
    """Serve the merged model to OpenAI's clients.

    Name the recipe and its changes as for the run.
    """
    serving.run(load_recipe(hw, directory, data, weights, changes, seed), out, engine, host, port)


@cli.command()
@click.argument("roots", nargs=-1, type=click.Path(path_type=Path))
@hardware_options
@FOLDER
@OUT
@click.option("--to", type=OUTPUT, metavar="FILE", help="File of the page. [default: report.html in the first run]")
@PRICE
def report(
    roots: tuple[Path, ...], hw: str | None, directory: Path | None, out: Path, to: Path | None, price: float | None
) -> None:
    """Write a page about one or several runs.

    ROOTS are run directories, <out>/<recipe>/<version>. Without them --hw or --recipe names the run.
    """
    if not roots:
        loaded = load_recipe(hw, directory, (), None, (), None)
        roots = (out / loaded.name / loaded.version,)
    file = to or roots[0] / "report.html"
    try:
        reporting.write(roots, file, price)
    except ModuleNotFoundError as error:
        raise UserError(f"a report needs {error.name}: {console.install_command('report')}") from None
    console.OUT.print(f"written to {file}", markup=False)


@cli.command("ab")
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
    hw: str | None,
    directory: Path | None,
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
    loaded = load_recipe(hw, directory, (), None, (), None)
    found = rating.compare(out / loaded.name / loaded.version, a, b)
    if as_json:
        click.echo(json.dumps(rating.summary(found), indent=2))
    elif summary:
        rating.show(rating.summary(found), found.file)
    else:
        rating.serve(rating.Server(found, port, rater=rater, seed=seed, limit=limit))


@cli.command()
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
    hw: str | None,
    directory: Path | None,
    out: Path,
    a: str | None,
    b: str | None,
    limit: int | None,
    url: str,
    model: str,
    parallel: int,
) -> None:
    """Let a model rate the pairs of `rlhf ab`, in both orders."""
    if not model.strip() or not model.isprintable():
        raise click.BadParameter(f"{model!r}: the model's name, as the endpoint calls it", param_hint="--model")
    loaded = load_recipe(hw, directory, (), None, (), None)
    found = rating.compare(out / loaded.name / loaded.version, a, b)
    asked = judging.Judge(url, model, os.environ.get("OPENAI_API_KEY", "").strip())
    judging.run(asked, found, limit=limit, at_once=parallel)
    rating.show(rating.summary(found), found.file)


cli.add_command(comparison.compare_runs)
cli.add_command(ratings.ratings_group)
cli.add_command(data_group)


@cli.command()
@TRAINING_OPTIONS
@click.option("--seeds", default="0 1 2", show_default=True, help="Seeds, separated by spaces.")
@click.option("--until", help="Last stages, separated by spaces. [default: ppo dpo, and evaluate if a target needs it]")
@PRICE
def reproduce(
    hw: str | None,
    directory: Path | None,
    data: tuple[str, ...],
    weights: str | None,
    out: Path,
    changes: tuple[str, ...],
    seeds: str,
    until: str | None,
    price: float | None,
) -> None:
    """Run the chain with several seeds; show mean ± sd of each target."""
    loaded = load_recipe(hw, directory, data, weights, changes, None)
    for word in seeds.split() or [""]:
        if not word.isdecimal() or len(word) > 10 or int(word) > LARGEST_SEED:
            raise click.BadParameter(f"{seeds!r}: whole numbers below 2^32, separated by spaces", param_hint="--seeds")
    finals = reproducing.final_stages(loaded) if until is None else until.split() or [""]
    for word in finals:
        if word not in recipe.STAGES:
            raise click.BadParameter(f"{word!r} is not one of {', '.join(recipe.STAGES)}", param_hint="--until")
    chain = reproducing.chain(loaded, finals)
    numbers = [int(seed) for seed in seeds.split()]
    options = ["--recipe", str(loaded.directory)]
    options += [part for file in data for part in ("--data", file)]
    options += [part for change in changes for part in ("--set", change)]
    options += ["--weights", weights] if weights else []
    reproducing.run_seeds(chain, numbers, out, options)
    reproducing.show(reproducing.record(loaded, chain, numbers, out, price), out)


@cli.command()
@hardware_options
@FOLDER
@click.option("--stage", type=click.Choice([s for s in recipe.STAGES if s != "pretrain"]), help="Plan only this stage.")
@CHANGES
@PRICE
@click.option("--fit", metavar="12GB", help="Search for the fastest settings that need at most this memory.")
@click.option("--fastest", is_flag=True, help="Search for the fastest settings that fit the recipe's card.")
@click.option("--strategies", is_flag=True, help="Show what each way to save memory changes, beside claims.")
@click.option("--published", is_flag=True, help="Show every published figure beside its prediction.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def plan(
    hw: str | None,
    directory: Path | None,
    stage: str | None,
    changes: tuple[str, ...],
    price: float | None,
    fit: str | None,
    fastest: bool,
    strategies: bool,
    published: bool,
    as_json: bool,
) -> None:
    """Predict memory, time and cost of a recipe without a GPU.

    Nothing is started. The exit code is 1 if the recipe does not fit its card.
    """
    ways = {"--fit": fit is not None, "--fastest": fastest, "--strategies": strategies, "--published": published}
    chosen = [name for name, given in ways.items() if given]
    if len(chosen) > 1:
        raise click.UsageError(f"{' and '.join(chosen)} answer different questions: ask one at a time")
    if price is not None and chosen and not published:
        raise click.UsageError(f"--price goes with the plan itself, not with {chosen[0]}")
    loaded = load_recipe(hw, directory, (), None, changes, None)
    if warning := shape.check(loaded):
        terminal.say(warning)
    known = predicted_stages(loaded.recipe)
    if stage and stage not in known:
        raise UserError(f"{stage}: {loaded.directory} has no such stage")
    asked = [stage] if stage else known
    if fit is not None or fastest:
        limit = planning.card_bytes(loaded) if fit is None else planning.size(fit)
        on_card = [s for s in asked if s not in planning.ON_HOST]
        if not on_card:
            raise click.UsageError(f"{stage} uses the host's memory and none of the card's: there is nothing to fit")
        with Predictor() as predict, console.working("looking for settings that fit") as say:
            found = fitting(predict, loaded, on_card, limit, say)
        planning.show_fits(loaded, found, limit, as_json)
    elif strategies:
        learning = [s for s in asked if s in LEARNING]
        if not learning:
            raise click.UsageError(f"--strategies compares what training needs; {stage} does not train")
        with Predictor() as predict, console.working("rehearsing each strategy"):
            ablation = {s: planning.ablation(predict, loaded, s) for s in learning}
        planning.show_ablation(loaded, ablation, as_json)
    elif published:
        with Predictor() as predict, console.working("rehearsing the stages") as say:
            made = planning.make(predict, loaded, known, price, say)
            say("rehearsing each strategy")
            effects = planning.ablation(predict, loaded, "sft")
        rows = planning.published(loaded, made, effects)
        planning.show_published(loaded, [row for row in rows if stage in (None, row["stage"])], as_json)
    else:
        with Predictor() as predict, console.working("rehearsing the stages") as say:
            made = planning.make(predict, loaded, asked, price, say)
        planning.show(made, as_json)
        if any(s["fits"] is False for s in made["stages"].values()):
            options = shlex.join(typed_options(only=NAMES_RECIPE))
            raise UserError(
                f"the recipe does not fit its card: `rlhf plan {options} --fastest` looks for settings that do"
            )


@cli.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def results(file: Path) -> None:
    """Print a record of `rlhf reproduce` as a Markdown table."""
    click.echo(terminal.harmless(reproducing.table_of(file)))


def load_recipe(
    hw: str | None,
    directory: Path | None,
    data: Sequence[str],
    weights: str | None,
    changes: Sequence[str],
    seed: int | None,
) -> recipe.Loaded:
    """The recipe that the options name, with their changes."""
    if directory is not None and hw is not None:
        raise click.UsageError("--hw and --recipe both name a recipe: leave one out")
    if directory is None:
        if hw is None:
            raise UserError("name a recipe: --hw NAME or --recipe DIR; `rlhf recipes` lists them")
        directory = recipe.resolve(hw, recipes_root())
        announce_version(hw, directory)
    given = recipe.parse_overrides(changes)
    overrides: dict[str, Any] = {}
    if weights == "random":
        if data:
            raise click.UsageError("--weights random brings stand-in dialogues of its own: leave out --data")
        overrides |= recipe.with_random_weights(recipe.load(directory, given).recipe, RANDOM_PAIRS, "hh")
    elif weights is not None:
        folder = str(Path(weights).resolve())
        if not Path(folder, "config.json").is_file():
            raise UserError(f"--weights {weights}: no config.json there; name a checkpoint's folder, or random")
        overrides |= {"model.source": "local", "model.name": folder, "model.revision": None, "pretrain": None}
        overrides |= {"tokenizer.source": "local", "tokenizer.name": folder, "tokenizer.revision": None}
    if absent := [file for file in data if not Path(file).exists()]:
        raise UserError(f"--data {absent[0]}: there is no such file{hub_hint(absent[0])}")
    if data:
        files = [str(Path(file).resolve()) for file in data]
        overrides |= {"data.source": "files", "data.files": files, "data.format": "auto"}
    return recipe.load(directory, overrides | given, seed)


def main() -> None:
    """Entry point of `rlhf`."""
    guarded(cli)
