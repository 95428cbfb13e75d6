"""Finished stages: their records, and whether what they left is still what they made.

A run directory may be moved or copied as a whole: nothing that a stage reads is named by an absolute path in it. What
only tools outside read is set right when the run is next used: the base's path in an adapter's configuration.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.files import sha256
from rlhf.recipe import STAGES
from rlhf.run import reader, records

REMADE = ("evaluate", "merge")  # made again, the old one set aside, when what they were made from has changed
CONFIG = "adapter_config.json"
BASE = "base_model_name_or_path"  # in CONFIG; the only thing in a result that depends on where the run is


def read_summary(path: Path) -> dict[str, Any] | None:
    """The summary of a stage's directory, None where it is not done. Raises UserError when it is damaged."""
    with reader.advising(_way_out(path, path.name)):
        return reader.read(path / "summary.json", records.Summary)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a stage's directory. Raises UserError when it is missing or damaged."""
    with reader.advising(_way_out(path, path.name)):
        manifest = reader.read(path / "manifest.json", records.Manifest)
        if manifest is None:
            raise UserError(f"{path}: manifest.json is missing")
        return manifest


def stage_folder(root: Path, stage: str) -> Path:
    """Directory of a stage of the run below `root`, or the one elsewhere that a stage of the run was made from.

    A run whose parents lie below another root (`rlhf run --parents`) names their places in its manifests, relative to
    itself. Raises UserError for a damaged manifest.
    """
    own = root / stage
    if not own.exists():
        for manifest in sorted(root.glob("*/manifest.json")):
            if manifest.parent.name not in STAGES:
                continue
            place = read_manifest(manifest.parent).get("parents_from", {}).get(stage)
            if place is not None:
                return Path(os.path.normpath(root.resolve() / place))
    return own


def verified(root: Path, stage: str) -> dict[str, Any]:
    """The summary of a finished stage below `<out>/<recipe>/<version>`, once its records agree with what is there.

    Every file of its result has the hash that its summary names, and each parent that is still there is the one that
    it was made from. Whoever reads what a stage has made calls this first. Raises UserError.
    """
    path = stage_folder(root, stage)
    summary = read_summary(path)
    if summary is None:
        raise UserError(f"{path}: {stage} is not done")
    check_result(path, summary)
    for name, digest in read_manifest(path)["parents"].items():
        parent = stage_folder(path.parent, name) / "summary.json"
        if parent.is_file() and sha256(parent) != digest:
            again = f"run {stage} again" if stage in REMADE else _way_out(path, stage)
            raise UserError(f"{path} was made from another {name} than {parent.parent}; {again}")
    follow_base(path.parent, stage)
    return summary


def check_result(path: Path, summary: Mapping[str, Any], largest: int | None = None) -> None:
    """Compare the files of a stage's result with the hashes in its summary.

    Of files of more than `largest` bytes only their presence is checked. Raises UserError.
    """
    stage, digests = summary["stage"], summary["result_sha256"]
    if stage != path.name:
        raise UserError(f"{path}: summary.json is that of {stage}; {_way_out(path, path.name)}")
    for name, digest in digests.items():
        file = path / name
        large = largest is not None and file.is_file() and file.stat().st_size > largest
        if not large and not (file.is_file() and digest in (result_hash(file), sha256(file))):
            state = "has changed" if file.is_file() else "is missing"
            raise UserError(f"{file} {state} since {stage} was done; {_way_out(path, stage)}")
    for file in (*path.glob("adapter/*"), *path.glob("model/*")):
        if file.is_file() and str(file.relative_to(path)) not in digests and not file.name.startswith("."):
            raise UserError(f"{file} does not belong to what {stage} has made; take it out")


def result_files(path: Path) -> list[Path]:
    """The files that hold the result of a stage, in its directory."""
    evaluated = ("samples.jsonl", "details.json") if path.name == "evaluate" else ()
    found = (*path.glob("adapter/*"), *path.glob("model/*"), *(path / name for name in evaluated))
    return sorted(file for file in found if file.is_file())


def result_hash(file: Path) -> str:
    """The hash of a file of a result. An adapter's configuration counts without its base's path, which may change."""
    config = _config(file) if file.name == CONFIG else None
    if config is None:
        return sha256(file)
    return hashlib.sha256(_written({**config, BASE: None}).encode()).hexdigest()


def follow_base(root: Path, stage: str) -> None:
    """In a run that was moved or copied, name its own base, so that peft's AutoPeftModelForCausalLM finds that one.

    Nothing changes where the run has no base of its own, in results that older versions have hashed with that path,
    and in directories that cannot be written.
    """
    file, base = root / stage / "adapter" / CONFIG, (stage_folder(root, "pretrain") / "model").resolve()
    config = _config(file) if file.is_file() else None
    if config is None or not base.is_dir() or os.path.realpath(str(config.get(BASE))) == str(base):
        return
    if (read_summary(root / stage) or {})["result_sha256"].get(f"adapter/{CONFIG}") != result_hash(file):
        return
    temporary = file.with_name(f".{CONFIG}.tmp")
    try:
        temporary.write_text(_written({**config, BASE: str(base)}), encoding="utf-8")
        os.replace(temporary, file)
    except OSError:  # an archive or a shared copy: nothing of ours reads that path
        temporary.unlink(missing_ok=True)


def data_file(root: Path, name: str) -> Path:
    """Where a data file is that a manifest names: below the run's root, which may have moved, or as it is written."""
    inside = root / name
    return inside if inside.exists() else Path(name)


def _config(file: Path) -> dict[str, Any] | None:
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def _written(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def _way_out(path: Path, stage: str) -> str:
    return f"move {path} away and run {stage} again"
