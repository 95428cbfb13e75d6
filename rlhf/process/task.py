"""One stage to run with every choice made, as a file: what a process gets that runs a part of a command.

Nothing in it is an option any more. A stage of a chain, a seed of `rlhf reproduce`, a rehearsal and each rank of
several are started as `rlhf run --resolved FILE`.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field

from rlhf import recipe as recipes
from rlhf.errors import UserError
from rlhf.files import write_json
from rlhf.process import children
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.stages import PolicyName
from rlhf.run import reader
from rlhf.run.records import Record


class Task(Record):
    """A stage of a recipe, where it is run and how."""

    stage: StageName
    recipe: str  # its folder
    overrides: dict[str, Any]  # rlhf.recipe.Changes; pydantic has no form for a recursive alias
    seed: int
    argv: list[str]  # of the command that the user typed, for the manifest
    out: str  # root of runs
    resume: bool | None = None  # an unfinished run: continued, or set aside and begun anew; None: it is refused
    report_to: list[str] = Field(default_factory=list)  # trackers
    stop_on: list[str] = Field(default_factory=list)  # checks whose findings end the stage; `all`: any
    only: list[PolicyName] = Field(default_factory=list)  # policies that an evaluation compares; none: all trained ones
    preflight: bool = True
    if_needed: bool = False  # a stage that is finished, or not part of the recipe, is no error

    def load(self) -> PinnedRecipe:
        """Return the recipe."""
        return recipes.load(Path(self.recipe), self.overrides, self.seed)

    def of(self, stage: StageName, **changes: Any) -> "Task":
        """Return the task for another stage, or with other values."""
        return self.model_copy(update={"stage": stage, **changes})


def task_of(loaded: PinnedRecipe, stage: StageName, out: Path, **others: Any) -> Task:
    """Return the task to run a stage of a recipe below `out`; `others` are further fields of it."""
    return Task(
        stage=stage,
        recipe=str(loaded.directory),
        overrides=loaded.overrides,
        seed=loaded.recipe.seed,
        argv=sys.argv,
        out=str(out),
        **others,
    )


def read(file: Path) -> Task:
    """Return the task in a file. Raises UserError."""
    task = reader.read(file, Task)
    if task is None:
        raise UserError(f"{file}: no such file")
    return task


@contextmanager
def arguments(task: Task) -> Iterator[list[str]]:
    """Write a task to a file as long as it is needed. Yields the arguments of `rlhf` that run it."""
    with tempfile.TemporaryDirectory(prefix="rlhf-task-") as folder:
        file = Path(folder) / "task.json"
        write_json(file, task.model_dump(mode="json"))
        yield ["run", "--resolved", str(file)]


def run_child(task: Task) -> int:
    """Run a task in a process of its own, as `rlhf.process.children.run_child` does. Return its exit code."""
    with arguments(task) as words:
        return children.run_child([sys.executable, "-P", "-m", "rlhf.cli", *words])
