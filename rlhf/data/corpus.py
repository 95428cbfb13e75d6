"""The rows of a recipe's data: for training, for the choice of checkpoints, and for results."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from rlhf.data.normal import normal_answer, normal_prompt
from rlhf.data.rows import Document, Example, Message, PreferencePair, PromptOnly, Row, RowT, of_kind, responses
from rlhf.data.transcripts import render_hh
from rlhf.errors import UserError
from rlhf.recipe import StageName
from rlhf.recipe.choices import Template
from rlhf.recipe.stages import PRETRAIN, SECOND_RM, SFT, STAGE_TABLE

T = TypeVar("T")
U = TypeVar("U")
Prompt = tuple[Message, ...]
Dialogue = Example | PreferencePair | PromptOnly  # rows that have a prompt


@dataclass(frozen=True)
class Split(Generic[T]):
    """Rows for training, and test rows, on which results are reported; no conversation is in both.

    `validation` chooses checkpoints: separate conversations with `data.validation_fraction`, else the test rows.
    `second` are training rows of the second reward model alone, with `data.second_rm_fraction`.
    """

    train: list[T]
    test: list[T]
    _validation: list[T] | None = None  # rows that data.validation_fraction sets apart; None without it
    second: list[T] = field(default_factory=list)

    @property
    def validation(self) -> list[T]:
        """Return the rows that choose checkpoints.

        Raises UserError when the recipe sets some apart and there are none.
        """
        if self._validation is None:
            return self.test
        if not self._validation:
            raise UserError(
                f"no rows for validation; all {len(self.test)} held out are test rows: add a file with --data, or "
                "change data.validation_fraction"
            )
        return self._validation

    def __len__(self) -> int:
        return len(self.train) + len(self.test) + len(self._validation or ()) + len(self.second)

    def __iter__(self) -> Iterator[T]:
        return itertools.chain(self.train, self.test, self._validation or (), self.second)

    def map(self, make: Callable[[list[T]], list[U]]) -> "Split[U]":
        """Apply `make` to each part: to the training rows, the test rows, the validation rows, the second ones."""
        validation = None if self._validation is None else make(self._validation)
        return Split(make(self.train), make(self.test), validation, make(self.second))

    def only(self, keep: Callable[[T], bool]) -> "Split[T]":
        """Return the rows of each part for which `keep` is true."""
        return self.map(lambda rows: [row for row in rows if keep(row)])

    def required(self, stage: StageName, rows_needed: str) -> "Split[T]":
        """Return this split if it has rows to train on and held-out rows. Raises UserError otherwise."""
        if self.train and self.test:
            return self
        raise UserError(
            f"{stage} needs {rows_needed} on both sides of the split; the data has {len(self.train)} for training and "
            f"{len(self.test)} held out: add a file with such rows to --data, or change data.heldout_fraction (rows "
            "with one first user message stay on one side)"
        )


@dataclass(frozen=True)
class Corpus:
    """The rows of a recipe's data: training, validation and test rows, in each part one kind after another."""

    rows: Split[Row]

    def _of(self, kind: type[RowT]) -> Split[RowT]:
        return self.rows.map(lambda rows: of_kind(rows, kind))

    @property
    def documents(self) -> Split[Document]:
        return self._of(Document)

    @property
    def examples(self) -> Split[Example]:
        return self._of(Example)

    @property
    def pairs(self) -> Split[PreferencePair]:
        return self._of(PreferencePair)

    @property
    def bare_prompts(self) -> Split[PromptOnly]:
        """Return the prompts without a response."""
        return self._of(PromptOnly)

    @property
    def with_prompts(self) -> Split[Dialogue]:
        """Return the rows that have a prompt: all but the documents."""
        return self.rows.map(lambda rows: [row for row in rows if not isinstance(row, Document)])

    def of_stage(self, stage: StageName, template: Template) -> Split[Any]:
        """Return the rows that a stage learns from, or looks at. Raises UserError where it has too few."""
        kinds: dict[str, Callable[[], Split[Any]]] = {
            "texts": lambda: self.texts(template),
            "demonstrations": self.demonstrations,
            "pairs": lambda: self.preferences(stage),
            "judged": lambda: self.judged(stage),
            "prompts": lambda: self.prompts(stage),
        }
        rows = kinds[STAGE_TABLE[stage].rows]()
        if STAGE_TABLE[stage].chooses:
            _ = rows.validation  # there must be some
        return rows

    def texts(self, template: Template) -> Split[str]:
        """Return plain texts for pretraining: the documents, or else every dialogue with each of its responses."""
        if self.documents.train:
            texts = self.documents.map(lambda documents: [document.text for document in documents])
            return texts.required(PRETRAIN, "texts")
        if template != "hh":
            raise UserError("pretraining on dialogues needs tokenizer.template: hh")

        def rendered(rows: list[Dialogue]) -> list[str]:
            return [f"{render_hh(row.prompt)} {response}" for row in rows for response in responses(row)]

        return self.with_prompts.map(rendered).required(PRETRAIN, "texts")

    @property
    def imitated(self) -> Split[Example]:
        """Return the examples whose response is to be imitated: all but those that are labelled bad."""
        return self.examples.only(lambda example: example.good is not False)

    @property
    def labelled(self) -> Split[Example]:
        """Return the examples whose response is labelled good or bad."""
        return self.examples.only(lambda example: example.good is not None)

    @property
    def has_responses(self) -> bool:
        """Return whether any row has a response to imitate, as demonstrations and pairs have."""
        return len(self.imitated) + len(self.pairs) > 0

    def demonstrations(self) -> Split[Example]:
        """Return the rows that SFT imitates: demonstrations if there are any, else the chosen side of the pairs."""

        def chosen_answers(pairs: list[PreferencePair]) -> list[Example]:
            return [Example(pair.prompt, pair.chosen, pair.source) for pair in pairs]

        rows = self.imitated if self.imitated.train else self.pairs.map(chosen_answers)
        return rows.required(SFT, "demonstrations or preference pairs")

    def preferences(self, stage: StageName) -> Split[PreferencePair]:
        """Return the preference pairs for `stage`. Raises UserError where there are none."""
        pairs = replace(self.pairs, train=self.pairs.second) if stage == SECOND_RM else self.pairs
        return pairs.required(stage, "preference pairs (prompt, chosen, rejected)")

    def judged(self, stage: StageName) -> Split[Example]:
        """Return the answers that are labelled good or bad; without any, both sides of each pair.

        Raises UserError where there are none.
        """

        def sides(pairs: list[PreferencePair]) -> list[Example]:
            return [
                Example(pair.prompt, text, pair.source, good=good)
                for pair in pairs
                for text, good in ((pair.chosen, True), (pair.rejected, False))
            ]

        rows = self.labelled if self.labelled.train else self.pairs.map(sides)
        return rows.required(stage, "labelled answers (prompt, completion, label) or preference pairs")

    def right_answers(self) -> dict[Prompt, str]:
        """Return the right answer to each prompt that has one. Raises UserError for a prompt with two of them."""
        first_answers: dict[Hashable, tuple[Hashable, str]] = {}
        answers: dict[Prompt, str] = {}
        for row in (*self.bare_prompts, *self.examples):
            if row.right_answer is None:
                continue
            answer = normal_answer(row.right_answer)
            earlier, source = first_answers.setdefault(normal_prompt(row.prompt), (answer, row.source))
            if earlier != answer:
                places = f"{row.source} and {source}"
                raise UserError(f"{places} have different right answers to one prompt: keep one of them")
            answers.setdefault(row.prompt, row.right_answer)
        return answers

    def columns(self, names: Iterable[str]) -> dict[Prompt, dict[str, Any]]:
        """Return the values of the named columns beside each prompt, for reward functions; a missing one is left out.

        Raises UserError where rows of one prompt differ in one of them.
        """
        names, found = {*names}, dict[Prompt, tuple[dict[str, Any], str]]()
        for row in self.with_prompts:
            values = {name: value for name, value in row.columns.items() if name in names}
            first, source = found.setdefault(row.prompt, (values, row.source))
            if differing := next((n for n in names if first.get(n) != values.get(n)), None):
                raise UserError(
                    f"{row.source} and {source} have one prompt and different values of '{differing}', which a reward "
                    "reads: keep one of them"
                )
        return {prompt: values for prompt, (values, _) in found.items()}

    def prompts(self, stage: StageName) -> Split[Prompt]:
        """Return every distinct prompt for `stage`, in order of first appearance. Raises UserError for none."""
        prompts = self.with_prompts.map(lambda rows: list(dict.fromkeys(row.prompt for row in rows)))
        return prompts.required(stage, "prompts")
