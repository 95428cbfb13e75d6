"""Times of a whole step of each method on a tiny model: `make bench-micro`, with pytest-benchmark.

A stage runs in this thread and waits at the end of each step until the benchmark, in another thread, asks for the next
one: loading, evaluating and saving are outside of what is timed.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from rlhf import recipe as recipes
from rlhf.plan.rehearsal.short_runs import few_steps
from rlhf.process.task import task_of
from rlhf.recipe import Changes, Recipe, StageName
from rlhf.run.logs import Logs
from rlhf.stages import runner

RECIPE_FOLDERS = Path(__file__).parents[2] / "recipes"
# A stage comes after those that it builds on, so that none has been run before its steps are timed.
RECIPE_OF_STAGE: dict[StageName, str] = {
    **dict.fromkeys(("sft", "rm", "ppo", "rloo", "grpo", "dpo"), "cpu-tiny-groups/v1"),
    "kto": "cpu-tiny-kto/v1",
}
WARM_UP, TIMED = 2, 5  # steps; of the first the optimizer makes its states
SECONDS = 120  # after which a step that has not ended is a failure


def tiny(recipe: Recipe) -> Changes:
    """Return the changes that make a step of every section take milliseconds."""
    changes: Changes = {
        "model.architecture.hidden_size": 32,
        "model.architecture.intermediate_size": 64,
        "tokenizer.vocab_size": 400,
        "evaluate.batch_size": 8,
    }
    for stage in (*recipe.online(), *recipe.dialogues()):
        sizes = {"per_device_train_batch_size": 4}
        if stage in recipe.online():
            sizes |= {"batch_size": 8, "rollout_batch_size": 8, "num_mini_batches": 1}
        changes |= {f"{stage}.{key}": size for key, size in sizes.items()}
    return changes


class Steps:
    """The steps of a stage, one after another as they are asked for."""

    def __init__(self) -> None:
        self._ended, self._wanted, self._left = Semaphore(0), Semaphore(0), WARM_UP + TIMED

    def end(self, *values: object) -> None:
        """Note the end of a step and wait until the next one is asked for; the stage calls this."""
        self._ended.release()
        if self._left:
            assert self._wanted.acquire(timeout=SECONDS)

    def next(self) -> None:
        """Let the stage take its next step, and wait for the end of it."""
        self._left -= 1
        self._wanted.release()
        assert self._ended.acquire(timeout=SECONDS)

    def timed(self, benchmark: BenchmarkFixture) -> None:
        """Time the steps after the first ones."""
        assert self._ended.acquire(timeout=SECONDS)  # the first
        benchmark.pedantic(self.next, rounds=TIMED, warmup_rounds=WARM_UP)  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.mark.parametrize("stage", RECIPE_OF_STAGE)
def test_a_step(benchmark: BenchmarkFixture, stage: StageName, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = recipes.load(RECIPE_FOLDERS / RECIPE_OF_STAGE[stage])
    loaded = loaded.with_changes(tiny(loaded.recipe))
    loaded = loaded.with_changes(few_steps(loaded.recipe, 1 + WARM_UP + TIMED, "hh"))
    for parent in recipes.parents(loaded.recipe, stage):
        runner.execute(task_of(loaded, parent, out), loaded)
    steps, log = Steps(), Logs.telemetry

    def telemetry(logs: Logs, step: int, values: dict[str, float]) -> None:
        log(logs, step, values)
        steps.end()

    monkeypatch.setattr(Logs, "telemetry", telemetry)
    with ThreadPoolExecutor(1) as pool:
        timing = pool.submit(steps.timed, benchmark)
        runner.execute(task_of(loaded, stage, out), loaded)
        timing.result()
