"""Checkpoints of a run directory: their steps, their hashes and the logs that belong to them."""

import json
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path

from rlhf.errors import UserError
from rlhf.files import replacing, sha256, sync
from rlhf.run import reader, records


def checkpoint_step(folder: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(folder.name.split("-")[1])


def checkpoint_problem(folder: Path) -> str | None:
    """Return why a checkpoint cannot be used, or None.

    A file that its record does not name is a problem too: it might be loaded in place of one that the record names.
    """
    try:
        record = reader.read(folder / "checkpoint.json", records.Checkpoint)
    except UserError as error:
        return str(error)
    if record is None:
        return "checkpoint.json is missing"
    if record.step != checkpoint_step(folder):
        return f"checkpoint.json is that of step {record.step}"
    for name, digest in record.sha256.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if sha256(folder / name) != digest:
            return f"{name} is damaged"
    present = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    unnamed = sorted(
        name for name in present - {*record.sha256, "checkpoint.json"} if not Path(name).name.startswith(".")
    )
    return f"{unnamed[0]} does not belong to it" if unnamed else None


def with_resume_advice(folder: Path) -> AbstractContextManager[None]:
    """Add a way out to a UserError that is raised while a checkpoint is read: resume from the one before it."""
    return reader.advising(f"move {folder} away, and --resume takes the checkpoint before it")


def keep_lines_until(file: Path, kind: type[records.LogLine], step: int, lines: int | None = None) -> None:
    """Drop the lines after `step`, and all but the first `lines` if given; the resumed run writes them again."""
    rows = reader.read_lines(file, kind)[:lines]
    lines_to_keep = [json.dumps(row.plain(), ensure_ascii=False) + "\n" for row in rows if row.step <= step]
    with replacing(file) as temporary:
        temporary.write_text("".join(lines_to_keep), encoding="utf-8")
        sync(temporary)


def holds_no_work(folder: Path, logs: Collection[str]) -> bool:
    """Return whether a stage's folder holds nothing to continue from: a manifest, logs and unfinished files.

    `logs` are the names of log files. A checkpoint is work, and so is every file that no stage writes.
    """
    if folder.is_symlink() or not folder.is_dir():
        return False
    for path in folder.iterdir():
        checkpoints = path.name == "checkpoints" and path.is_dir() and not path.is_symlink()
        unfinished = checkpoints and all(inner.name.startswith(".partial") for inner in path.iterdir())
        log = path.name in logs and path.is_file() and not path.is_symlink()
        if path.name != "manifest.json" and not path.name.endswith(".tmp") and not unfinished and not log:
            return False
    return True
