"""Records of finished stages with plain values, as the modules that read them are given."""

import json
from pathlib import Path
from typing import Any

from rlhf.run.finished import result_files, result_hash
from rlhf.run.records import Manifest, Summary

OF_BOTH = {"schema": 1, "recipe": "cpu-tiny", "version": "v1", "recipe_sha256": "0" * 64, "seed": 0}
PLAIN_MANIFEST: dict[str, Any] = OF_BOTH | {
    "overrides": {},
    "settings": {},
    "parents": {},
    "code": {"commit": None, "dirty": None},
    "packages": {},
    "device": {"name": "cpu", "type": "cpu"},
}
PLAIN_SUMMARY: dict[str, Any] = OF_BOTH | {
    "modified": False,
    "stage": "sft",
    "status": "done",
    "device": "cpu",
    "wall_seconds": 1.0,
    "tokens_per_second": None,
    "peak_vram_bytes": None,
    "peak_rss_bytes": 1,
    "data_sha256": None,
    "metrics": {},
    "targets": [],
    "result_sha256": {},
}


def write_records(folder: Path, manifest: dict[str, Any] | None = None, summary: dict[str, Any] | None = None) -> None:
    """Write manifest.json and summary.json of a stage that is done, around the result that lies in `folder`.

    The keys of `manifest` and `summary` replace plain ones.
    """
    hashes = {str(file.relative_to(folder)): result_hash(file) for file in result_files(folder)}
    done = PLAIN_SUMMARY | {"stage": folder.name, "result_sha256": hashes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(PLAIN_MANIFEST | (manifest or {})))
    (folder / "summary.json").write_text(json.dumps(done | (summary or {})))


def manifest_of(**values: Any) -> Manifest:
    """A manifest with plain values but for those that are named."""
    return Manifest.model_validate(PLAIN_MANIFEST | values)


def summary_of(**values: Any) -> Summary:
    """The summary of a finished stage with plain values but for those that are named."""
    return Summary.model_validate(PLAIN_SUMMARY | values)
