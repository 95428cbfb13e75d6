"""The data of a stage in its run directory: read once for all ranks, noted in the manifest, and its parents' too."""

from rlhf import recipe as recipes
from rlhf.data import tokenize
from rlhf.data.corpus import Corpus
from rlhf.data.load import read_corpus
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.errors import UserError
from rlhf.models.loading import load_tokenizer
from rlhf.process import distributed
from rlhf.recipe.stages import PRETRAIN
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
        distributed.agree("base", run.base_hashes)
        tokenizer = load_tokenizer(run.base)
    return tokenizer, load_corpus(run, tokenizer)


def load_corpus(run: StageRun, tokenizer: DialogueTokenizer | None = None) -> Corpus:
    """Return the rows for a stage that has started, as `read_corpus`, and say how many. Its manifest describes them.

    Raises UserError for bad data, for too few rows, and when the stage's parents, or the run that it resumes, saw other
    data.
    """
    loaded = run.loaded
    with working(f"{run.stage}: reading data"), distributed.main_first():
        corpus, facts, notes = read_corpus(loaded.recipe, run.run_directory, tokenizer)
    rows = corpus.of_stage(run.stage, loaded.recipe.tokenizer.template)
    there = f"{len(rows.train):,} rows for training and {len(rows.test):,} held out"
    where = f"on {loaded.recipe.hardware.device}, into {run.path}"
    say(f"{run.stage}: {loaded.name} {loaded.version}, {there}, {where}{run.expected and f', {run.expected}'}")
    for note in notes:
        say(f"{run.stage}: {note}")
    distributed.agree("data", facts.sha256)
    earlier = {run.path: run.resumed_data}
    for folder in map(run.folder, recipes.parents(loaded.recipe, run.stage)):
        manifest = read(folder / MANIFEST, Manifest)
        earlier[folder] = manifest.data if manifest else None
    for folder, data in earlier.items():
        if data and data.sha256 != facts.sha256:
            raise UserError(f"the data has changed since {folder} was made; choose another --out")
    run.describe(data=facts.model_dump(exclude_unset=True))
    return corpus
