"""The data of a stage in its run directory: read once for all ranks, noted in the manifest, and its parents' too."""

from collections.abc import Iterator
from pathlib import Path

from rlhf.data import tokenize
from rlhf.data.corpus import Corpus
from rlhf.data.load import read_corpus
from rlhf.data.needs import needs
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.errors import UserError
from rlhf.models import identity
from rlhf.models.loading import load_tokenizer
from rlhf.process import distributed
from rlhf.recipe.stages import EVALUATE, PRETRAIN
from rlhf.run.directory import StageRun
from rlhf.run.layout import MANIFEST
from rlhf.run.reader import read
from rlhf.run.records import Manifest
from rlhf.terminal import say
from rlhf.terminal.progress import working


def stage_input(run: StageRun) -> tuple[DialogueTokenizer, Corpus]:
    """Return what every stage works on: the base's tokenizer, and the rows. Before there is a base it is untrained."""
    if run.stage == PRETRAIN:
        of_recipe = run.loaded.recipe.tokenizer
        assert of_recipe.vocab_size
        tokenizer = DialogueTokenizer(tokenize.train([], of_recipe.vocab_size), of_recipe.template)  # control tokens
    else:
        _require_base_of_earlier_runs(run)
        tokenizer = load_tokenizer(run.base)
    return tokenizer, load_corpus(run, tokenizer)


def load_corpus(run: StageRun, tokenizer: DialogueTokenizer | None = None) -> Corpus:
    """Return the rows for a stage that has started, as `read_corpus`. Their fingerprint goes into its manifest.

    Raises UserError for bad data, and when the stage's parents, or the run that it resumes, saw other data.
    """
    with working(f"{run.stage}: reading data"), distributed.main_first():
        corpus, facts, notes = read_corpus(run.loaded.recipe, run.run_directory, tokenizer)
    if run.is_main:
        say(_opening(run, corpus))
    for note in notes:
        say(f"{run.stage}: {note}")
    distributed.agree("data", facts.sha256)
    _require_data_of_earlier_runs(run, facts.sha256)
    run.describe(data=facts.model_dump(exclude_unset=True))
    return corpus


def _opening(run: StageRun, corpus: Corpus) -> str:
    """Return the line with which a stage begins: recipe, rows, device, folder, and the expected time if it is known."""
    loaded = run.loaded
    (rows,) = needs(corpus, [run.stage])
    there = f"{rows.train:,} rows for training and {rows.heldout:,} held out"
    what = f"{rows.heldout:,} rows held out" if run.stage == EVALUATE else there
    where = f"on {loaded.recipe.hardware.device}, into {run.path}"
    return f"{run.stage}: {loaded.name} {loaded.version}, {what}, {where}{run.expected and f', {run.expected}'}"


def _earlier_runs(run: StageRun) -> Iterator[tuple[Path, Manifest]]:
    """Yield the folder and the manifest of the run that is resumed, and of each stage that this one builds on."""
    if run.resumed is not None:
        yield run.path, run.resumed
    for parent in run.parents.hashes():
        folder = run.parents.folder(parent)
        if (manifest := read(folder / MANIFEST, Manifest)) is not None:
            yield folder, manifest


def _require_data_of_earlier_runs(run: StageRun, data_sha256: str) -> None:
    """Raise UserError if the stage's parents, or the run that it resumes, saw other data."""
    for path, manifest in _earlier_runs(run):
        if manifest.data and manifest.data.sha256 != data_sha256:
            raise UserError(f"the data has changed since {path} was made; choose another --out")


def _require_base_of_earlier_runs(run: StageRun) -> None:
    """Note what identifies base and tokenizer. Raises UserError if a parent, or what is resumed, or a rank has others.

    Runs without these hashes, from the hub or older, are not compared.
    """
    found = identity.files_of(run.base)
    distributed.agree("base", found)
    for path, manifest in _earlier_runs(run):
        made = manifest.base_files
        changed = sorted(name for name, _ in made.items() ^ found.items()) if made else []
        if changed:
            raise UserError(
                f"{run.loaded.recipe.model.name}: {changed[0]} is not the one with which {path} was made: put that "
                "back, or choose another --out"
            )
    run.describe(base_files={**found})
