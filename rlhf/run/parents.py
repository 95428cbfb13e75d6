"""The stages that a run builds on: where each of them is, and whether it was made with the run's settings."""

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf import recipe as recipes
from rlhf.errors import UserError
from rlhf.files import sha256
from rlhf.recipe import PinnedRecipe, StageName, as_yaml
from rlhf.recipe.chain import changed_settings
from rlhf.recipe.folders import no_section
from rlhf.recipe.stages import EVALUATE, POLICIES, SFT, PolicyName
from rlhf.run import identity, records
from rlhf.run.finished import REMADE, read_manifest, stage_folder, verified
from rlhf.run.layout import MANIFEST, SUMMARY
from rlhf.run.named import named_run, settings_of, value
from rlhf.terminal import say, shortened

MOST = 3  # keys in a message
LONGEST = 100  # characters of a value
MOST_WORDS = 20  # of a command in a message


class ParentMissing(UserError):
    """An earlier stage has to be run first."""


class Parents:
    """The stages that one stage builds on, in its run directory or in `reuse_directory`, another run directory."""

    def __init__(
        self,
        loaded: PinnedRecipe,
        stage: StageName,
        run_directory: Path,
        reuse_directory: Path | None,
        only: Sequence[PolicyName] = (),
    ):
        """`only`: the policies that an evaluation compares, instead of all that are trained."""
        self.loaded, self.only = loaded, only
        self.stage: StageName = stage
        self.run_directory = run_directory
        self.reuse_directory = reuse_directory

    def folder(self, stage: StageName) -> Path:
        """Return the directory of a stage: in this run directory if it exists there, else in `reuse_directory`."""
        if self.reuse_directory is None or (self.run_directory / stage).exists():
            return stage_folder(self.run_directory, stage)
        return stage_folder(self.reuse_directory, stage)

    def start(self) -> Path | None:
        """Return the directory of SFT, at whose adapter policies start; None if they start at the base."""
        return None if self.loaded.recipe.start == "base" else self.folder(SFT)

    def require(self, stage: StageName) -> Path:
        """Return the verified directory of an earlier stage. Raises ParentMissing or UserError.

        The recipe must have the stage, it must be finished, and its settings must agree with ours.
        """
        if self.loaded.recipe.section(stage) is None:
            raise UserError(no_section(stage, self.loaded))
        path = self.folder(stage)
        if not (path / SUMMARY).exists():
            raise self._missing(stage, path)
        manifest = self.check_same_settings(path, stage)
        self.check_same_base(path, manifest)
        unnamed = [name for name in recipes.parents(self.loaded.recipe, stage) if name not in manifest.parents]
        if unnamed:
            raise UserError(
                f"{path / MANIFEST}: parent {unnamed[0]} is missing; move {path} away and run {stage} again"
            )
        verified(path.parent, stage)
        return path

    def _missing(self, stage: StageName, path: Path) -> ParentMissing:
        """Return the error about an earlier stage that is not finished, with the command that runs it."""
        state = "did not finish" if (path / MANIFEST).exists() else "has not been run"
        words = ["rlhf", "run", stage, "--with-parents"] + ["--resume"] * (path / MANIFEST).exists()
        settings = self._same_settings()
        known = len(settings) <= MOST_WORDS
        command = f"`{shlex.join([*words, *settings])}`" if known else f"`{shlex.join(words)}` with the same settings"
        default = Path("runs", *path.parts[-3:])
        there = default != path and (default / SUMMARY).exists()
        hint = "; there is one in runs, which --reuse names" if there else ""
        return ParentMissing(f"{stage} {state} ({path}{hint}): first {command}")

    def _same_settings(self) -> list[str]:
        """Return the words of a command that name this run and its settings: the run itself, where it has them."""
        loaded = self.loaded
        with suppress(UserError):  # there is none, or its stages contradict each other
            made = settings_of(named_run(self.run_directory))
            if (made.recipe_sha256, made.overrides, made.seed) == (loaded.sha256, loaded.overrides, loaded.recipe.seed):
                return [str(self.run_directory)]
        words = ["--recipe", str(loaded.directory), "--out", str(self.run_directory.parents[1])]
        if self.reuse_directory is not None:
            words += ["--reuse", str(self.reuse_directory.parents[1])]
        if recipes.load(loaded.directory).recipe.seed != loaded.recipe.seed:
            words += ["--seed", str(loaded.recipe.seed)]
        changes = [f"{key}={as_yaml(changed)}" for key, changed in loaded.overrides.items()]
        return words + [word for change in changes for word in ("--set", change)]

    def hashes(self) -> dict[StageName, str]:
        """Return the hash of each parent's summary, which in turn names the hashes of its result.

        The trained policies are parents of an evaluation.
        """
        names = recipes.parents(self.loaded.recipe, self.stage)
        if self.stage == EVALUATE:
            names += self.trained_policies()
        summaries = {name: self.folder(name) / SUMMARY for name in names}
        return {name: sha256(summary) for name, summary in summaries.items() if summary.exists()}

    def folders_elsewhere(self) -> dict[str, str]:
        """Return the directories of parents in another run directory, relative to this one."""
        folders = {name: self.folder(name) for name in self.hashes()}
        root = self.run_directory.resolve()
        return {
            name: os.path.relpath(folder.resolve(), root)
            for name, folder in folders.items()
            if folder != self.run_directory / name
        }

    def trained_policies(self) -> list[PolicyName]:
        """Return the finished stages whose policies an evaluation compares with their start."""
        compared = self.only or POLICIES
        finished = [stage for stage in compared if (self.run_directory / stage / SUMMARY).exists()]
        return [stage for stage in POLICIES if stage in compared and (stage in finished or self.elsewhere(stage))]

    def require_policies(self) -> list[PolicyName]:
        """Return the policies that an evaluation compares; say which ones of the recipe this run has not trained.

        Raises UserError for one that has not finished, or that was asked for and is missing.
        """
        trained = self.trained_policies()
        for policy in (policy for policy in self.only if policy not in trained):
            if self.loaded.recipe.section(policy) is None:
                raise UserError(no_section(policy, self.loaded))
            raise self._missing(policy, self.folder(policy))
        others = [policy for policy in self._left_out(trained) if (self.run_directory / policy / MANIFEST).exists()]
        if others:
            way = f"or evaluate the others alone, --only {' --only '.join(trained)}" if trained else "or stop it"
            raise UserError(f"{self.run_directory / others[0]}: {others[0]} has not finished: let it finish, {way}")
        self.say_what_is_left_out(trained)
        return trained

    def _left_out(self, trained: Sequence[PolicyName]) -> list[PolicyName]:
        """Return the policies of the recipe that an evaluation of the `trained` is without; none if some were named."""
        return [] if self.only else [policy for policy in self.loaded.recipe.policies() if policy not in trained]

    def say_what_is_left_out(self, trained: Sequence[PolicyName]) -> None:
        """Say which policies of the recipe an evaluation of the `trained` ones is without."""
        if others := self._left_out(trained):
            say(f"not evaluated, for this run has not trained them: {', '.join(others)}")

    def elsewhere(self, stage: StageName) -> Path | None:
        """Return the directory in which another run has finished a stage with the same settings, or None."""
        path = self._finished_elsewhere(stage)
        return path if path is not None and not self._changed(read_manifest(path), stage) else None

    def settings_elsewhere(self, stage: StageName) -> str | None:
        """Return what keeps a stage that another run has finished from being used: its other settings, in words."""
        path = self._finished_elsewhere(stage)
        manifest = None if path is None else read_manifest(path)
        return None if manifest is None or not self._changed(manifest, stage) else self._in_words(path, manifest, stage)

    def _finished_elsewhere(self, stage: StageName) -> Path | None:
        """Return the directory in which another run has finished a stage, with whatever settings, or None."""
        path = self.folder(stage)
        return path if path != self.run_directory / stage and (path / SUMMARY).exists() else None

    def _changed(self, manifest: records.Manifest, stage: StageName) -> list[str]:
        """Return the keys in which a stage was made with other settings; what sampled a parent decides nothing here."""
        keys = changed_settings(manifest.settings.plain(), self.loaded.recipe, stage)
        return keys if stage == self.stage else [key for key in keys if key != f"{stage}.vllm_url"]

    def check_same_settings(self, path: Path, stage: StageName) -> records.Manifest:
        """Return the manifest of a stage. Raises UserError if its settings differ from ours."""
        manifest = read_manifest(path)
        if self._changed(manifest, stage):
            raise UserError(f"{self._in_words(path, manifest, stage)}; {self._way_out(path)}")
        return manifest

    @cached_property
    def base_files(self) -> dict[str, str]:
        """Return what identifies the base and the tokenizer that this stage loads."""
        return identity.files_of(self.loaded.recipe)

    def check_same_base(self, path: Path, manifest: records.Manifest) -> None:
        """Raise UserError if the stage in `path` was made with another base or tokenizer. Older runs do not say."""
        changed = sorted(name for name, _ in manifest.base_files.items() ^ self.base_files.items())
        if manifest.base_files and changed:
            model = self.loaded.recipe.model.name
            way_out = "put that back, or choose another --out"
            raise UserError(f"{model}: {changed[0]} is not the one with which {path} was made: {way_out}")

    def _in_words(self, path: Path | None, manifest: records.Manifest, stage: StageName) -> str:
        """Return with which settings a stage was made instead of ours, the sections that only one has last."""
        made, asked = manifest.settings.plain(), recipes.deciding_settings(self.loaded.recipe, stage)
        keys = sorted(self._changed(manifest, stage), key=lambda key: _is_section(made, key) or _is_section(asked, key))
        differing = [f"{key} {_text(made, key)} (asked for: {_text(asked, key)})" for key in keys[:MOST]]
        more = f" and {len(keys) - MOST} more keys" if len(keys) > MOST else ""
        return f"{path} was made with {', '.join(differing)}{more}"

    def _way_out(self, path: Path) -> str:
        """Return advice where the stage in `path` was made with other settings."""
        if path.parent != self.run_directory:
            return f"run {path.name} below {self.run_directory} too, or choose other --reuse"
        own = f"to have its settings, name {path} as RUN instead of the recipe"
        if path.name == self.stage and not (path / SUMMARY).exists():
            return f"{own}; --restart sets it aside and begins anew with yours; or {self.another_place()}"
        return own if self.stage in REMADE and path.name != self.stage else f"{own}; or {self.another_place()}"

    def another_place(self) -> str:
        """Return advice where a finished directory is in the way."""
        out = shlex.quote(str(self.run_directory.parents[1]))
        return f"choose another --out, with --reuse {out} for earlier stages; or move that directory away"


def _is_section(settings: Mapping[str, Any], key: str) -> bool:
    return isinstance(value(settings, key), Mapping)


def _text(settings: Mapping[str, Any], key: str) -> str:
    """Return a value in a message; of a whole section only that it is there."""
    return "a section" if _is_section(settings, key) else shortened(as_yaml(value(settings, key)), LONGEST)
