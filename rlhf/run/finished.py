"""Finished stages: their records, and checks that their results are unchanged.

A run directory may be moved or copied as a whole: no stage reads an absolute path from it. One is there for tools of
others, the base's path in an adapter's configuration.
"""

import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rlhf.errors import UserError
from rlhf.files import read_json, sha256
from rlhf.recipe import StageName
from rlhf.recipe.stages import EVALUATE, RM, STAGE_TABLE
from rlhf.run import reader, records
from rlhf.run.layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CARD, MANIFEST, RESULT_FOLDERS, SAMPLES, SUMMARY

# Run again when an input has changed; the earlier result is renamed, not deleted.
REMADE = tuple(stage for stage, row in STAGE_TABLE.items() if row.remade)
BASE = "base_model_name_or_path"  # in ADAPTER_CONFIG; the only thing in a result that depends on where the run is


def read_summary(path: Path) -> records.Summary | None:
    """Return the summary in a stage's directory; None if the stage is not done. Raises UserError if it is damaged."""
    with reader.advising(_way_out(path, path.name)):
        return reader.read(path / SUMMARY, records.Summary)


def read_manifest(path: Path) -> records.Manifest:
    """Return the manifest in a stage's directory. Raises UserError if it is missing or damaged."""
    with reader.advising(_way_out(path, path.name)):
        manifest = reader.read(path / MANIFEST, records.Manifest)
        if manifest is None:
            raise UserError(f"{path}: manifest.json is missing")
        return manifest


def verified(run_directory: Path, stage: StageName) -> records.Summary:
    """Return the summary of a finished stage below `<out>/<recipe>/<version>`, after checking its files and parents.

    Every file of the result must have the hash that the summary names. Each parent that still exists must be the one
    that the stage was made from. Call this before reading a result of a stage. Raises UserError.
    """
    path = run_directory / stage
    summary = read_summary(path)
    if summary is None:
        raise UserError(f"{path}: {stage} is not done")
    check_result(path, summary)
    for name, digest in read_manifest(path).parents.items():
        parent = run_directory / name / SUMMARY
        if parent.is_file() and sha256(parent) != digest:
            read_summary(parent.parent)  # one that is damaged is named itself
            advice = f"run {stage} again" if stage in REMADE else _way_out(path, stage)
            raise UserError(f"{path} was made from another {name} than {parent.parent}; {advice}")
    return summary


def finished_evaluation(run_directory: Path) -> records.Summary:
    """Return the summary of a run's evaluation.

    Raises UserError unless it is finished, with the command that makes it, and if it has changed since.
    """
    folder = run_directory / EVALUATE
    if not (folder / SUMMARY).is_file():
        command = shlex.join(["rlhf", "run", EVALUATE, str(run_directory), "--with-parents"])
        raise UserError(f"{folder}: no finished evaluation; `{command}` makes one")
    return verified(run_directory, EVALUATE)


def check_result(path: Path, summary: records.Summary, largest: int | None = None) -> None:
    """Compare the files of a stage's result with the hashes in its summary. Raises UserError.

    Files of more than `largest` bytes need only be present.
    """
    stage, digests = summary.stage, summary.result_sha256
    if stage != path.name:
        raise UserError(f"{path}: summary.json is that of {stage}; {_way_out(path, path.name)}")

    def hash_of(file: Path) -> str:
        large = largest is not None and file.stat().st_size > largest
        return digests[str(file.relative_to(path))] if large else result_hash(file)

    if problem := change_in(path, digests, _results(path), hash_of):
        raise UserError(f"{path}/{problem} since {stage} was done; {_way_out(path, stage)}")


def change_in(
    folder: Path, digests: Mapping[str, str], present: Iterable[Path], hash_of: Callable[[Path], str] = sha256
) -> str | None:
    """Return how files of a folder differ from their recorded digests, by name; None if they do not.

    A file among those that are `present` and have no digest is a difference: it might be loaded in place of another.
    """
    for name, digest in digests.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if hash_of(folder / name) != digest:
            return f"{name} has changed"
    added = sorted({str(file.relative_to(folder)) for file in present if file.name[0] != "."} - digests.keys())
    return f"{added[0]} was added" if added else None


def result_files(path: Path) -> list[Path]:
    """Return the files in a stage's directory that hold its result."""
    of_evaluation = [path / SAMPLES] if path.name == EVALUATE else []
    return sorted([*_results(path), *filter(Path.is_file, of_evaluation)])


def _results(path: Path) -> list[Path]:
    """Return the files of a stage's adapter or model, without the page about it."""
    files = [file for folder in RESULT_FOLDERS for file in (path / folder).glob("*")]
    return [file for file in files if file.is_file() and file.name != CARD]


def reward_model_digest(run_directory: Path) -> str | None:
    """Return what names a run's reward model in files with its scores, the beginning of its hash; None without one."""
    summary = read_summary(run_directory / RM)
    digest = summary.result_sha256.get(ADAPTER_WEIGHTS) if summary else None
    return digest and digest[:16]


def result_hash(file: Path) -> str:
    """Return the hash of a file of a result.

    An adapter's configuration is hashed without its base's path, which may change.
    """
    config = read_json(file) if file.name == ADAPTER_CONFIG else None
    if config is None:
        return sha256(file)
    text = json.dumps({**config, BASE: None}, indent=2, sort_keys=True) + "\n"
    return hashlib.sha256(text.encode()).hexdigest()


def _way_out(path: Path, stage: str) -> str:
    """Return the advice that ends every message about a damaged or changed stage."""
    return f"move {path} away and run {stage} again"
