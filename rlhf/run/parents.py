"""The stages that a run builds on: where each of them is, and whether it was made with the run's settings."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from rlhf import recipe as recipes
from rlhf.errors import UserError
from rlhf.files import sha256
from rlhf.recipe import PinnedRecipe, StageName, as_yaml
from rlhf.recipe.chain import changed_settings, differences
from rlhf.recipe.stages import EVALUATE, POLICIES, SFT, PolicyName
from rlhf.run import identity, records
from rlhf.run.finished import check_result, read_manifest, read_summary
from rlhf.run.layout import ADAPTER, MANIFEST, SUMMARY
from rlhf.terminal import excerpt, say

MOST = 3  # keys in a message
LONGEST = 100  # characters of a value
ANOTHER_PLACE = "move that directory away, or choose another --out, into which earlier stages may be copied"


class ParentMissing(UserError):
    """An earlier stage has to be run first."""


class Parents:
    """The stages that one stage builds on, in its run directory."""

    def __init__(
        self, loaded: PinnedRecipe, stage: StageName, run_directory: Path, only: Sequence[PolicyName] = ()
    ) -> None:
        """`only`: the policies that an evaluation compares, instead of all that are trained."""
        self.loaded, self.only = loaded, only
        self.stage: StageName = stage
        self.run_directory = run_directory

    def folder(self, stage: StageName) -> Path:
        """Return the directory of a stage."""
        return self.run_directory / stage

    def start(self) -> Path | None:
        """Return the folder of SFT's adapter, at which policies start; None if they start at the base."""
        return None if self.loaded.recipe.start == "base" else self.folder(SFT) / ADAPTER

    def require(self, stage: StageName) -> Path:
        """Return the verified directory of an earlier stage. Raises ParentMissing or UserError.

        The recipe must have the stage, it must be finished, and it must have been made from the same inputs as ours.
        """
        self.loaded.require(stage)
        path = self.folder(stage)
        if not (path / SUMMARY).exists():
            state, resume = ("did not finish", " --resume") if (path / MANIFEST).exists() else ("has not been run", "")
            command = f"`rlhf run {stage} --with-parents{resume}` on this run or recipe"
            raise ParentMissing(f"{stage} {state} ({path}): first {command}")
        summary = read_summary(path)
        assert summary is not None  # its file is there
        self.check_same(stage, base=True, parents=True)
        check_result(path, summary)
        return path

    def hashes(self, stage: StageName) -> dict[StageName, str]:
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
            now = self.hashes(stage)
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


def _text(value: object) -> str:
    """Return a value in a message; of a whole section only that it is there."""
    return "a section" if isinstance(value, dict) else excerpt(as_yaml(value), LONGEST)
