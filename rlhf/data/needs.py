"""Which rows each stage trains on, and whether data have them on both sides of the split."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.data.corpus import JUDGED, PAIRS, Corpus, Split
from rlhf.data.source import read_source
from rlhf.errors import UserError
from rlhf.recipe import Recipe, StageName
from rlhf.recipe.stages import STAGE_TABLE


class Need(NamedTuple):
    """The rows that a stage needs, and how many of them there are on each side of the split."""

    stage: StageName
    rows: str
    train: int
    heldout: int
    validation: int | None = None  # held-out rows that choose checkpoints; None where none are set apart for that

    @property
    def met(self) -> bool:
        """Return whether there are rows on both sides, and to choose checkpoints by."""
        return bool(self.train and self.heldout) and self.validation != 0

    @property
    def lack(self) -> str:
        """Return in words what is needed and what is there."""
        if self.train and self.heldout:
            return f"rows for validation, and there are none: all {self.heldout:,} held out are test rows"
        if not (self.train or self.heldout):
            return f"{self.rows}, and there are none"
        there = f"there are {self.train:,} for training and {self.heldout:,} held out"
        return f"{self.rows} on both sides of the split, and {there}"

    @property
    def advice(self) -> str:
        """Return which share of the data to change, with a comma before it; "" where there are no such rows at all."""
        if not (self.train or self.heldout):
            return ""
        return f", change data.{'validation' if self.train and self.heldout else 'heldout'}_fraction"

    def __str__(self) -> str:
        return f"{self.stage} {self.counts}"

    @property
    def counts(self) -> str:
        """Return the numbers of training and held-out rows, and what they are."""
        return f"{self.train:,} + {self.heldout:,} {self.rows.partition(' (')[0]}"


Counts = tuple[int, int, int | None]  # training, test and validation rows; None where none are set apart


def needs(corpus: Corpus, stages: Iterable[StageName]) -> list[Need]:
    """Return what each of these stages needs of a corpus; it is what the stage itself would ask for."""
    return [_need(corpus, stage) for stage in stages]


def _need(corpus: Corpus, stage: StageName) -> Need:
    examples, pairs = _counts(corpus.examples), _counts(corpus.pairs)
    row = STAGE_TABLE[stage]
    match row.rows:
        case "texts":
            dialogues = examples[0] + 2 * pairs[0], examples[1] + 2 * pairs[1]
            if corpus.documents.train or not any(dialogues):
                return Need(stage, "texts", *_counts(corpus.documents)[:2])
            return Need(stage, "texts of a prompt with an answer", *dialogues)
        case "pairs":
            return Need(stage, PAIRS, *pairs)
        case "demonstrations":
            imitated, either = _counts(corpus.imitated), "demonstrations or preference pairs"
            rows, name = (imitated, "demonstrations") if imitated[0] else (pairs, either)
            return Need(stage, name, *(rows if row.chooses else rows[:2]))
        case "judged":
            labelled = _counts(corpus.labelled)
            return Need(stage, JUDGED, *(labelled if labelled[0] else pairs))
        case "prompts":
            train, heldout, validation = _counts(corpus.with_prompts)
            return Need(stage, "rows with a prompt", train, heldout, validation if row.chooses else None)


def _counts(split: Split[Any]) -> Counts:
    """Return the numbers of training, test and validation rows."""
    validation = len(split) - len(split.train) - len(split.test) if split.has_validation else None
    return len(split.train), len(split.test), validation


def check_rows(recipe: Recipe, stages: Sequence[StageName]) -> None:
    """Raise UserError if a recipe's own files lack rows for one of the unfinished `stages` of a chain.

    The message names what every stage needs and what is there. Other sources are pinned or generated for their stages.
    """
    if recipe.data.source != "files":
        return
    from rlhf.data.load import divide_rows  # imports torch

    corpus = divide_rows(read_source(recipe, Path()), recipe)
    needed = needs(corpus, stages)
    unmet = [need for need in needed if not need.met]
    if not unmet:
        return
    lacking = _lacking(unmet)
    there = ", ".join(str(need) for need in needed if need.met)
    before = stages[: stages.index(unmet[0].stage)]
    others = f". For the others there are (training + held out): {there}" if there else ""
    stop = f", or end the chain at {before[-1]} (`rlhf run {before[-1]}`)" if before else ""
    split = "".join(dict.fromkeys(need.advice for need in unmet))
    raise UserError(
        f"{', '.join(recipe.data.files)}: {lacking}{others}. Nothing was started: add a file with --data{split}{stop}"
    )


def _lacking(unmet: Sequence[Need]) -> str:
    """Return which stages lack which rows, and how many there are."""
    clauses = []
    for lack in dict.fromkeys(need.lack for need in unmet):
        names = [need.stage for need in unmet if need.lack == lack]
        clauses.append(f"{' and '.join(names)} {'needs' if len(names) == 1 else 'need'} {lack}")
    return "; ".join(clauses)
