"""Finished stages: their records, and checks that their results are unchanged.

A run directory may be moved or copied as a whole: no stage reads an absolute path from it. One path is there for tools
of others, the base's path in an adapter's configuration; `follow_base` corrects it when a stage is next run.
"""

import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from rlhf.errors import UserError
from rlhf.files import read_json, replacing, sha256
from rlhf.recipe import StageName
from rlhf.recipe.published import Figure, Verdict, compare_total
from rlhf.recipe.stages import EVALUATE, POLICIES, PRETRAIN, STAGE_TABLE, STAGES
from rlhf.run import reader, records
from rlhf.run.layout import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CARD,
    MANIFEST,
    MODEL,
    RESULT_FOLDERS,
    SAMPLES,
    SUMMARY,
)

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


def stage_folder(run_directory: Path, stage: StageName) -> Path:
    """Return the directory of a stage in a run directory, or the one elsewhere that the run was made from.

    A run whose parents lie in another run directory (`rlhf run --reuse`) names their places in its manifests, relative
    to its own. Raises UserError for a damaged manifest.
    """
    inside = run_directory / stage
    if not inside.exists():
        for manifest in sorted(run_directory.glob(f"*/{MANIFEST}")):
            if manifest.parent.name not in STAGES:
                continue
            relative = read_manifest(manifest.parent).parents_from.get(stage)
            if relative is not None:
                return Path(os.path.normpath(run_directory.resolve() / relative))
    return inside


def verified(run_directory: Path, stage: StageName) -> records.Summary:
    """Return the summary of a finished stage below `<out>/<recipe>/<version>`, after checking its files and parents.

    Every file of the result must have the hash that the summary names. Each parent that still exists must be the one
    that the stage was made from. Call this before reading a result of a stage. Raises UserError.
    """
    path = stage_folder(run_directory, stage)
    summary = read_summary(path)
    if summary is None:
        raise UserError(f"{path}: {stage} is not done")
    check_result(path, summary)
    for name, digest in read_manifest(path).parents.items():
        parent = stage_folder(path.parent, name) / SUMMARY
        if parent.is_file() and sha256(parent) != digest:
            read_summary(parent.parent)  # one that is damaged is named itself
            advice = f"run {stage} again" if stage in REMADE else _way_out(path, stage)
            raise UserError(f"{path} was made from another {name} than {parent.parent}; {advice}")
    return summary


def finished_evaluation(run_directory: Path) -> records.Summary:
    """Return the summary of a run's evaluation.

    Raises UserError unless it is finished, with the command that makes it, and if it has changed since.
    """
    if not (run_directory / EVALUATE / SUMMARY).is_file():
        begun = any((run_directory / stage / MANIFEST).is_file() for stage in STAGES)
        words = ["rlhf", "run", EVALUATE, *([str(run_directory)] if begun else []), "--with-parents"]
        line = f"`{shlex.join(words)}`" + ("" if begun else " with the options of the run")
        if (run_directory / EVALUATE / MANIFEST).is_file():
            earlier = [folder.name for folder in run_directory.glob(f"{EVALUATE}.before-*")]
            kept = f"; an earlier one is in {sorted(earlier)[-1]}" if earlier else ""
            raise UserError(
                f"{run_directory / EVALUATE}: the evaluation still runs, or was stopped: let it finish, or run {line} "
                f"again{kept}"
            )
        raise UserError(f"{run_directory / EVALUATE}: no finished evaluation; first {line}")
    return verified(run_directory, EVALUATE)


def not_evaluated(run_directory: Path, policies: Iterable[StageName] = POLICIES) -> list[StageName]:
    """Return the finished ones of these policies that a run's finished evaluation has not seen; none without one.

    Raises UserError for a damaged manifest.
    """
    if not (run_directory / EVALUATE / SUMMARY).is_file():
        return []
    seen = read_manifest(run_directory / EVALUATE).parents
    return [name for name in policies if name not in seen and (run_directory / name / SUMMARY).is_file()]


def evaluate_again(run_directory: Path) -> str:
    """Return the command that evaluates a run, for a message."""
    return f"`{shlex.join(['rlhf', 'run', EVALUATE, str(run_directory)])}`"


def check_result(path: Path, summary: records.Summary, largest: int | None = None) -> None:
    """Compare the files of a stage's result with the hashes in its summary. Raises UserError.

    Files of more than `largest` bytes need only be present.
    """
    stage, digests = summary.stage, summary.result_sha256
    if stage != path.name:
        raise UserError(f"{path}: summary.json is that of {stage}; {_way_out(path, path.name)}")
    for name, digest in digests.items():
        file = path / name
        large = largest is not None and file.is_file() and file.stat().st_size > largest
        if not large and not (file.is_file() and digest == result_hash(file)):
            state = "has changed" if file.is_file() else "is missing"
            raise UserError(f"{file} {state} since {stage} was done; {_way_out(path, stage)}")
    for file in _results(path):
        if str(file.relative_to(path)) not in digests and not file.name.startswith("."):
            raise UserError(f"{file} does not belong to what {stage} has made; take it out")


def result_files(path: Path) -> list[Path]:
    """Return the files in a stage's directory that hold its result."""
    evaluation_files = (SAMPLES, "details.json") if path.name == EVALUATE else ()
    return sorted([*_results(path), *(file for name in evaluation_files if (file := path / name).is_file())])


def _results(path: Path) -> list[Path]:
    """Return the files of a stage's adapter or model, without the page about it."""
    files = [file for folder in RESULT_FOLDERS for file in path.glob(f"{folder}/*")]
    return [file for file in files if file.is_file() and file.name != CARD]


def reward_model_digest(summary: records.Summary) -> str | None:
    """Return what names a reward model in files with its scores, the beginning of its hash; None without an adapter."""
    digests = [digest for name, digest in summary.result_sha256.items() if name.endswith(ADAPTER_WEIGHTS)]
    return digests[0][:16] if digests else None


def result_hash(file: Path) -> str:
    """Return the hash of a file of a result.

    An adapter's configuration is hashed without its base's path, which may change.
    """
    config = read_json(file) if file.name == ADAPTER_CONFIG else None
    if config is None:
        return sha256(file)
    return hashlib.sha256(_json_text({**config, BASE: None}).encode()).hexdigest()


def follow_base(run_directory: Path, stage: StageName) -> None:
    """Write the base's path into the adapter of a run that was moved or copied.

    peft's AutoPeftModelForCausalLM then finds the run's own base. Nothing changes if the run has no base of its own, if
    an older version hashed the result with that path, or if the directory cannot be written.
    """
    folder, base = run_directory / stage, (stage_folder(run_directory, PRETRAIN) / MODEL).resolve()
    for file in (file for file in _results(folder) if file.name == ADAPTER_CONFIG):
        config = read_json(file)
        if config is None or not base.is_dir() or os.path.realpath(str(config.get(BASE))) == str(base):
            continue
        summary = read_summary(folder)
        if summary is None or summary.result_sha256.get(str(file.relative_to(folder))) != result_hash(file):
            continue
        with suppress(OSError), replacing(file) as temporary:  # a read-only copy stays: nothing of ours reads that path
            temporary.write_text(_json_text({**config, BASE: str(base)}), encoding="utf-8")


def totals(
    summaries: Mapping[str, records.Summary], price: float | None = None
) -> list[tuple[Figure, float | None, Verdict]]:
    """Compare the figures of all stages together with one run's finished stages, which `summaries` has by name.

    `price` is in dollars per hour of one card.
    """
    figures = next((summary.all_stages for summary in reversed([*summaries.values()]) if summary.all_stages), [])
    spent = {stage: summary.spent for stage, summary in summaries.items()}
    return [(figure, *compare_total(figure, spent, price)) for figure in figures]


def data_file(run_directory: Path, name: str) -> Path:
    """Return the place of a data file that a manifest names: in the run directory, or else as written."""
    inside = run_directory / name
    return inside if inside.exists() else Path(name)


def _json_text(config: Mapping[str, object]) -> str:
    """Return a configuration as the text of its file."""
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def _way_out(path: Path, stage: str) -> str:
    """Return the advice that ends every message about a damaged or changed stage."""
    return f"move {path} away and run {stage} again"
