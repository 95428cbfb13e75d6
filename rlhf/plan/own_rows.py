"""The rows of a recipe's own files, for projected hours: how many rows a stage trains on, and how long they are.

They are read, refused and divided as a run would do it. Peaks of memory do not depend on them: those are of the longest
rows that a recipe admits.
"""

import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.data.normal import words
from rlhf.data.source import read_source
from rlhf.data.transcripts import render_hh
from rlhf.errors import UserError
from rlhf.recipe import Recipe, StageName, TrainingName
from rlhf.recipe.schema_model import Model, Tokenizer, is_gguf
from rlhf.recipe.stages import STAGE_TABLE, TRAINING_STAGES

if TYPE_CHECKING:
    from rlhf.data.corpus import Prompt, Split
    from rlhf.data.tokenize import DialogueTokenizer

SAMPLE = 2000  # rows whose lengths are counted; all rows are counted as rows
UNCUT = 10**9  # tokens
Lengths = Sequence[tuple[int, int, int]]  # tokens of a prompt, of the chosen and of the rejected answer


class Rows(NamedTuple):
    """The rows of one stage."""

    train: int
    heldout: int  # of which checkpoints are chosen, and to which SFT, DPO and KTO sample answers
    lengths: Lengths  # of at most SAMPLE training rows

    def of_rank(self, processes: int) -> "Rows":
        """Return the share of one of several processes."""
        return self._replace(train=-(-self.train // processes), heldout=-(-self.heldout // processes))


class OwnRows(NamedTuple):
    """The rows of the stages that these files can train, the reason for each other stage, and what lengths count."""

    stages: dict[TrainingName, Rows]
    lacking: dict[TrainingName, str]
    unit: str


def read_rows(recipe: Recipe, stages: Iterable[StageName]) -> OwnRows | None:
    """Return the rows of those of `stages` that train; None if the recipe has no files of its own, or one is missing.

    Raises UserError for rows that a run would refuse.
    """
    files = recipe.data.files
    if recipe.data.source != "files" or not all(Path(file).is_file() for file in files):
        return None
    from rlhf.data.load import divide_rows  # these two import torch
    from rlhf.data.trainable import trainable

    rows = read_source(recipe, Path())
    tokenizer = tokenizer_at_hand(recipe)
    if tokenizer is not None:
        rows = trainable(rows, tokenizer, recipe.data.on_bad_row)
    corpus = divide_rows(rows, recipe)
    training = [stage for stage in TRAINING_STAGES if stage in set(stages)]
    lacking: dict[TrainingName, str] = {}
    counted: dict[TrainingName, Rows] = {}
    for stage in training:
        try:
            rows_of_stage = corpus.of_stage(stage, recipe.tokenizer.template)
        except UserError as error:
            lacking[stage] = str(error)
        else:
            counted[stage] = _counted(rows_of_stage, STAGE_TABLE[stage].rows, tokenizer)
    return OwnRows(counted, lacking, "words" if tokenizer is None else "tokens")


def _counted(split: "Split[Any]", kind: str, tokenizer: "DialogueTokenizer | None") -> Rows:
    """Return the numbers of a stage's rows, and the lengths of some in tokens, or without a tokenizer in words."""
    sample = random.Random(0).sample(split.train, min(SAMPLE, len(split.train)))
    prompts, *answers = zip(*(_dialogue(row, kind) for row in sample), strict=True)
    if tokenizer is None:
        texts = [[render_hh(prompt) for prompt in prompts], *answers]
        columns = [[len(words(text)) for text in column] for column in texts]
    else:
        tokens = [tokenizer.hf(list(column), add_special_tokens=False)["input_ids"] for column in answers]
        columns = [[len(ids) for ids in column] for column in (tokenizer.encode_prompts(prompts, UNCUT)[0], *tokens)]
    return Rows(len(split.train), len(split.validation), list(zip(*columns, strict=True)))


def _dialogue(row: Any, kind: str) -> "tuple[Prompt, str, str]":
    """Return the prompt, the chosen and the rejected answer of a row: both the same in one that has one, or empty."""
    if kind == "pairs":
        return row.prompt, row.chosen, row.rejected
    return (row, "", "") if kind == "prompts" else (row.prompt, row.response, row.response)


def tokenizer_at_hand(recipe: Recipe) -> "DialogueTokenizer | None":
    """Return the recipe's tokenizer if it is on this machine; None for one that is not, or that a run makes."""
    settings = recipe.tokenizer
    folder = _folder(settings, recipe.model)
    if folder is None:
        return None
    from rlhf.data import tokenize
    from rlhf.files import reading

    with suppress(UserError):
        return tokenize.load(folder, settings, reading(folder))
    return None


def _folder(settings: Tokenizer, model: Model) -> Path | None:
    """Return the folder of a saved tokenizer, or of one that was downloaded before; None without one."""
    if settings.source == "package" and model.sha256 is not None:
        from rlhf.models import gguf

        folder = gguf.folder_for(model.sha256)
        return folder if gguf.record_of(folder) else None
    if settings.source not in ("local", "hub") or settings.name is None:
        return None
    if settings.source == "local" and is_gguf(settings.name):
        from rlhf.models import gguf

        return gguf.converted(Path(settings.name)) if Path(settings.name).is_file() else None
    if settings.source == "local":
        return Path(settings.name) if Path(settings.name).is_dir() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(settings.name, "tokenizer_config.json", revision=settings.revision)
    return Path(found).parent if isinstance(found, str) else None
