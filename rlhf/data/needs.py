"""Which rows each stage trains on, and whether data have them on both sides of the split."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rlhf.data.corpus import Corpus, Split
from rlhf.data.formats import ParsedRows
from rlhf.data.rows import Row
from rlhf.data.source import read_source
from rlhf.data.split import divide, row_key
from rlhf.errors import UserError
from rlhf.recipe import Recipe, StageName

RowT = TypeVar("RowT", bound=Row)
PAIRS = "preference pairs (prompt, chosen, rejected)"


class Need(NamedTuple):
    """The rows that a stage needs, and how many of them there are on each side of the split."""

    stage: StageName
    rows: str
    train: int
    heldout: int

    @property
    def met(self) -> bool:
        """Return whether there are rows on both sides."""
        return bool(self.train and self.heldout)

    def __str__(self) -> str:
        return f"{self.stage} {self.rows.partition(' (')[0]} {self.train:,} + {self.heldout:,}"


def needs(corpus: Corpus, stages: Iterable[StageName]) -> list[Need]:
    """Return what each of these stages needs of a corpus; it is what the stage itself would ask for."""
    return [_need(corpus, stage) for stage in stages]


def _need(corpus: Corpus, stage: StageName) -> Need:
    examples, pairs = _counts(corpus.examples), _counts(corpus.pairs)
    match stage:
        case "pretrain":
            dialogues = tuple(one + 2 * two for one, two in zip(examples, pairs, strict=True))
            return Need(stage, "texts", *(_counts(corpus.documents) if corpus.documents.train else dialogues))
        case "rm" | "dpo":
            return Need(stage, PAIRS, *pairs)
        case "sft" | "merge":
            rows, name = (examples, "demonstrations") if examples[0] else (pairs, "demonstrations or preference pairs")
            return Need(stage, name, *rows)
        case _:
            prompts = zip(examples, pairs, _counts(corpus.bare_prompts), strict=True)
            return Need(stage, "rows with a prompt", *map(sum, prompts))


def _counts(split: Split[Any]) -> tuple[int, int]:
    """Return the numbers of training rows and test rows."""
    return len(split.train), len(split.test)


def check_rows(recipe: Recipe, stages: Sequence[StageName]) -> None:
    """Raise UserError if a recipe's own files lack rows for one of the unfinished `stages` of a chain.

    The message names what every stage needs and what is there. Other sources are pinned or generated for their stages.
    """
    if recipe.data.source != "files":
        return
    from rlhf.data.load import divide_rows  # imports torch

    corpus, _ = divide_rows(read_source(recipe, Path()), recipe)
    needed = needs(corpus, stages)
    unmet = [need for need in needed if not need.met]
    if not unmet:
        return
    lacking = "; ".join(_lack(rows, [need for need in unmet if need.rows == rows]) for rows in _kinds(unmet))
    there = ", ".join(str(need) for need in needed if need.met)
    before = stages[: stages.index(unmet[0].stage)]
    others = f". For the others there are (training + held out): {there}" if there else ""
    stop = f", or end the chain at {before[-1]} (`rlhf run {before[-1]}`, make {before[-1]})" if before else ""
    some = any(need.train or need.heldout for need in unmet)
    split = ", change data.heldout_fraction" if some else ""
    raise UserError(
        f"{', '.join(recipe.data.files)}: {lacking}{others}. Nothing was started: add a file with --data (make: DATA=)"
        f"{split}{stop}"
    )


def stages_in_words(rows: ParsedRows, seed: int, fraction: float) -> str:
    """Return which stages these rows can train and which they cannot, with the rows on each side of the split."""

    def split(kind: Sequence[RowT]) -> Split[RowT]:
        return Split(*divide(kind, row_key, seed=seed, fraction=fraction))

    corpus = Corpus(split(rows.documents), split(rows.examples), split(rows.pairs), split(rows.bare_prompts))
    needed = needs(corpus, ("pretrain", "sft", "rm", "dpo"))
    met, unmet = [need for need in needed if need.met], [need for need in needed if not need.met]
    can = ", ".join(map(str, met)) or "no stage that learns answers"
    ppo = "; PPO needs rm too" if any(need.stage == "rm" for need in unmet) else ""
    cannot = "; ".join(_lack(kind, [need for need in unmet if need.rows == kind]) for kind in _kinds(unmet))
    return f"these rows can train (training + held out): {can}" + (f". {cannot}{ppo}" if cannot else "")


def _kinds(unmet: Sequence[Need]) -> list[str]:
    return list(dict.fromkeys(need.rows for need in unmet))


def _lack(rows: str, unmet: Sequence[Need]) -> str:
    """Return which stages lack these rows, and how many there are."""
    names, first = " and ".join(need.stage for need in unmet), unmet[0]
    verb = "needs" if len(unmet) == 1 else "need"
    there = f"there are {first.train:,} for training and {first.heldout:,} held out"
    return f"{names} {verb} {rows} on both sides of the split, and {there}"
