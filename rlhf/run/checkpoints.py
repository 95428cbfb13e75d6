"""Checkpoints of a stage: their steps, their hashes and the logs that belong to them."""

import re
from collections.abc import Mapping
from pathlib import Path

from rlhf.errors import UserError
from rlhf.files import remove, sha256, sync, sync_tree, write_json
from rlhf.recipe import StageName
from rlhf.run import reader, records
from rlhf.run.finished import change_in
from rlhf.terminal import say


class Checkpoints:
    """The checkpoints of a stage: `<folder>/step-000200`, complete or absent. Only the main process `writes`."""

    def __init__(self, folder: Path, writes: bool = True):
        self.folder, self.writes = folder, writes

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, in order; folders with other names are ignored."""
        names = {folder.name for folder in self.folder.glob("step-*")}
        steps = {int(match[1]) for name in names if (match := re.fullmatch(r"step-([0-9]{6,18})", name))}
        return sorted(step for step in steps if self.of(step).name in names)

    def of(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.folder / f"step-{step:06d}"

    def latest(self) -> Path | None:
        """Return the newest checkpoint whose files all have their recorded hashes, or None."""
        steps = self.steps()
        for folder in map(self.of, reversed(steps)):
            problem = checkpoint_problem(folder)
            if problem is None:
                return folder
            instead = "the stage begins anew" if folder == self.of(steps[0]) else "trying the one before"
            say(f"{self.folder.parent.name}: {folder} cannot be used ({problem}); {instead}")
        return None

    def new_folder(self, step: int) -> Path:
        """Return an empty folder for the files of a checkpoint, which `add` then takes."""
        partial = self.folder / f".partial-{step}"
        remove(partial)
        partial.mkdir(parents=True)
        return partial

    def add(self, step: int, folder: Path, wall_seconds: float, log_lines: Mapping[str, int]) -> None:
        """Turn a finished folder into a checkpoint, with the hash of every file in it. It appears as a whole."""
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        hashes = {str(p.relative_to(folder)): sha256(p) for p in files}
        record = {"step": step, "wall_seconds": wall_seconds, "sha256": hashes, "log_lines": {**log_lines}}
        write_json(folder / "checkpoint.json", record)
        sync_tree(folder)
        final = self.of(step)
        remove(final)
        folder.rename(final)
        sync(final.parent)

    def keep_newest(self, *, keep: int, spare: int | None) -> None:
        """Delete all but the newest `keep` checkpoints and the one of step `spare`."""
        for step in self.steps()[:-keep] if self.writes else ():
            if step != spare:
                remove(self.of(step))

    def drop_after(self, step: int) -> None:
        """Delete the checkpoints of later steps."""
        for later in self.steps():
            if later > step:
                remove(self.of(later))


def checkpoint_step(folder: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(folder.name.split("-")[1])


def require_usable(folder: Path, stage: StageName) -> None:
    """Raise UserError if the best checkpoint of a stage is damaged."""
    if problem := checkpoint_problem(folder):
        raise UserError(f"{folder}, the best checkpoint, cannot be used: {problem}; set {stage}.adapter=last")


def checkpoint_problem(folder: Path) -> str | None:
    """Return why a checkpoint cannot be used, or None."""
    try:
        record = reader.read(folder / "checkpoint.json", records.Checkpoint)
    except UserError as error:
        return str(error).replace(f"{folder}/", "")  # the caller names the folder
    if record is None:
        return "checkpoint.json is missing"
    if record.step != checkpoint_step(folder):
        return f"checkpoint.json is that of step {record.step}"
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != "checkpoint.json")
    return change_in(folder, record.sha256, files)
