"""Peak memory of each phase of each stage: rehearsed at two depths, extrapolated to the recipe's number of layers."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType

from peakmem import cards
from rlhf.files import JsonObject
from rlhf.plan import cache, ranks
from rlhf.plan.lines import extrapolate
from rlhf.plan.phases import (
    ON_HOST,
    QUESTION_TYPE,
    STAGE_ANSWER,
    WHOLE,
    PredictedPhase,
    PredictedStage,
    PredictionError,
    Question,
    RehearsedStage,
    Reserved,
)
from rlhf.process import children
from rlhf.process.cuda import CONTEXT_BYTES, expandable_segments
from rlhf.recipe import PinnedRecipe, Recipe, StageName
from rlhf.recipe.stages import PRETRAIN, STAGES, TRAINING_STAGES
from rlhf.terminal import excerpt

PREDICTED_STAGES: tuple[StageName, ...] = tuple(stage for stage in STAGES if stage != PRETRAIN)

FRAGMENTATION = 0.15  # reserved over allocated where nothing can be replayed; the recipes' stages have at most 0.12


def predicted_stages(recipe: Recipe) -> list[StageName]:
    """Return the stages of a recipe whose memory is predicted."""
    return [stage for stage in recipe.sections() if stage in PREDICTED_STAGES]


class Predictor:
    """Context manager. It holds a worker process for rehearsals and caches predictions on disk."""

    def __init__(self) -> None:
        self._worker: subprocess.Popen[str] | None = None

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
        layers = _layers(loaded)
        rehearsed = self._rehearsed(ranks.recipe_of_one_rank(loaded, stage), stage)
        shallow, deeper = rehearsed.depths
        phases = extrapolate(
            shallow, deeper, layers, functools.partial(workspaces, loaded.recipe, stage), rehearsed.highest
        )
        phases = {name: _with_reserved(phase, name, rehearsed.reserved) for name, phase in phases.items()}
        whole = phases.pop(WHOLE)
        # A stage needs what its neediest phase does. The replay of all events together may add the margin of a full
        # card (TIGHT) to a phase that never reserves so much.
        if needed := [phase.needed_bytes for phase in phases.values() if phase.needed_bytes is not None]:
            whole = whole._replace(needed_bytes=max(whole.peak_bytes, *needed))
        return ranks.divide(loaded.recipe, stage, PredictedStage(whole, phases))

    def _rehearsed(self, loaded: PinnedRecipe, name: StageName) -> RehearsedStage:
        """Return the answer of a rehearsal, from the cache if it was rehearsed before."""
        file = cache.file_of(loaded, name)
        answer = cache.read(file, STAGE_ANSWER)
        if answer is None:
            answer = STAGE_ANSWER.validate_python(self._rehearse(loaded, name))
            cache.write(file, STAGE_ANSWER, answer)
        return answer

    def _rehearse(self, loaded: PinnedRecipe, name: StageName) -> JsonObject:
        """Return the worker's answer as JSON's types. Raises PredictionError where it has none."""
        if self._worker is None:
            self._worker = _start_worker()
        assert self._worker.stdin and self._worker.stdout
        question = Question(str(loaded.directory.resolve()), loaded.overrides, name, expandable_segments())
        try:
            print(QUESTION_TYPE.dump_json(question).decode(), file=self._worker.stdin, flush=True)
            line = self._worker.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line.endswith("\n"):
            answer = json.loads(line)
        else:  # it died, before its answer or in the middle
            answer = {"error": f"its process {children.ending_in_words(_exit_code(self._worker))}"}
            self._worker = None  # the next prediction starts another
        if "error" in answer:
            reason = excerpt(answer["error"])
            raise PredictionError(f"memory of {name} cannot be predicted: {reason}")
        result: JsonObject = answer["result"]
        return result


def _with_reserved(phase: PredictedPhase, name: str, replayed: Mapping[str, Reserved] | None) -> PredictedPhase:
    """Return a phase with what the allocator reserves and needs: as `replayed`, or guessed where nothing could be."""
    if replayed is None:
        guess = round(phase.peak_bytes * (1 + FRAGMENTATION))
        return phase._replace(reserved_bytes=guess, needed_bytes=guess)
    if name not in replayed:
        return phase
    # A peak has the workspaces from the start; the allocator is asked for them by the first product.
    needed = max(replayed[name].needed, phase.peak_bytes)
    return phase._replace(reserved_bytes=max(replayed[name].reserved, needed), needed_bytes=needed)


def _layers(loaded: PinnedRecipe) -> int:
    architecture = loaded.recipe.model.architecture
    if architecture is None:
        raise PredictionError(
            f"{loaded.directory}: memory is predicted from model.architecture, which this recipe does not have; its "
            "stages run without a prediction (docs/own-model.md)"
        )
    return architecture.num_hidden_layers


def workspaces(recipe: Recipe, stage: StageName, phase: str) -> int:
    """Return the bytes of cuBLAS's workspaces on the recipe's card in a phase of a stage.

    The program's own thread has one and autograd's thread another. A phase that decodes has a third, of the stream on
    which a decoding step is captured; it lies in the graph's memory and goes with it.
    """
    if recipe.hardware.device != "cuda" or stage in ON_HOST:
        return 0
    threads = 2 if stage in TRAINING_STAGES else 1
    return (threads + phase.endswith("decode")) * cards.workspace(recipe.hardware.name)


def _start_worker() -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", "-m", "rlhf.plan.rehearsal.worker"]
    environment = children.alone(children.child_environment(OMP_NUM_THREADS="1"))
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if os.environ.get("RLHF_DEBUG") else subprocess.DEVNULL,
        text=True,
        env=environment,
    )


def _exit_code(worker: "subprocess.Popen[str]") -> int:
    """Return the exit code of a worker that is about to end; it is killed where it does not."""
    try:
        return worker.wait(timeout=5)
    except subprocess.TimeoutExpired:
        worker.kill()
        return worker.wait()


def card_reserved_bytes(phase: PredictedPhase) -> int:
    """Return the bytes that a phase takes of a card with room to spare, as nvidia-smi shows them for the process.

    They are what torch's allocator reserves (`Reserved`), paged states and the driver's context; without a card the
    peak.
    """
    return phase.peak_bytes if phase.reserved_bytes is None else _with_context(phase.reserved_bytes, phase)


def card_needed_bytes(phase: PredictedPhase) -> int:
    """Return the least bytes of the card that a phase needs: those of `card_reserved_bytes`, with `Reserved.needed`."""
    return phase.peak_bytes if phase.needed_bytes is None else _with_context(phase.needed_bytes, phase)


def _with_context(held: int, phase: PredictedPhase) -> int:
    """Return what the allocator holds in a phase, with what lies on the card beside it."""
    return held + phase.paged_bytes + CONTEXT_BYTES
