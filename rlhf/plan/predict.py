"""Peak memory of each phase of each stage: rehearsed at two depths, extrapolated to the recipe's number of layers."""

import os
import pickle
import subprocess
import sys
from contextlib import suppress
from types import TracebackType

from rlhf.plan import cache, ranks
from rlhf.plan.phases import PredictedPhase, PredictedStage, PredictionError
from rlhf.plan.weights import shape_of
from rlhf.process import children
from rlhf.process.environment import expandable_segments
from rlhf.process.memory import CONTEXT_BYTES
from rlhf.recipe import PinnedRecipe, Recipe, StageName
from rlhf.recipe.stages import PRETRAIN, STAGES
from rlhf.terminal import excerpt

PREDICTED_STAGES: tuple[StageName, ...] = tuple(stage for stage in STAGES if stage != PRETRAIN)


def predicted_stages(recipe: Recipe) -> list[StageName]:
    """Return the stages of a recipe whose memory is predicted."""
    return [stage for stage in recipe.sections() if stage in PREDICTED_STAGES]


class Predictor:
    """Context manager. It holds a worker process for rehearsals and caches predictions on disk."""

    def __init__(self) -> None:
        self._worker: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Predictor":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        worker = self._worker
        if worker is None:
            return
        assert worker.stdin
        with suppress(BrokenPipeError):  # of a worker that was killed
            worker.stdin.close()  # it ends by itself, and takes its folder with it
        _exit_code(worker)

    def predict(self, loaded: PinnedRecipe, stage: StageName) -> PredictedStage:
        """Return the phases of a stage; if several processes share it, those of one of them.

        Raises PredictionError if the recipe has no architecture, or if its rehearsal fails.
        """
        shape_of(loaded.recipe)
        return ranks.divide(loaded.recipe, stage, self._rehearsed(ranks.recipe_of_one_rank(loaded, stage), stage))

    def _rehearsed(self, loaded: PinnedRecipe, name: StageName) -> PredictedStage:
        """Return the answer of a rehearsal, from the cache if it was rehearsed before."""
        file = cache.file_of(loaded, name)
        answer = cache.read(file)
        if answer is None:
            answer = self._rehearse(loaded, name)
            cache.write(file, answer)
        return answer

    def _rehearse(self, loaded: PinnedRecipe, name: StageName) -> PredictedStage:
        """Return the worker's answer. Raises PredictionError where it has none."""
        if self._worker is None:
            self._worker = _start_worker()
        assert self._worker.stdin and self._worker.stdout
        question = loaded.directory.resolve(), loaded.overrides, name, expandable_segments()
        answer: PredictedStage | str  # or why there is none
        try:
            self._worker.stdin.write(pickle.dumps(question))
            self._worker.stdin.flush()
            answer = pickle.load(self._worker.stdout)
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):  # it died, before its answer or in the middle
            answer = f"its process {children.ending_in_words(_exit_code(self._worker))}"
            self._worker = None  # the next prediction starts another
        if isinstance(answer, str):
            raise PredictionError(f"memory of {name} cannot be predicted: {excerpt(answer)}")
        return answer


def _start_worker() -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", "rlhf.plan.rehearsal.worker"]
    settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment = children.alone(children.child_environment(**settings, TOKENIZERS_PARALLELISM="false"))
    shown = None if os.environ.get("RLHF_DEBUG") else subprocess.DEVNULL
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=shown, env=environment)


def _exit_code(worker: "subprocess.Popen[bytes]") -> int:
    """Return the exit code of a worker that is about to end; it is killed where it does not."""
    try:
        return worker.wait(timeout=5)
    except subprocess.TimeoutExpired:
        worker.kill()
        return worker.wait()


def card_needed_bytes(phase: PredictedPhase) -> int:
    """Return the least bytes of the card that a phase needs, without a card its peak.

    They are what torch's allocator holds when most is allocated, paged states and the driver's context.
    """
    if phase.needed_bytes is None:
        return phase.peak_bytes
    return phase.needed_bytes + phase.paged_bytes + CONTEXT_BYTES
