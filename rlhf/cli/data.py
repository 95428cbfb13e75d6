"""`rlhf data …`: commands that check, show and convert data files. Nothing here imports torch."""

import functools
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click

from rlhf.cli.options import OUTPUT, SEED, Number, existing_files, refuse_inputs
from rlhf.data import convert, formats, show
from rlhf.data.needs import stages_in_words
from rlhf.data.prepare import Preparation
from rlhf.data.quality import check as quality
from rlhf.data.quality import flaws, spread
from rlhf.data.quality.report import SEVERITIES, QualityReport
from rlhf.data.rows import Row
from rlhf.errors import UserError
from rlhf.files import write_output
from rlhf.recipe.choices import DataFormat, RatedPairs
from rlhf.terminal import counted, say, screen
from rlhf.terminal.progress import working
from rlhf.terminal.tables import rows_table

NAMED = 3  # malformed rows that a message names
REPAIR = "Repair it; a run leaves such rows out with `rlhf run … --set data.on_bad_row=skip`"


FORMAT = click.option(
    "--format",
    "kind",
    type=click.Choice(get_args(DataFormat)),
    default="auto",
    show_default=True,
    help="Kind of rows, as data.format of a recipe; auto: as the first row shows.",
)
PREPARING = (
    click.option(
        "--rename",
        multiple=True,
        metavar="OLD=NEW",
        help="Rename a column first, for example question=prompt, as data.rename of a recipe. May be repeated.",
    ),
    click.option(
        "--ignore",
        multiple=True,
        metavar="NAMES",
        help="Columns, or fields of messages, that no answer needs, as data.ignore of a recipe. May be repeated.",
    ),
    click.option(
        "--rated",
        type=click.Choice(get_args(RatedPairs)),
        default="best_worst",
        show_default=True,
        help="Pairs that are made of a prompt's rated answers, as data.rated of a recipe.",
    ),
    click.option(
        "--rating",
        metavar="NAME",
        help="Number that rates an answer, as data.rating of a recipe: +NAME if more is better, -NAME if less is.",
    ),
)


def preparing(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of rows before their kind is told, as one argument `preparation`."""

    @functools.wraps(command)
    def prepared(
        rename: tuple[str, ...], ignore: tuple[str, ...], rated: RatedPairs, rating: str | None, **others: Any
    ) -> None:
        ignored = [name for names in ignore for name in names.split(",")]
        preparation = Preparation(convert.parse_names(rename), ignored, rated, rating, "--rename")
        command(preparation=preparation, **others)

    for option in reversed(PREPARING):
        prepared = option(prepared)
    return prepared


@click.group("data")
def data_group() -> None:
    """Check, show and convert data files."""


@data_group.command("check")
@click.argument("files", nargs=-1, required=True, callback=existing_files)
@click.option(
    "--heldout",
    multiple=True,
    metavar="FILE",
    callback=existing_files,
    help="File of held-out rows to look for in FILES, instead of splitting FILES. May be repeated.",
)
@click.option(
    "--seed",
    type=SEED,
    metavar="N",
    default=0,
    show_default=True,
    help="Seed of the split into training and held-out rows, as for a run.",
)
@click.option(
    "--heldout-fraction",
    "fraction",
    type=Number(0, 1, min_open=True, max_open=True),
    metavar="SHARE",
    default=0.1,
    show_default=True,
    help="Share of held-out conversations, as data.heldout_fraction of a recipe.",
)
@FORMAT
@preparing
@click.option(
    "--tokenizer",
    metavar="DIR",
    help="Folder of a tokenizer. Lengths are in its tokens; rows that its template would change are errors.",
)
@click.option("--to", type=OUTPUT, metavar="FILE", help="JSON file to write the whole report to, in addition.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def check_data(
    files: tuple[str, ...],
    heldout: tuple[str, ...],
    seed: int,
    fraction: float,
    kind: DataFormat,
    tokenizer: str | None,
    as_json: bool,
    to: Path | None,
    preparation: Preparation,
) -> None:
    """Check the quality of FILES, read as in training.

    Exit code 0: notes at most. 3: warnings. 1: errors, such as malformed rows. 2: a mistake in the command.
    """
    if to:
        refuse_inputs(to, [*files, *heldout, *(Path(tokenizer).glob("*") if tokenizer else ())])
    count, unit = (spread.tokens(tokenizer, "--tokenizer"), "tokens") if tokenizer else (spread.words, "words")
    with working("reading and checking"):
        read = partial(formats.read, on_bad_row="skip", kind=kind, advice=formats.CHECK_ADVICE)
        rows = read(list(files), preparation=preparation)
        others = preparation._replace(rating_used=True)
        heldout_rows = read(list(heldout), preparation=others) if heldout else None
        report = quality.check(rows, heldout=heldout_rows, seed=seed, fraction=fraction, count=count, unit=unit)
    refused = _refused(tokenizer, [*rows.rows, *(heldout_rows.rows if heldout_rows else ())]) if tokenizer else None
    if refused is not None:
        report = report.with_template(refused)
    content = json.dumps(report.to_dict() | {"notes": [*rows.report.notes]}, indent=2)
    if to:
        write_output(to, content + "\n")
    if as_json:
        click.echo(content)
    else:
        _print_check(report)
        for note in [*rows.report.notes, stages_in_words(rows, seed, fraction)]:
            screen.OUT.print(f"note: {note}", style="dim")
    malformed = [*rows.report.malformed, *(heldout_rows.report.malformed if heldout_rows else ())]
    if malformed:
        raise UserError(f"{_named(malformed)}. {REPAIR}")
    if refused:
        raise UserError(
            f"template: {counted(len(refused), 'row')} cannot be trained as written: {_named(refused)}. {REPAIR}"
        )
    if report.severity == "error":
        worst = next(line for line in report.findings() if line.severity == "error")
        raise UserError(f"{', '.join(files)}: {worst.name} {worst.value}: {worst.hint}")
    sys.exit(3 if report.severity == "warning" else 0)


def _refused(folder: str, rows: Sequence[Row]) -> list[tuple[str, str]] | None:
    """Return the place of each row that the tokenizer's template would change in training, with the reason.

    Says why, and returns None, where that cannot be told.
    """
    from rlhf.data.trainable import refusals, tokenizer_of_folder

    try:
        tokenizer = tokenizer_of_folder(folder)
    except UserError as error:
        say(f"--tokenizer {folder}: only lengths were checked, not the template: {error}")
        return None
    with working("writing rows with the template"):
        return [(row.source, reason) for row, reason in refusals(tokenizer, rows)]


def _print_check(report: QualityReport) -> None:
    """Print what was found as a table, what was not in its last row, and a line about the flaws."""
    table = report.table()
    listed = [line for line in table if line.value != "0"]
    lines = [(name, value, hint and f"{severity}: {hint}") for name, value, hint, severity in listed]
    absent = ", ".join(line.name for line in table if line.value == "0")
    rows_table("data", ("what", "value", "hint"), [*lines, *([("none found", absent, "")] if absent else [])])
    screen.OUT.print(flaws_line(report))


def flaws_line(report: QualityReport) -> str:
    """Return one line about the flaws, the worst first, and the key that leaves such rows out."""
    findings = report.findings()
    counts = {severity: [line.name for line in findings if line.severity == severity] for severity in SEVERITIES}
    parts = [
        f"{len(names)} {severity}{'s' if len(names) > 1 else ''} ({', '.join(names)})"
        for severity, names in reversed(counts.items())
        if severity and names
    ]
    if not parts:
        return "nothing wrong was found"
    droppable = [name.replace(" ", "_") for name in counts["error"] + counts["warning"]]
    reasons = ",".join(name for name in droppable if name in (*flaws.FLAWS, "leaked"))
    return "; ".join(parts) + (
        f"; `rlhf run … --set data.drop=[{reasons}]` leaves such rows out of training" if reasons else ""
    )


@data_group.command("show")
@click.argument("files", nargs=-1, required=True, callback=existing_files)
@click.option(
    "--rows",
    "count",
    type=click.IntRange(min=1),
    metavar="N",
    default=5,
    show_default=True,
    help="Number of rows to show.",
)
@click.option("--seed", type=SEED, metavar="N", default=0, show_default=True, help="Seed of the random choice of rows.")
@click.option("--first", is_flag=True, help="Show the first rows instead of random ones.")
@click.option(
    "--only",
    type=click.Choice(list(flaws.FLAWS)),
    help="Show only rows with this flaw, as `rlhf data check` counts it.",
)
@FORMAT
@preparing
def show_data(
    files: tuple[str, ...],
    count: int,
    seed: int,
    first: bool,
    only: str | None,
    kind: DataFormat,
    preparation: Preparation,
) -> None:
    """Show rows of FILES: the chosen answer beside the rejected one.

    Words that differ are bold. Control characters are written as escapes.
    """
    rows = formats.read(list(files), on_bad_row="skip", kind=kind, advice=formats.CHECK_ADVICE, preparation=preparation)
    chosen, total, searched = show.choose(rows, count, seed=None if first else seed, only=only)
    for row in chosen:
        screen.OUT.print(show.render(row))
    order = "the first" if first else f"drawn with --seed {seed}"
    shown = f"{len(chosen)} of {counted(total, 'row')}" if total else "no row"
    flaw = f" with {only} among {counted(searched, 'row')}" if only else ""
    message = f"{shown}{flaw}" + (f", {order}" if len(chosen) < total else "")
    screen.OUT.print(f"{message}; {rows.report.summary()}", style="dim")
    for note in rows.report.notes:
        screen.OUT.print(note, style="dim")
    if rows.report.malformed:
        screen.OUT.print(f"malformed: {_named(rows.report.malformed)}", style="dim")


def _named(malformed: Sequence[tuple[str, str]]) -> str:
    """Return where the first malformed rows are and why they are, and how many more there are."""
    named = "; ".join(f"{source}: {reason}" for source, reason in malformed[:NAMED])
    return f"{named}; and {len(malformed) - NAMED:,} more" if len(malformed) > NAMED else named


@data_group.command("convert")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@FORMAT
@preparing
@click.option("--skip-bad-rows", is_flag=True, help="Leave malformed rows out, instead of stopping at the first one.")
@click.option("--to", type=OUTPUT, required=True, metavar="FILE", help="JSON lines file to write.")
def convert_data(
    files: tuple[Path, ...], kind: DataFormat, skip_bad_rows: bool, to: Path, preparation: Preparation
) -> None:
    """Rewrite FILES of any known kind as JSON lines in one plain form.

    Answers that are labelled good or bad one by one (prompt, completion, label) become preference pairs.
    """
    converted = convert.convert(files, preparation, "skip" if skip_bad_rows else "stop", kind)
    count = convert.write(converted.rows, to)
    for note in [*(pairing.in_words() for pairing in converted.pairings), *converted.rows.report.notes]:
        screen.OUT.print(note)
    screen.OUT.print(f"{converted.rows.report.summary()}; {counted(count, 'row')} written to {to}")
