"""`rlhf data …`: commands that check data files, and show their rows as they will be trained."""

import random
import sys
from dataclasses import replace

import click

from rlhf.cli.choice import Choice, chooses_recipe
from rlhf.data import check, formats, show
from rlhf.data.formats import ParsedRows
from rlhf.data.rows import Example, PreferencePair, Row
from rlhf.data.trainable import refusals
from rlhf.errors import UserError
from rlhf.plan.own_rows import tokenizer_at_hand
from rlhf.recipe import Recipe, parse_overrides
from rlhf.terminal import counted, screen
from rlhf.terminal.progress import working

NAMED = 3  # malformed rows that a message names
EXISTING = click.Path(exists=True)


@click.group("data")
def data_group() -> None:
    """Check data files, and show their rows as they will be trained."""


FILES = click.argument("files", nargs=-1, required=True, type=EXISTING)


def _read(choice: Choice, files: tuple[str, ...]) -> tuple[ParsedRows, Recipe | None]:
    """Return the rows of files as a run reads them, but for malformed ones, which are listed; and the recipe if any."""
    if choice.names_a_recipe:
        recipe = replace(choice, data=files).load().recipe
        settings = recipe.data.model_copy(update={"on_bad_row": "skip"})
    else:
        settings, recipe = formats.settings_of(files, parse_overrides(choice.changes), "skip"), None
    with working("reading"):
        return formats.read(files, settings), recipe


@data_group.command("check")
@FILES
@chooses_recipe
@click.option(
    "--heldout", multiple=True, metavar="FILE", type=EXISTING, help="Held-out rows, instead of a tenth of FILES."
)
def check_data(choice: Choice, files: tuple[str, ...], heldout: tuple[str, ...]) -> None:
    """Count what is wrong with FILES: duplicates, leaks, contradictions, longer answers, answers that are cut.

    A recipe has a tokenizer and lengths; without one --set data.KEY=VALUE says how rows are read.
    Exit code 0: nothing. 3: something to look at. 1: malformed rows. 2: a mistake in the command.
    """
    rows, recipe = _read(choice, files)
    others = _read(choice, heldout)[0] if heldout else None
    with working("checking"):
        findings, refused = check.check(rows, others), list[tuple[str, str]]()
        tokenizer = tokenizer_at_hand(recipe) if recipe else None
        if recipe and tokenizer:
            findings += check.cut(rows, tokenizer, _lengths(recipe, rows.rows[0])) if rows.rows else []
            refused = [(row.source, reason) for row, reason in refusals(tokenizer, rows.rows)]
    screen.OUT.print(f"{check.in_words(rows)}; {rows.summary()}")
    for line in [*rows.notes, *map(str, findings)]:
        screen.OUT.print(line)
    if malformed := [*rows.malformed, *(others.malformed if others else ()), *refused]:
        first = "; ".join(f"{source}: {problem}" for source, problem in malformed[:NAMED])
        raise UserError(f"{counted(len(malformed), 'malformed row')}, as {first}; a run stops at the first")
    sys.exit(3 if any(finding.fault for finding in findings) else 0)


@data_group.command("show")
@FILES
@chooses_recipe
@click.option("--rows", "count", type=click.IntRange(min=1), default=2, metavar="N", help="Number of rows.")
@click.option("--random", "drawn", is_flag=True, help="Draw the rows instead of taking the first.")
def show_data(choice: Choice, files: tuple[str, ...], count: int, drawn: bool) -> None:
    """Show rows of FILES as they will be trained: the text after the template, with marks at what is learned.

    │ is context, ┃ is trained, ╎ is a rejected or bad answer.
    """
    rows, recipe = _read(choice, files)
    with working("loading the tokenizer"):
        tokenizer = tokenizer_at_hand(recipe) if recipe else None
    shown = random.sample(rows.rows, min(count, len(rows.rows))) if drawn else rows.rows[:count]
    for row in shown:
        screen.OUT.print(show.row(row, tokenizer, *([_lengths(recipe, row)] if recipe else [])))
    for line in [check.in_words(rows), *rows.notes, *check.remarks(rows.rows)]:
        screen.OUT.print(line, style="dim")
    for source, problem in rows.malformed[:NAMED]:
        screen.OUT.print(f"malformed: {source}: {problem}")
    if tokenizer is None:
        missing = "its tokenizer is not on this machine" if recipe else "--recipe DIR shows the template's own text"
        screen.OUT.print(f"turns as they are read; {missing}", style="dim")


def _lengths(recipe: Recipe, row: Row) -> tuple[int, int]:
    """Return the tokens of the longest prompt and of the longest sequence where a recipe trains on such rows."""
    dialogues, online = recipe.dialogues(), recipe.online()
    names = {Example: ("sft", "kto"), PreferencePair: ("rm", "dpo", "sft")}.get(type(row), ())
    for options in (dialogues[name] for name in names if name in dialogues):
        return options.max_prompt_length, options.max_length
    longest = max((section.max_prompt_length for section in online.values()), default=recipe.longest())
    return longest, recipe.longest()
