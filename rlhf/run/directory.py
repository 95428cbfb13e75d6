"""Run directories, `<out>/<recipe>/<version>/<stage>/`: all that one stage hands on to another.

manifest.json     inputs: recipe, settings, parents, data, packages, device, argv
metrics.jsonl     one object per logged step; a function of recipe, data and seed alone
telemetry.jsonl   cost of each step (seconds, tokens, bytes); differs from run to run
samples.jsonl     prompts and responses
findings.jsonl    signs of trouble, once each, with remedies
checkpoints/step-000200/   complete or absent: renamed when complete, with a hash of every file
adapter/          the result in peft's format (`model/` for pretrain and merge)
summary.json      the last file; its presence means that the stage is done
"""

import fcntl
import os
import platform
import re
import shlex
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rlhf import recipe as recipes
from rlhf.errors import ParentMissing, UserError
from rlhf.files import append, finite, free_name, remove, sha256, sync, sync_tree, write_json
from rlhf.recipe import PinnedRecipe, PolicyName, StageName, published
from rlhf.run import other_settings, reader, records
from rlhf.run.checkpoints import checkpoint_problem, holds_no_work, keep_lines_until
from rlhf.run.finished import (
    REMADE,
    check_result,
    data_file,
    read_manifest,
    read_summary,
    result_files,
    result_hash,
    stage_folder,
    verified,
)
from rlhf.run.provenance import code_version, package_versions
from rlhf.run.records import SCHEMA
from rlhf.terminal import say

LARGE = 10**9  # bytes: a larger result is hashed when it is used, not whenever the runner skips its finished stage
LOGS: dict[str, type[records.LogLine]] = {
    "metrics.jsonl": records.MetricsLine,
    "telemetry.jsonl": records.TelemetryLine,
    "samples.jsonl": records.LogLine,
    "findings.jsonl": records.FindingLine,
}


class Run:
    """The directory of one stage while the stage runs. `locked` keeps other processes out of it."""

    is_main = True  # whether this process writes

    def __init__(self, out: Path, loaded: PinnedRecipe, stage: StageName, parents: Path | None = None):
        """`out` is the root of the runs. Finished stages that it lacks are taken from `parents`, another root."""
        self.loaded, self.stage = loaded, stage
        self.root = out / loaded.name / loaded.version
        self.parents_root = parents / loaded.name / loaded.version if parents else None
        self.path = self.root / stage
        self.resumed_from: Path | None = None
        self.resumed_data: records.DataRead | None = None  # the data of the run that is resumed
        self.on_metrics: list[Callable[[int, Mapping[str, float]], None]] = []  # called with each row that log() writes
        self.on_samples: list[Callable[[Sequence[str]], None]] = []  # called with sampled responses
        self._manifest: dict[str, Any] = {}
        self._started = time.monotonic()
        self._spent = 0.0  # seconds up to the checkpoint that this run resumes from

    # -- before the stage ------------------------------------------------------------------------------------------

    def done(self) -> records.Summary | None:
        """Return the summary of this stage if it has finished with these settings, or None.

        Raises UserError if the directory holds a finished run of other settings, which is never overwritten, or a
        result that has changed since.
        """
        summary = read_summary(self.path)
        if summary is None:
            return None
        manifest = self._check_same_settings(self.path, self.stage)
        check_result(self.path, summary, largest=LARGE)
        changed: list[str] = [name for name, digest in self._parents().items() if manifest.parents.get(name) != digest]
        changed += [file.name for file in (manifest.data.files if manifest.data else []) if self._changed(file)]
        if changed and self.stage not in REMADE:
            raise UserError(
                f"{self.path} was made from another {', '.join(changed)}; "
                "choose another --out (make: OUT=…), or move that directory away"
            )
        return None if changed or manifest.parents.keys() != self._parents().keys() else summary

    def folder_of(self, stage: StageName) -> Path:
        """Return the directory of a stage: below this run's root if it exists there, else below `parents`."""
        if self.parents_root is None or (self.root / stage).exists():
            return stage_folder(self.root, stage)
        return stage_folder(self.parents_root, stage)

    def require_parent(self, stage: StageName) -> Path:
        """Return the verified directory of an earlier stage. Raises ParentMissing or UserError.

        The stage must be finished, and its settings must agree with ours.
        """
        path = self.folder_of(stage)
        if not (path / "summary.json").exists():
            raise ParentMissing(self.stage, stage, path, (path / "manifest.json").exists())
        manifest = self._check_same_settings(path, stage)
        unnamed = [name for name in recipes.parents(self.loaded.recipe, stage) if name not in manifest.parents]
        if unnamed:
            raise UserError(
                f"{path}/manifest.json does not name its parent {unnamed[0]}; move {path} away and run {stage} again"
            )
        verified(path.parent, stage)
        return path

    def start(self, resume: bool, argv: list[str], device: Mapping[str, Any]) -> None:
        """Prepare the directory. An unfinished run in it is continued (`resume`) or set aside."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.root}: cannot write there ({error.strerror}); choose another --out") from None
        checkpoint = self._checkpoint_to_resume() if resume else None
        if checkpoint is None and os.path.lexists(self.path):
            self.set_aside()
        (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
        self._manifest |= {
            "schema": SCHEMA,
            "recipe": self.loaded.name,
            "version": self.loaded.version,
            "recipe_sha256": self.loaded.sha256,
            "overrides": self.loaded.overrides,
            "stage": self.stage,
            "seed": self.loaded.recipe.seed,
            "settings": recipes.settings(self.loaded.recipe, self.stage),
            "parents": self._parents(),
            "parents_from": self._parents_from(),
            "code": code_version(),
            "packages": package_versions(),
            "python": platform.python_version(),
            "device": dict(device),
            "image": os.environ.get("RLHF_IMAGE"),  # of the container, if any
            "argv": argv,
            "started": self._manifest.get("started") or time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "resumed_from": self.resumed_from.name if self.resumed_from else None,
        }
        self.describe()
        if checkpoint is not None:
            self._rewind(checkpoint)

    def describe(self, **facts: Any) -> None:
        """Add facts to manifest.json, such as the data's fingerprint."""
        self._manifest.update(facts)
        write_json(self.path / "manifest.json", self._manifest)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the stage's directory for one process at a time.

        Raises UserError if another process holds it, or if nothing can be written.
        """
        lock = self.root / f".{self.stage}.lock"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            number = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise UserError(f"{self.root}: cannot write there ({error.strerror}); choose another --out") from None
        with open(number, "w") as handle:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise UserError(f"{lock}: a pipe or a device in place of the lock; remove it")
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{self.path}: another process is running {self.stage} there") from None
            yield

    # -- while it runs ---------------------------------------------------------------------------------------------

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one row to metrics.jsonl. Values that depend on the clock do not belong here."""
        append(self.path / "metrics.jsonl", [{"step": step, **{key: finite(value) for key, value in values.items()}}])
        for receive in self.on_metrics:
            receive(step, values)

    def log_telemetry(self, step: int, values: Mapping[str, float]) -> None:
        """Append one row of costs to telemetry.jsonl."""
        append(self.path / "telemetry.jsonl", [{"step": step, **values}])

    def log_samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append prompts and responses to samples.jsonl."""
        lines = [{"step": step, **row} for row in rows]
        append(self.path / "samples.jsonl", lines)
        for receive in self.on_samples:
            receive([row["response"] for row in lines if "response" in row])

    def log_finding(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a finding of rlhf/observe/watch.py to findings.jsonl."""
        append(self.path / "findings.jsonl", [{"step": step, **values}])

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> Path:
        """Write a checkpoint by `write(folder)`, then rename the complete folder to `checkpoints/step-<step>`."""
        partial = self.path / "checkpoints" / f".partial-{step}"
        remove(partial)
        partial.mkdir(parents=True)
        write(partial)
        return self.seal_checkpoint(step, partial)

    def seal_checkpoint(self, step: int, folder: Path) -> Path:
        """Turn a finished folder into `checkpoints/step-<step>`, with the hash of every file in it."""
        self._sync_logs()  # the logs up to a checkpoint reach the disk before it
        logged = {name: file.read_bytes().count(b"\n") for name in LOGS if (file := self.path / name).exists()}
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        hashes = {str(p.relative_to(folder)): sha256(p) for p in files}
        record = {"step": step, "wall_seconds": self._wall(), "sha256": hashes, "log_lines": logged}
        write_json(folder / "checkpoint.json", record)
        sync_tree(folder)
        final = self.checkpoint(step)
        remove(final)
        folder.rename(final)
        sync(final.parent)
        return final

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of all checkpoints, in order; folders with other names are ignored."""
        names = {folder.name for folder in (self.path / "checkpoints").glob("step-*")}
        steps = {int(match[1]) for name in names if (match := re.fullmatch(r"step-([0-9]{6,18})", name))}
        return sorted(step for step in steps if self.checkpoint(step).name in names)

    def checkpoint(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.path / "checkpoints" / f"step-{step:06d}"

    def drop_checkpoints(self, keep: int, spare: int | None) -> None:
        """Delete all but the newest `keep` checkpoints and the one of step `spare`."""
        for step in self.checkpoint_steps()[:-keep]:
            if step != spare:
                remove(self.checkpoint(step))

    def latest_checkpoint(self) -> Path | None:
        """Return the newest checkpoint whose files all have their recorded hashes, or None."""
        for folder in map(self.checkpoint, reversed(self.checkpoint_steps())):
            problem = checkpoint_problem(folder)
            if problem is None:
                return folder
            say(f"{self.stage}: {folder} cannot be used ({problem}); trying the one before")
        return None

    def finish(
        self, metrics: Mapping[str, float], costs: records.Costs, predicted_peak: int | None = None
    ) -> records.Summary:
        """Write summary.json, the last file of a stage, and return it.

        `costs` are those of `Telemetry.costs`. `predicted_peak` is in bytes.
        """
        comparable = self._comparable(metrics, costs)
        summary = {
            "schema": SCHEMA,
            "recipe": self.loaded.name,
            "version": self.loaded.version,
            "recipe_sha256": self.loaded.sha256,
            "modified": self.loaded.modified,
            "stage": self.stage,
            "status": "done",
            "seed": self.loaded.recipe.seed,
            "device": self._manifest["device"]["name"],
            "processes": self._manifest["device"].get("processes", 1),
            "wall_seconds": self._wall(),
            "predicted_peak_vram_bytes": predicted_peak,
            **costs,
            "data_sha256": self._manifest.get("data", {}).get("sha256"),
            "result_sha256": {str(f.relative_to(self.path)): result_hash(f) for f in result_files(self.path)},
            "metrics": {name: finite(value) for name, value in metrics.items()},
            "findings": [line.check for line in reader.read_lines(self.path / "findings.jsonl", records.FindingLine)],
            "targets": [_figure_record(figure, comparable) for figure in self._figures(self.stage)],
            "all_stages": [f.model_dump(mode="json", exclude_defaults=True) for f in self._figures("all")],
        }
        record = records.Summary.model_validate(summary)
        for folder in ("adapter", "model"):
            sync_tree(self.path / folder)
        self._sync_logs()
        write_json(self.path / "summary.json", summary)
        return record

    def _figures(self, stage: StageName | Literal["all"]) -> list[recipes.Figure]:
        """Return the figures of a stage with which this run can be compared."""
        loaded = self.loaded
        of_stage = (figure for figure in loaded.targets if figure.stage == stage)
        return [figure for figure in of_stage if recipes.comparable(figure, loaded.recipe, loaded.overrides)]

    def _comparable(self, metrics: Mapping[str, float], costs: records.Costs) -> dict[str, float]:
        """Return the metrics that a figure may name: results, costs in its units, sizes, ends of the log."""
        comparable = {**metrics, "hours": self._wall() / 3600}
        if peak := costs["peak_vram_bytes"]:
            comparable["peak_vram_gb"] = peak / published.GB
        for component, size in (costs["component_bytes"] or {}).items():
            comparable[f"component_gb.{component}"] = size / published.GB
        if "base_bytes" in metrics:
            comparable["base_model_gb"] = metrics["base_bytes"] / published.GB
        for folder, name in (("adapter", "adapter_gb"), ("model", "merged_model_gb")):
            sizes = [file.stat().st_size for file in (self.path / folder).glob("*.safetensors")]
            if sizes:
                comparable[name] = sum(sizes) / published.GB
        for row in reader.read_lines(self.path / "metrics.jsonl", records.MetricsLine):
            for key, value in row.values.items():
                if value is not None:
                    comparable.setdefault(f"first.{key}", value)
                    comparable[f"last.{key}"] = value
        return comparable

    def set_aside(self) -> None:
        """Rename the directory; delete it instead if it holds no work."""
        if holds_no_work(self.path, LOGS):
            shutil.rmtree(self.path)
            return
        aside = free_name(self.path.with_name(f"{self.stage}.before"))
        self.path.rename(aside)
        unfinished = not (aside / "summary.json").exists() and any(aside.glob("checkpoints/step-*"))
        back = f"rm -r {shlex.quote(str(self.path))} && mv {shlex.quote(str(aside))} {shlex.quote(str(self.path))}"
        advice = (
            f". To continue it instead: stop this run, `{back}`, then --resume (make: RESUME=1)" if unfinished else ""
        )
        say(f"{self.stage}: the earlier directory was moved to {aside}{advice}")

    # -- details ---------------------------------------------------------------------------------------------------

    def _sync_logs(self) -> None:
        """Flush all logs to disk."""
        for log in self.path.glob("*.jsonl"):
            sync(log)

    def _wall(self) -> float:
        """Return the seconds that the stage has taken, those before it was resumed included."""
        return round(self._spent + time.monotonic() - self._started, 3)

    def _parents(self) -> dict[StageName, str]:
        """Return the hash of each parent's summary, which in turn names the hashes of its result.

        The trained policies are parents of an evaluation.
        """
        names = recipes.parents(self.loaded.recipe, self.stage)
        if self.stage == "evaluate":
            names += self.trained_policies()
        summaries = {name: self.folder_of(name) / "summary.json" for name in names}
        return {name: sha256(summary) for name, summary in summaries.items() if summary.exists()}

    def _checkpoint_to_resume(self) -> records.Checkpoint | None:
        """Return the record of the checkpoint that this run continues from, and take over its manifest and times.

        None if there is nothing to continue. Raises UserError if its settings or parents were others.
        """
        if (self.path / "summary.json").exists() or not self._can_continue():
            return None
        manifest = self._check_same_settings(self.path, self.stage)
        if manifest.parents != self._parents():
            raise UserError(f"{self.path} was begun from other parents; run {self.stage} without --resume")
        self.resumed_from = self.latest_checkpoint()
        if self.resumed_from is None:
            return None
        checkpoint = reader.read(self.resumed_from / "checkpoint.json", records.Checkpoint)
        assert checkpoint is not None  # latest_checkpoint has read it
        self._manifest, self.resumed_data = {**manifest.plain()}, manifest.data
        self._spent = checkpoint.wall_seconds
        return checkpoint

    def _rewind(self, checkpoint: records.Checkpoint) -> None:
        """Drop later checkpoints and what the logs say about later steps."""
        for step in self.checkpoint_steps():
            if step > checkpoint.step:  # a later checkpoint is damaged, or it would have been chosen
                remove(self.checkpoint(step))
        logged = checkpoint.log_lines
        for name, kind in LOGS.items():  # a step may log after its checkpoint
            with reader.advising(f"repair it, or run {self.stage} without --resume"):
                lines = None if logged is None else logged.get(name, 0)
                keep_lines_until(self.path / name, kind, checkpoint.step, lines)

    def _can_continue(self) -> bool:
        """Return whether the directory holds a manifest with which a run can be continued.

        Without a whole manifest the stage stopped before its first step, or the file was lost later. Then nothing shows
        that the checkpoints belong to this stage.
        """
        try:
            return reader.read(self.path / "manifest.json", records.Manifest) is not None
        except UserError as error:
            say(f"{self.stage}: {error}; starting afresh")
            return False

    def _changed(self, file: records.DataFile) -> bool:
        """Return whether a local data file differs from the manifest's; a file that is gone counts as unchanged."""
        path = data_file(self.root, file.name)
        return path.is_file() and sha256(path) != file.sha256

    def _parents_from(self) -> dict[str, str]:
        """Return the directories of parents below another root, relative to this run's root."""
        folders = {name: self.folder_of(name) for name in self._parents()}
        root = self.root.resolve()
        return {
            name: os.path.relpath(folder.resolve(), root)
            for name, folder in folders.items()
            if folder != self.root / name
        }

    def trained_policies(self) -> list[PolicyName]:
        """Return the finished stages whose policies an evaluation compares with SFT."""
        finished = [stage for stage in recipes.POLICIES if (self.root / stage / "summary.json").exists()]
        return [stage for stage in recipes.POLICIES if stage in finished or self.elsewhere(stage)]

    def elsewhere(self, stage: StageName) -> Path | None:
        """Return the directory in which another root has finished a stage with the same settings, or None."""
        path = self.folder_of(stage)
        if path == self.root / stage or not (path / "summary.json").exists():
            return None
        settings = recipes.settings(self.loaded.recipe, stage)
        return None if recipes.differences(read_manifest(path).settings.plain(), settings) else path

    def _check_same_settings(self, path: Path, stage: StageName) -> records.Manifest:
        """Return the manifest of a stage. Raises UserError if its settings differ from ours."""
        manifest = read_manifest(path)
        made, expected = manifest.settings.plain(), recipes.settings(self.loaded.recipe, stage)
        if keys := recipes.differences(made, expected):
            way_out = f"run {stage} below {self.root} too, or choose other --reuse (make: REUSE=…)"
            if path == self.root / stage:
                way_out = "choose another --out (make: OUT=…), or move that directory away"
            if path == self.root / stage != self.path and self.stage in REMADE:  # stages that only read it
                way_out = f"repeat that run's own settings: {other_settings.way_back(keys, made, path)}"
            raise UserError(f"{path} was made with {other_settings.in_words(keys, made, expected)}; {way_out}")
        return manifest


def _figure_record(figure: recipes.Figure, values: Mapping[str, float]) -> dict[str, Any]:
    """Return the record of a figure's comparison with a measured value; NaN and infinity are not measured."""
    value = values.get(figure.metric) if figure.metric else None
    return published.record(figure, None if value is None else finite(value))
