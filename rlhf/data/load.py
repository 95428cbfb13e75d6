"""Reads, checks and divides a recipe's data, which every stage trains and is evaluated on."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rlhf.data.check import remarks
from rlhf.data.corpus import Corpus, Split
from rlhf.data.formats import ParsedRows, ReadReport
from rlhf.data.rows import KINDS, Row, of_kind
from rlhf.data.source import read_source
from rlhf.data.split import divide, row_key, shuffled
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.data.trainable import trainable
from rlhf.errors import UserError
from rlhf.recipe import Recipe, StageName
from rlhf.recipe.pinned import content_hash
from rlhf.recipe.schema_data import Data
from rlhf.run.records import DataRead
from rlhf.terminal import counted


class ReadCorpus(NamedTuple):
    """The rows of a recipe, divided, and what is to be said of them."""

    corpus: Corpus
    facts: DataRead  # for manifest.json
    notes: list[str]  # lines for the user


def read_corpus(recipe: Recipe, root: Path, tokenizer: DialogueTokenizer | None = None) -> ReadCorpus:
    """Read, check and divide a recipe's rows. Generated ones are kept in the folder `data` of `root`.

    With the `tokenizer` that writes them, rows that cannot be trained as written are bad rows. Raises UserError for bad
    data.
    """
    rows = read_source(recipe, root / "data")
    refused: list[str] = []
    if tokenizer is not None:
        rows, refused = trainable(rows, tokenizer, recipe.data.on_bad_row)
    corpus = divide_rows(rows, recipe)
    notes = [*rows.report.notes, *remarks(rows.rows)]
    facts = _fingerprint(rows.report, corpus, root).model_copy(update={"notes": [*notes]} if notes else {})
    if second := len(corpus.rows.second):
        notes.append(f"{counted(second, 'row')} for the second reward model alone (data.second_rm_fraction)")
    if facts.left_out:
        notes.append(f"{rows.report.summary()}: {_first(facts.left_out)}")
    if refused:
        listed = [*facts.left_out, *refused]
        facts = facts.model_copy(update={"template": len(refused), "left_out": listed})
        notes.append(f"{counted(len(refused), 'row')} left out that cannot be trained as written: {_first(refused)}")
    return ReadCorpus(corpus, facts, notes)


def check_rows(recipe: Recipe, stages: Sequence[StageName]) -> None:
    """Raise UserError if a recipe's own files lack rows for one of the unfinished `stages` of a chain.

    Other sources are pinned, or generated for their stages.
    """
    if recipe.data.source != "files":
        return
    corpus = divide_rows(read_source(recipe, Path()), recipe)
    for stage in stages:
        try:
            corpus.of_stage(stage, recipe.tokenizer.template)
        except UserError as error:
            raise UserError(f"{', '.join(recipe.data.files)}: {error}. Nothing was started") from None


def divide_rows(rows: ParsedRows, recipe: Recipe) -> Corpus:
    """Return training and held-out rows, each kind in an order of its own."""
    seed, data = recipe.seed, recipe.data
    train, heldout = divide(rows.rows, row_key, seed=seed, fraction=data.heldout_fraction)
    train, second = _without_second(train, seed, data)
    parts = _with_validation(_shuffled_kinds(train, seed), _shuffled_kinds(heldout, seed), seed, data)
    return Corpus(replace(parts, second=_shuffled_kinds(second, seed)))


def _first(places: Sequence[str]) -> str:
    """Return the first rows that were left out, and where the others are named."""
    return f"{', '.join(places[:3])} … (all in manifest.json)"


def _shuffled_kinds(rows: Sequence[Row], seed: int) -> list[Row]:
    """Return the rows one kind after another, each kind in an order of its own that the seed decides."""
    return [row for kind in KINDS for row in shuffled(of_kind(rows, kind), seed)]


def _with_validation(train: list[Row], heldout: list[Row], seed: int, data: Data) -> Split[Row]:
    """Set the validation rows apart from the test rows, where the recipe asks for it."""
    if data.validation_fraction is None:
        return Split(train, heldout)
    test, validation = divide(heldout, row_key, seed=seed, fraction=data.validation_fraction)
    return Split(train, test, validation)


def _without_second(train: list[Row], seed: int, data: Data) -> tuple[list[Row], list[Row]]:
    """Divide training rows into those of all other stages, and those of the second reward model alone."""
    if data.second_rm_fraction is None:
        return train, []
    heldout = data.heldout_fraction  # the keys below it are gone already
    return divide(train, row_key, seed=seed, fraction=heldout + (1 - heldout) * data.second_rm_fraction)


def _fingerprint(report: ReadReport, corpus: Corpus, root: Path) -> DataRead:
    """Return the facts of the data for manifest.json: files, counts, rows left out.

    Files in `root` are named relative to it, because it may move.
    """

    def name(file: str) -> str:
        path = Path(file)
        return str(path.relative_to(root)) if path.is_relative_to(root) else file

    facts = DataRead(
        sha256=content_hash([file.sha256 for file in report.files]),
        files=[file.model_copy(update={"name": name(file.name)}) for file in report.files],
        documents=len(corpus.documents),
        examples=len(corpus.examples),
        pairs=len(corpus.pairs),
        prompts=len(corpus.bare_prompts),
        left_out=[f"{source}: {problem}" for _, source, problem in report.left_out],
    )
    return facts.model_copy(update=report.counts())
