"""The directory of a stage in a run directory, `<out>/<recipe>/<version>/<stage>/`: all that it hands on to others.

manifest.json     inputs: recipe, settings, parents, data, packages, device, argv
metrics.jsonl     one object per logged step; a function of recipe, data and seed alone
telemetry.jsonl   cost of each step (seconds, tokens, bytes); differs from run to run
samples.jsonl     prompts and responses
findings.jsonl    what checks found, once each, with advice
judged.jsonl      marks that the reward `judge` was given, with their tokens; none is asked for twice
checkpoints/step-000200/   complete or absent: renamed when complete, with a hash of every file
adapter/          the result in peft's format (`model/` for pretrain and merge), with a page about it (card.py)
summary.json      the last file; its presence means that the stage is done
"""

import os
import platform
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf import recipe as recipes
from rlhf.errors import UserError
from rlhf.files import JsonObject, finite, free_name, remove, sha256, sync_tree, write_json
from rlhf.packages import package_versions
from rlhf.recipe import PinnedRecipe, StageName, as_yaml
from rlhf.recipe.chain import changed_settings, differences
from rlhf.recipe.schema_model import BaseSpec
from rlhf.recipe.stages import EVALUATE, POLICIES, PRETRAIN, SFT, PolicyName
from rlhf.run import identity, reader, records
from rlhf.run.checkpoints import Checkpoints
from rlhf.run.comparisons import comparable_values, figures
from rlhf.run.finished import REMADE, check_result, read_manifest, read_summary, result_files, result_hash
from rlhf.run.layout import ADAPTER, FINDINGS, JUDGED_FILE, MANIFEST, MODEL, REMAKING, RESULT_FOLDERS, SUMMARY
from rlhf.run.lock import locked
from rlhf.run.logs import LOGS, Logs
from rlhf.run.provenance import code_version
from rlhf.run.records import SCHEMA
from rlhf.terminal import excerpt, say

MOST = 3  # keys in a message
LONGEST = 100  # characters of a value
ANOTHER_PLACE = "move that directory away, or choose another --out, into which earlier stages may be copied"
LARGE = 10**9  # bytes: a larger result is hashed when it is used, not whenever the runner skips its finished stage


class ParentMissing(UserError):
    """An earlier stage has to be run first."""


class StageRun:
    """A stage of a recipe in its directory: whether it is done, what it builds on, and its records while it runs.

    `locked` keeps other processes out of the directory.
    """

    def __init__(
        self,
        out: Path,
        loaded: PinnedRecipe,
        stage: StageName,
        is_main: bool = True,
        only: Sequence[PolicyName] = (),
    ):
        """`out` is the runs root.

        Of several processes that share the stage one `is_main`. The others read the directory and never write. `only`
        are the policies that an evaluation compares, instead of all that are trained.
        """
        self.loaded, self.stage, self.is_main, self.only = loaded, stage, is_main, only
        self.seed = loaded.recipe.seed_of(stage)  # with which it trains
        self.run_directory = out / loaded.name / loaded.version
        self.path = self._place = self.run_directory / stage
        self._beside = self.run_directory / REMAKING / stage  # named as the stage, which checks of results compare
        self.resumed_from: Path | None = None
        self.resumed_data: records.DataRead | None = None  # the data of the run that is resumed
        self.expected = ""  # time of the stage in words, where it is projected
        self.total_steps = 0  # of training, once the stage knows them
        self.logs = Logs(self.path, is_main)
        self.checkpoints = Checkpoints(self.path / "checkpoints", is_main)
        self._manifest: dict[str, Any] = {}
        self._started = time.monotonic()
        self._spent = 0.0  # seconds up to the checkpoint that this run resumes from

    @property
    def base(self) -> BaseSpec:
        """Return what loading the base of this run needs to know."""
        return self.loaded.recipe.base(self.folder(PRETRAIN) / MODEL)

    # -- what it builds on -----------------------------------------------------------------------------------------

    def folder(self, stage: StageName) -> Path:
        """Return the directory of a stage of this run."""
        return self.run_directory / stage

    def policy_start(self) -> Path | None:
        """Return the folder of SFT's adapter, at which policies start; None if they start at the base."""
        return None if self.loaded.recipe.start == "base" else self.folder(SFT) / ADAPTER

    def require(self, stage: StageName) -> Path:
        """Return the verified directory of an earlier stage. Raises ParentMissing or UserError.

        The recipe must have the stage, it must be finished, and it must have been made from the same inputs as ours.
        """
        self.loaded.require(stage)
        path = self.folder(stage)
        summary = read_summary(path)
        if summary is None:
            state, resume = ("did not finish", " --resume") if (path / MANIFEST).exists() else ("has not been run", "")
            command = f"`rlhf run {stage} --with-parents{resume}` on this run or recipe"
            raise ParentMissing(f"{stage} {state} ({path}): first {command}")
        self.check_same(stage, base=True, parents=True)
        check_result(path, summary)
        return path

    def parent_hashes(self, stage: StageName) -> dict[StageName, str]:
        """Return the hash of the summary of each finished parent, which in turn names the hashes of its result.

        The trained policies are parents of an evaluation.
        """
        names = recipes.parents(self.loaded.recipe, stage) + (self.trained_policies() if stage == EVALUATE else [])
        summaries = {name: self.folder(name) / SUMMARY for name in names}
        return {name: sha256(summary) for name, summary in summaries.items() if summary.exists()}

    def trained_policies(self) -> list[PolicyName]:
        """Return the finished stages whose policies an evaluation compares with their start."""
        compared = self.only or POLICIES
        return [stage for stage in POLICIES if stage in compared and (self.folder(stage) / SUMMARY).exists()]

    def require_policies(self) -> list[PolicyName]:
        """Return the policies that an evaluation compares; say which ones of the recipe this run has not trained.

        Raises UserError for one that has not finished, or that was asked for and is missing.
        """
        trained = self.trained_policies()
        for policy in self.only:
            if policy not in trained:
                self.require(policy)
        others = [] if self.only else [policy for policy in self.loaded.recipe.policies() if policy not in trained]
        for folder in (self.run_directory / policy for policy in others):
            if (folder / MANIFEST).exists():
                raise UserError(f"{folder}: it has not finished: let it finish, or name the others (--only)")
        if others:
            say(f"not evaluated, for this run has not trained them: {', '.join(others)}")
        return trained

    def check_same(self, stage: StageName, *, base: bool = False, parents: bool = False) -> records.Manifest:
        """Return the manifest of a stage. Raises UserError, with the keys, if it was made from other inputs than ours.

        These are the settings, but for whether a server sampled a parent; with `base` the files of base and tokenizer,
        and with `parents` the results of those of its parents that are there.
        """
        path = self.folder(stage)
        manifest = read_manifest(path)
        changed = changed_settings(manifest.settings, self.loaded.recipe, stage)
        if stage != self.stage:
            changed.pop(f"{stage}.vllm_url", None)
        if base and manifest.base_hashes:  # older runs have none
            changed |= differences(manifest.base_hashes, self.base_hashes, f"{self.loaded.recipe.model.name}: ")
        if parents:
            now = self.parent_hashes(stage)
            changed |= differences({name: manifest.parents.get(name) for name in now}, now, "another ")
        if changed:
            some = [*changed.items()][:MOST]
            words = ", ".join(f"{key} {_text(made)} (asked for: {_text(asked)})" for key, (made, asked) in some)
            more = f" and {len(changed) - MOST} more keys" if len(changed) > MOST else ""
            unfinished = stage == self.stage and not (path / SUMMARY).exists()
            begin = "; --restart sets it aside and begins anew" if unfinished else ""
            raise UserError(
                f"{path} was made with {words}{more}; to have its settings, name {path} as RUN instead of the recipe, "
                f"or choose another --out{begin}"
            )
        return manifest

    @cached_property
    def base_hashes(self) -> dict[str, str]:
        """Return what identifies the base and the tokenizer that this stage loads."""
        return identity.files_of(self.loaded.recipe)

    # -- before the stage ------------------------------------------------------------------------------------------

    def done(self) -> records.Summary | None:
        """Return the summary of this stage if it has finished with these settings, or None.

        Raises UserError if the directory holds a finished run of other settings, which is never overwritten, or a
        result that has changed since.
        """
        summary = read_summary(self.path)
        if summary is None:
            return None
        manifest = self.check_same(self.stage, parents=self.stage not in REMADE)
        check_result(self.path, summary, largest=LARGE)
        read = manifest.data.files if manifest.data else []
        changed = [file.name for file in read if self._changed(file.name, file.sha256)]
        if changed and self.stage not in REMADE:
            raise UserError(f"{self.path} was made from another {', '.join(changed)}; {ANOTHER_PLACE}")
        return None if changed or manifest.parents != self.parent_hashes(self.stage) else summary

    def check_nothing_lost(self) -> None:
        """Raise UserError where an unfinished run has a checkpoint: only an option may continue it or set it aside."""
        checkpoint = self._checkpoint_to_resume() if self.checkpoints.steps() else None
        if checkpoint is not None:
            raise UserError(
                f"{self.path} has a checkpoint of step {checkpoint.step}: --resume continues from it, --restart sets "
                "it aside and begins anew"
            )

    def start(self, resume: bool, argv: list[str], device: Mapping[str, object]) -> None:
        """Prepare the directory. An unfinished run in it is continued (`resume`) or set aside."""
        if not self.is_main:
            return
        checkpoint = self._checkpoint_to_resume() if resume else None
        if checkpoint is None and os.path.lexists(self.path):
            if self.stage in REMADE and (self.path / SUMMARY).exists():
                self._work_in(self._beside)
            else:
                self.set_aside()
        (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
        self._manifest |= {
            **self._names,
            "recipe_folder": str(self.loaded.directory),
            "overrides": self.loaded.overrides,
            "settings": recipes.deciding_settings(self.loaded.recipe, self.stage),
            "parents": self.parent_hashes(self.stage),
            "base_hashes": self.base_hashes,
            "code": code_version().plain(),
            "packages": package_versions(),
            "python": platform.python_version(),
            "device": dict(device),
            "image": os.environ.get("RLHF_IMAGE"),
            "argv": argv,
            "started": self._manifest.get("started") or time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "resumed_from": self.resumed_from.name if self.resumed_from else None,
        }
        write_json(self.path / MANIFEST, self._manifest)
        if checkpoint is not None:
            self.checkpoints.drop_after(checkpoint.step)  # a later one is damaged, or it would have been chosen
            self.logs.rewind(checkpoint.log_lines)

    def describe(self, **facts: JsonObject | list[str]) -> None:
        """Add facts to manifest.json.

        `data`: which data was read; `cuts`: how many rows or prompts were cut to the recipe's lengths; `base`: what the
        folder of the base was converted from; `reward_functions`: those of an evaluation, by name.
        """
        if self._manifest and self.is_main:  # it is empty in a stage that a command only reads
            self._manifest |= facts
            write_json(self.path / MANIFEST, self._manifest)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory for one process at a time; for the other ranks, their main process holds it.

        A stage that is refused before it has logged anything leaves no directory. Raises UserError if another process
        holds it, or if nothing can be written.
        """
        if not self.is_main:
            yield
            return
        with locked(self.path):
            if (self._beside / SUMMARY).exists() and not os.path.lexists(self.path):
                self._beside.rename(self.path)  # it was killed when it had set the earlier result aside
            is_new = not os.path.lexists(self.path)
            try:
                yield
            except UserError:
                if is_new and _holds_no_work(self.path, logs=()):
                    shutil.rmtree(self.path)
                raise
            finally:
                self._work_in(self._place)

    # -- while it runs ---------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> None:
        """Write a checkpoint by `write(folder)`, and add the complete folder to `checkpoints`."""
        if self.is_main:
            folder = self.checkpoints.new_folder(step)
            write(folder)
            self.seal_checkpoint(step, folder)

    def seal_checkpoint(self, step: int, folder: Path) -> None:
        """Add a finished folder to `checkpoints`, with the state of the logs."""
        if self.is_main:
            self.logs.sync()  # the logs up to a checkpoint reach the disk before it
            self.checkpoints.add(step, folder, self._wall(), self.logs.line_counts())

    def finish(
        self,
        metrics: Mapping[str, float],
        costs: records.Costs,
        predicted_peak: int | None = None,
        projected_hours: float | None = None,
    ) -> records.Summary | None:
        """Write summary.json, the last file of a stage, and return it; None where this process does not write.

        `costs` are those of `Telemetry.costs`. `predicted_peak` is in bytes; it
        and `projected_hours` were known before the stage began.
        """
        if not self.is_main:
            return None
        seconds, device, data = self._wall(), self._manifest["device"], self._manifest.get("data")
        values = comparable_values(self.path, metrics, costs, seconds)
        found = reader.read_lines(self.path / FINDINGS, records.FindingLine)
        summary = {
            **self._names,
            "modified": self.loaded.modified,
            "status": "done",
            "device": device["name"],
            "processes": device.get("processes", 1),
            "wall_seconds": seconds,
            "predicted_peak_vram_bytes": predicted_peak,
            "projected_hours": projected_hours,
            **costs,
            "data_sha256": data["sha256"] if data else None,
            "result_sha256": {str(f.relative_to(self.path)): result_hash(f) for f in result_files(self.path)},
            "metrics": {name: finite(value) for name, value in metrics.items()},
            "findings": [*dict.fromkeys(line.check for line in found)],
            "targets": [
                records.compared(figure, values.get(figure.metric or ""))
                for figure in figures(self.loaded, self.stage, device["name"])
            ],
            "all_stages": [
                figure.model_dump(mode="json", exclude_defaults=True)
                for figure in figures(self.loaded, "all", device["name"])
            ],
        }
        for folder in RESULT_FOLDERS:
            sync_tree(self.path / folder)
        self.logs.sync()
        write_json(self.path / SUMMARY, summary)
        if self.path == self._beside:
            self._work_in(self._place)
            self.set_aside()
            self._beside.rename(self.path)
            self._beside.parent.rmdir()
        return read_summary(self.path)

    def set_aside(self) -> None:
        """Rename the directory; delete it instead if it holds no work. Findings are kept, for a message names them."""
        if _holds_no_work(self.path, {*LOGS} - {FINDINGS}):
            shutil.rmtree(self.path)
            return
        aside = free_name(self.path.with_name(f"{self.stage}.before"))
        self.path.rename(aside)
        say(f"{self.stage}: the earlier directory was moved to {aside}")

    # -- details ---------------------------------------------------------------------------------------------------

    @property
    def _names(self) -> JsonObject:
        """Return what names the recipe, the stage and the seed, the same in each of its records."""
        return {
            "schema": SCHEMA,
            "recipe": self.loaded.name,
            "version": self.loaded.version,
            "recipe_sha256": self.loaded.sha256,
            "released_sha256": self.loaded.released_sha256,
            "stage": self.stage,
            "seed": self.loaded.recipe.seed,
        }

    def _work_in(self, folder: Path) -> None:
        """Write into `folder` from now on: beside a finished result, which counts until another one is whole.

        What a stopped run left beside it goes, but for a judge's marks, which were paid for.
        """
        self.path = self.logs.folder = folder
        self.checkpoints = Checkpoints(folder / "checkpoints", self.is_main)
        if folder == self._beside and folder.is_dir():
            for file in folder.iterdir():
                if file.name != JUDGED_FILE:
                    remove(file)

    def _wall(self) -> float:
        """Return the seconds that the stage has taken, those before it was resumed included."""
        return round(self._spent + time.monotonic() - self._started, 3)

    def _checkpoint_to_resume(self) -> records.Checkpoint | None:
        """Return the record of the checkpoint that this run continues from, and take over its manifest and times.

        None if there is nothing to continue: without a manifest the stage stopped before its first step, or the file
        was lost later, and nothing shows that the checkpoints belong to this stage. Raises UserError if its settings or
        parents were others, and for a damaged manifest.
        """
        if (self.path / SUMMARY).exists() or not (self.path / MANIFEST).exists():
            return None
        manifest = self.check_same(self.stage, base=True, parents=True)
        self.resumed_from = self.checkpoints.latest()
        if self.resumed_from is None:
            return None
        checkpoint = reader.read(self.resumed_from / "checkpoint.json", records.Checkpoint)
        assert checkpoint is not None  # `latest` has read it
        self._manifest, self.resumed_data = {**manifest.plain()}, manifest.data
        self._spent = checkpoint.wall_seconds
        return checkpoint

    def _changed(self, name: str, digest: str) -> bool:
        """Return whether a local data file differs from the manifest's; a file that is gone counts as unchanged."""
        inside = self.run_directory / name
        path = inside if inside.exists() else Path(name)
        return path.exists() and sha256(path) != digest


def _holds_no_work(folder: Path, logs: Collection[str]) -> bool:
    """Return whether a stage's folder holds nothing to continue from: a manifest, logs and unfinished files.

    `logs` are the names of log files. A checkpoint is work, and so is every file that no stage writes.
    """
    if folder.is_symlink() or not folder.is_dir():
        return False
    others = [path for path in folder.iterdir() if path.name not in (MANIFEST, *logs) and path.suffix != ".tmp"]
    return all(
        path.name == "checkpoints" and all(inner.name.startswith(".partial") for inner in path.glob("*"))
        for path in others
    )


def _text(value: object) -> str:
    """Return a value in a message; of a whole section only that it is there."""
    return "a section" if isinstance(value, dict) else excerpt(as_yaml(value), LONGEST)
