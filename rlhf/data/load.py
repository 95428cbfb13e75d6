"""Reads, checks and divides a recipe's data, which every stage trains and is evaluated on."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rlhf.data.check import remarks
from rlhf.data.corpus import Corpus, Split
from rlhf.data.formats import ParsedRows
from rlhf.data.rows import KINDS, Row, of_kind
from rlhf.data.source import read_source
from rlhf.data.split import divide, shuffled
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.data.trainable import trainable
from rlhf.errors import UserError
from rlhf.recipe import Recipe, StageName
from rlhf.recipe.pinned import content_hash
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
    if tokenizer is not None:
        rows = trainable(rows, tokenizer, recipe.data.on_bad_row)
    corpus = divide_rows(rows, recipe)
    facts = _fingerprint(rows, corpus, root)
    notes = [*facts.notes]
    if second := len(corpus.rows.second):
        notes.append(f"{counted(second, 'row')} for the second reward model alone (data.second_rm_fraction)")
    if facts.left_out:
        notes.append(f"{rows.summary()}: {', '.join(facts.left_out[:3])} … (all in manifest.json)")
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
    """Return training and held-out rows, each kind in an order of its own.

    The second reward model's rows are the training rows whose keys come next after the held-out ones. Rows for
    validation are set apart from the test rows where the recipe asks for it.
    """
    seed, data, second = recipe.seed, recipe.data, list[Row]()
    train, heldout = divide(rows.rows, seed=seed, fraction=data.heldout_fraction)
    if data.second_rm_fraction is not None:
        of_second = data.heldout_fraction + (1 - data.heldout_fraction) * data.second_rm_fraction
        train, second = divide(train, seed=seed, fraction=of_second)
    test, validation = _shuffled_kinds(heldout, seed), None
    if data.validation_fraction is not None:
        test, validation = divide(test, seed=seed, fraction=data.validation_fraction)
    return Corpus(Split(_shuffled_kinds(train, seed), test, validation, _shuffled_kinds(second, seed)))


def _shuffled_kinds(rows: Sequence[Row], seed: int) -> list[Row]:
    """Return the rows one kind after another, each kind in an order of its own that the seed decides."""
    return [row for kind in KINDS for row in shuffled(of_kind(rows, kind), seed)]


def _fingerprint(rows: ParsedRows, corpus: Corpus, root: Path) -> DataRead:
    """Return the facts of the data for manifest.json: files, counts, rows left out, notes.

    Files in `root` are named relative to it, because it may move.
    """

    def name(file: str) -> str:
        path = Path(file)
        return str(path.relative_to(root)) if path.is_relative_to(root) else file

    facts = DataRead(
        sha256=content_hash([file.sha256 for file in rows.files]),
        files=[file.model_copy(update={"name": name(file.name)}) for file in rows.files],
        documents=len(corpus.documents),
        examples=len(corpus.examples),
        pairs=len(corpus.pairs),
        prompts=len(corpus.bare_prompts),
        left_out=[f"{source}: {problem}" for _, source, problem in rows.left_out],
        notes=[*rows.notes, *remarks(rows.rows)],
    )
    return facts.model_copy(update=rows.counts())
