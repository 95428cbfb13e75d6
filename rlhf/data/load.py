"""The recipe's data, read, checked and split, which every stage trains and is evaluated on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from rlhf import recipe as recipes
from rlhf.data import formats
from rlhf.data.quality import flaws
from rlhf.data.quality.leakage import leaks
from rlhf.data.rows import Document, Example, Message, PreferencePair, PromptOnly, Row
from rlhf.data.split import row_key, shuffled, split
from rlhf.data.transcripts import render_hh
from rlhf.data.worlds import lengths, sums, toy, toy_texts
from rlhf.errors import UserError
from rlhf.files import sha256, write_json
from rlhf.observe.console import working
from rlhf.process import distributed
from rlhf.recipe import StageName
from rlhf.recipe.choices import Template
from rlhf.run.directory import Run
from rlhf.run.reader import read
from rlhf.run.records import Generated, Manifest
from rlhf.terminal import say

T = TypeVar("T")
RowT = TypeVar("RowT", bound=Row)
Prompt = tuple[Message, ...]


@dataclass(frozen=True)
class Split(Generic[T]):
    """Rows for training, and held-out rows on which results are reported; no conversation is in both.

    `validation` chooses checkpoints: separate conversations with `data.validation_fraction`, else the held-out rows.
    """

    train: list[T]
    heldout: list[T]
    _validation: list[T] | None = None  # rows that data.validation_fraction sets apart; None without it

    @property
    def validation(self) -> list[T]:
        """Return the rows that choose checkpoints.

        Raises UserError when the recipe sets some apart and there are none.
        """
        if self._validation is None:
            return self.heldout
        if not self._validation:
            raise UserError(
                f"no rows for validation; all {len(self.heldout)} held out are test rows: add a file with --data, or "
                "change data.validation_fraction"
            )
        return self._validation

    def __len__(self) -> int:
        return len(self.train) + len(self.heldout) + len(self._validation or ())

    @property
    def has_validation(self) -> bool:
        """Return whether checkpoints are chosen by other rows than those that results are reported on."""
        return self._validation is not None

    def only(self, keep: Callable[[T], bool]) -> "Split[T]":
        """Return the rows of each part for which `keep` is true."""
        train, heldout = ([row for row in rows if keep(row)] for rows in (self.train, self.heldout))
        validation = None if self._validation is None else [row for row in self._validation if keep(row)]
        return Split(train, heldout, validation)

    def required(self, stage: StageName, rows_needed: str) -> "Split[T]":
        """Return this split if it has rows to train on and held-out rows. Raises UserError otherwise."""
        if self.train and self.heldout:
            return self
        raise UserError(
            f"{stage} needs {rows_needed} on both sides of the split; the data has {len(self.train)} for training and "
            f"{len(self.heldout)} held out: add a file with --data, or change data.heldout_fraction"
        )


def _map_parts(make: Callable[..., list[T]], *sources: Split[Any]) -> Split[T]:
    """Apply `make` to each part of the sources: to their training rows, their held-out rows, their validation rows."""
    has_validation = any(source.has_validation for source in sources)
    return Split(
        make(*(source.train for source in sources)),
        make(*(source.heldout for source in sources)),
        make(*(source._validation if source.has_validation else source.heldout for source in sources))
        if has_validation
        else None,
    )


@dataclass(frozen=True)
class Corpus:
    """The rows of a recipe's data by kind, each split into training, validation and test rows."""

    documents: Split[Document]
    examples: Split[Example]
    pairs: Split[PreferencePair]
    bare_prompts: Split[PromptOnly] = field(default_factory=lambda: Split([], []))  # prompts without a response

    def texts(self, template: Template) -> Split[str]:
        """Return plain texts for pretraining: the documents, or else every dialogue with each of its responses."""
        if self.documents.train:
            texts = _map_parts(lambda documents: [document.text for document in documents], self.documents)
            return texts.required("pretrain", "texts")
        if template != "hh":
            raise UserError("pretraining on dialogues needs tokenizer.template: hh")

        def dialogue_texts(examples: list[Example], pairs: list[PreferencePair]) -> list[str]:
            dialogues = [(e.prompt, e.response) for e in examples]
            dialogues += [(p.prompt, response) for p in pairs for response in (p.chosen, p.rejected)]
            return [f"{render_hh(prompt)} {response}" for prompt, response in dialogues]

        return self._rows_with_answers(_map_parts(dialogue_texts, self.examples, self.pairs), "pretrain", "texts")

    def demonstrations(self) -> Split[Example]:
        """Return the rows that SFT imitates: instruction rows if there are any, else the chosen side of the pairs."""
        rows_needed = "instruction rows or preference pairs"
        if self.examples.train:
            return self._rows_with_answers(self.examples, "sft", rows_needed)

        def chosen_answers(pairs: list[PreferencePair]) -> list[Example]:
            return [Example(pair.prompt, pair.chosen, pair.source) for pair in pairs]

        return self._rows_with_answers(_map_parts(chosen_answers, self.pairs), "sft", rows_needed)

    def preferences(self, stage: StageName) -> Split[PreferencePair]:
        """Return the preference pairs for `stage`. Raises UserError where there are none."""
        return self._rows_with_answers(self.pairs, stage, "preference pairs (prompt, chosen, rejected)")

    def _rows_with_answers(self, rows: Split[T], stage: StageName, rows_needed: str) -> Split[T]:
        """Return the rows from which a stage learns answers.

        Raises UserError where there are none, or only prompts.
        """
        if len(self.bare_prompts) and not len(rows):
            raise UserError(
                f"{stage} needs {rows_needed}, and the data has only prompts without an answer, which only PPO, "
                "RLOO and GRPO can use: add a file with answers to --data (make: DATA=)"
            )
        return rows.required(stage, rows_needed)

    def answers(self) -> dict[Prompt, str]:
        """Return the right answer to each prompt that has one. Raises UserError for a prompt with two of them."""
        first_rows: dict[Prompt, PromptOnly | Example] = {}
        sources: tuple[Split[PromptOnly] | Split[Example], ...] = (self.bare_prompts, self.examples)
        for row in (
            row
            for split_rows in sources
            for row in (*split_rows.train, *split_rows.heldout, *(split_rows._validation or ()))
        ):
            if row.answer is None:
                continue
            earlier = first_rows.setdefault(row.prompt, row)
            if earlier.answer != row.answer:
                raise UserError(
                    f"{row.source} and {earlier.source} have different answers to the same prompt: keep one of them"
                )
        return {prompt: row.answer for prompt, row in first_rows.items() if row.answer is not None}

    def prompts(self, stage: StageName) -> Split[Prompt]:
        """Return every distinct prompt for `stage`, in order of first appearance. Raises UserError for none."""

        def distinct(*kinds: Sequence[Example | PreferencePair | PromptOnly]) -> list[Prompt]:
            return list(dict.fromkeys(row.prompt for rows in kinds for row in rows))

        return _map_parts(distinct, self.examples, self.pairs, self.bare_prompts).required(stage, "prompts")


def load(run: Run) -> Corpus:
    """Read the recipe's data for a stage that has started, record its fingerprint, and compare it with the parents'.

    Raises UserError for bad data, and when the stage's parents, or the run that it resumes, saw other data.
    """
    recipe = run.loaded.recipe
    with working(f"{run.stage}: reading data"), distributed.main_first():
        rows = _read(recipe, run.run_directory / "data")
        corpus, dropped = _split_rows(rows, recipe)
    facts = _fingerprint(rows.report, corpus, run.run_directory)
    if recipe.data.drop is not None:
        facts["dropped"] = dropped
        counts = ", ".join(f"{reason} {count:,}" for reason, count in dropped.items())
        say(f"{run.stage}: data.drop left out {counts}")
    distributed.agree("data", facts["sha256"])
    if facts["left_out"]:
        first = ", ".join(facts["left_out"][:3])
        say(f"{run.stage}: {rows.report.summary()}: {first} … (all in manifest.json)")
    earlier = {run.path: run.resumed_data}
    for parent in recipes.parents(recipe, run.stage):
        folder = run.parents.folder(parent)
        manifest = read(folder / "manifest.json", Manifest)
        earlier[folder] = manifest.data if manifest else None
    for path, parent_data in earlier.items():
        if parent_data and parent_data.sha256 != facts["sha256"]:
            raise UserError(f"the data has changed since {path} was made; choose another --out (make: OUT=…)")
    run.describe(data=facts)
    return corpus


def _split_rows(rows: formats.Rows, recipe: recipes.Recipe) -> tuple[Corpus, dict[str, int]]:
    """Return training and held-out rows without those that `data.drop` removes, and how many rows each reason removed.

    Leaked rows are removed from the training side, so that the held-out rows stay the same and results stay comparable.
    """
    seed, fraction, reasons = recipe.seed, recipe.data.heldout_fraction, recipe.data.drop or ()
    remaining, dropped = flaws.drop(rows, [reason for reason in reasons if reason != "leaked"])
    kinds: list[Any] = [remaining.documents, remaining.examples, remaining.pairs, remaining.prompts]
    sides = [split(items, row_key, seed=seed, fraction=fraction) for items in kinds]
    if "leaked" in reasons:
        training, heldout = ([row for side in sides for row in side[n]] for n in (0, 1))
        removed = {id(row) for row in leaks(training, heldout).leaking}
        dropped["leaked"] = len(removed)
        sides = [([row for row in train if id(row) not in removed], heldout) for train, heldout in sides]
    if reasons and not any(train for train, _ in sides):
        counts = ", ".join(f"{reason} {count:,}" for reason, count in dropped.items())
        raise UserError(f"data.drop leaves nothing to train on ({counts}); leave a reason out of it")
    return Corpus(
        *(_with_validation(shuffled(t, seed), shuffled(h, seed), seed, recipe.data) for t, h in sides)
    ), dropped


def _with_validation(train: list[RowT], heldout: list[RowT], seed: int, data: recipes.Data) -> Split[RowT]:
    """Set the validation rows apart from the other held-out rows, where the recipe asks for it."""
    if data.validation_fraction is None:
        return Split(train, heldout)
    test, validation = split(heldout, row_key, seed=seed, fraction=data.validation_fraction)
    return Split(train, test, validation)


def _read(recipe: recipes.Recipe, folder: Path) -> formats.Rows:
    data = recipe.data
    if data.source == "hub":
        assert data.name and data.revision
        return formats.read_hub(
            data.name,
            data.revision,
            split=data.split,
            data_dir=data.data_dir,
            on_bad_row=data.on_bad_row,
            kind=data.format,
        )
    if data.source == "files":
        return formats.read(data.files, on_bad_row=data.on_bad_row, kind=data.format)
    # Each combination of settings and generator code has a separate folder.
    if data.source == "lengths":
        assert data.lengths
        options = {"seed": recipe.seed, "longest": recipe.longest(), **data.lengths.model_dump()}
        target = _generated_folder(folder, "lengths", options, lengths)
        files = _generate_once(target, ["pairs.jsonl"], lambda: lengths.write(target / "pairs.jsonl", **options))
        return formats.read(files, on_bad_row="skip")
    if data.source == "sums":
        assert data.sums
        options = {"seed": recipe.seed, **data.sums.model_dump()}
        target = _generated_folder(folder, "sums", options, sums)
        return formats.read(
            _generate_once(target, sums.FILES, lambda: sums.write(target, **options)), on_bad_row="stop"
        )
    assert data.toy
    options = {
        "seed": recipe.seed,
        "heldout_fraction": data.heldout_fraction,
        "validation_fraction": data.validation_fraction or 0.0,
        **data.toy.model_dump(),
    }
    target = _generated_folder(folder, "toy", options, toy, toy_texts)
    files = _generate_once(target, toy.files(data.toy.demonstrations), lambda: toy.write(target, **options))
    return formats.read(files, on_bad_row="stop")


def _generated_folder(folder: Path, kind: str, options: Mapping[str, object], *makers: ModuleType) -> Path:
    """Make a folder for generated rows, named by the options and the code that they are made from."""
    code = [sha256(Path(str(maker.__file__))) for maker in makers]
    generated = folder / f"{kind}-{recipes.content_hash([options, *code])[:12]}"
    generated.mkdir(parents=True, exist_ok=True)
    return generated


def _generate_once(folder: Path, names: Sequence[str], write: Callable[[], None]) -> list[Path]:
    """Return the files that `write` makes in `folder`, and make them only once; made.json has their hashes.

    Without made.json the files may be cut off and are made again. Raises UserError for one that has changed since.
    """
    files, record = [folder / name for name in names], folder / "made.json"
    hashes = read(record, Generated)
    if hashes is None or not all(file.is_file() for file in files):
        write()
        write_json(record, {"sha256": {file.name: sha256(file) for file in files}})
        return files
    changed = [file for file in files if sha256(file) != hashes.sha256.get(file.name)]
    if changed:
        raise UserError(f"{changed[0]} has changed since it was made here; delete {folder}, and it is made again")
    return files


def _fingerprint(report: formats.ReadReport, corpus: Corpus, root: Path) -> dict[str, Any]:
    """Return the facts of the data for manifest.json: files, counts, rows left out.

    Files below `root` are named relative to it, because it may move.
    """

    def name(file: str) -> str:
        path = Path(file)
        return str(path.relative_to(root)) if path.is_relative_to(root) else file

    return {
        "sha256": recipes.content_hash([file.sha256 for file in report.files]),
        "files": [{"name": name(f.name), "sha256": f.sha256, "rows": f.rows, "kind": f.kind} for f in report.files],
        "documents": len(corpus.documents),
        "examples": len(corpus.examples),
        "pairs": len(corpus.pairs),
        "prompts": len(corpus.bare_prompts),
        "malformed": len(report.malformed),
        "prompts_differ": len(report.prompts_differ),
        "identical": len(report.identical),
        "empty": len(report.empty),
        "left_out": [
            *(f"{source}: {reason}" for source, reason in report.malformed),
            *(f"{source}: prompts differ" for source in report.prompts_differ),
            *(f"{source}: identical answers" for source in report.identical),
            *(f"{source}: empty answer" for source in report.empty),
        ],
    }
