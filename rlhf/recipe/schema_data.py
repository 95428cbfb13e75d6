"""The keys of a recipe about its data: the source, the toy worlds, what its rows are, and the held-out part."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from rlhf.recipe.bounds import MadeRows, MadeRowsOrZero, Name
from rlhf.recipe.choices import LengthsShape, OnBadRow, RowSet, RowType, Turns
from rlhf.recipe.strict import AsTuple, Section, problems_of_source


class Toy(Section):
    """The toy world: synthetic dialogues with a known true reward."""

    documents: MadeRows  # pretraining transcripts
    pairs: MadeRows  # labelled preference pairs, train and held-out together
    bayes_accuracy: Annotated[float, Field(gt=0.5, le=0.9)]  # of the best possible reward model
    corpus: Literal["tutors", "web"] = "tutors"  # the authors of the transcripts: rlhf/data/worlds/toy.py
    demonstrations: MadeRowsOrZero = 0  # instruction rows for SFT; 0: SFT imitates the chosen answers
    subjects: Annotated[int, Field(ge=2, le=8)] = 8  # most subjects of a family of questions


class Sums(Section):
    """Questions with answers that can be checked: rlhf/data/worlds/sums.py."""

    documents: MadeRows  # pretraining transcripts
    demonstrations: MadeRows  # instruction rows for SFT
    pairs: MadeRows  # each of a right and a wrong answer
    accuracy: Annotated[float, Field(gt=0, lt=1)]  # share of right answers in documents and demonstrations
    largest: Annotated[int, Field(gt=0, le=99)]  # largest number in a question


class Additions(Section):
    """Sums of two numbers for a model that can read: rlhf/data/worlds/additions.py."""

    prompts: MadeRows  # questions with answers, training and held-out together
    demonstrations: MadeRowsOrZero = 0  # other questions with right answers, for SFT
    largest: Annotated[int, Field(gt=0, le=99)]  # largest number in a question; the smallest is 1

    def problems(self) -> Iterator[str]:
        if self.prompts + self.demonstrations > self.largest**2:
            yield f"largest: {self.largest} gives fewer questions than prompts and demonstrations together"


class ReasoningGym(Section):
    """Questions of a task of the package reasoning-gym, whose verifier scores answers: rlhf/data/worlds/gym.py."""

    version: Annotated[str, Field(pattern=r"^[0-9][0-9A-Za-z.+-]*$")]  # of the package: another makes other questions
    task: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
    size: MadeRows  # questions, training and held-out together, each once
    config: dict[Name, Any] = Field(default={})  # keys of the task's own, such as its difficulty

    def problems(self) -> Iterator[str]:
        if own := {"seed", "size"} & self.config.keys():
            yield f"config.{own.pop()}: it follows from the recipe's seed and from size; remove it"


class Lengths(Section):
    """Preference pairs of meaningless words: only their lengths are real."""

    pairs: MadeRows
    shape: LengthsShape


HUB_KEYS = ("name", "revision", "data_dir", "split")  # of a set of the hub
ROW_KEYS = ("columns", "labels", "ignore")  # about the columns of the rows that a recipe names
FORMATS = ("auto", *get_args(RowType), *get_args(RowSet))


class Data(Section):
    """The data: its source, what its rows are, and its held-out part."""

    source: Literal["toy", "sums", "additions", "reasoning_gym", "files", "hub", "lengths"]
    files: Annotated[tuple[Name, ...], AsTuple] = ()
    name: Name | None = None
    revision: Name | None = None
    data_dir: Name | None = None
    split: Name | None = None  # of the hub's set; null: train
    format: Name = "auto"  # a type of TRL's, a set's name, or module:function of one's own; auto: by the columns
    columns: dict[Name, Name] | None = None  # where the columns of the type are: {prompt: instruction}
    labels: dict[Name, bool] | None = None  # words under `label`: {thumbs_up: true, thumbs_down: false}
    ignore: Annotated[tuple[Name, ...] | None, AsTuple] = None  # columns and fields of messages that no answer needs
    turns: Turns = "all"  # of a conversation: every answer is imitated, or the last one
    on_bad_row: OnBadRow
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)]
    # Share of all conversations that only choose checkpoints. They are held out; results are reported on the other
    # held-out rows. null: all held-out rows serve both purposes.
    validation_fraction: Annotated[float | None, Field(gt=0, lt=1)] = None
    # Share of the training conversations that only the second reward model learns from. null: there is none.
    second_rm_fraction: Annotated[float | None, Field(gt=0, lt=1)] = None
    toy: Toy | None = None
    sums: Sums | None = None
    additions: Additions | None = None
    reasoning_gym: ReasoningGym | None = None
    lengths: Lengths | None = None

    @property
    def has_true_reward(self) -> bool:
        """Return whether the true reward of a response is known."""
        return self.source == "toy"

    def own_keys(self) -> list[str]:
        """Return the keys that are set and that hold for the recipe's own rows, but not for others in their place."""
        return [key for key in (*HUB_KEYS, *ROW_KEYS) if getattr(self, key) is not None]

    def problems(self) -> Iterator[str]:
        key_of = {"hub": "name"}  # the key that a source needs, where it is not named as the source
        only = {"files": ("files",)} | dict.fromkeys(HUB_KEYS, ("hub",)) | dict.fromkeys(ROW_KEYS, ("files", "hub"))
        yield from problems_of_source(self, {self.source: (key_of.get(self.source, self.source),)}, only)
        if self.format not in FORMATS and not re.fullmatch(r"[\w.]+:\w+", self.format):
            yield f"format: {self.format!r} is none of {', '.join(FORMATS)}, nor module:function of yours"
        if self.split is not None and not re.fullmatch(r"[\w.-]+", self.split):
            yield f"split: {self.split!r} is not the name of one split, such as train_prefs"
        if self.validation_fraction is not None and self.validation_fraction >= self.heldout_fraction:
            yield f"validation_fraction: {self.validation_fraction} must be below heldout_fraction, whose part it is"
