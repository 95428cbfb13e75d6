"""Peaks of the same phases that are predicted, measured on real tensors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from peakmem.tracker import Tracker
from rlhf.observe.telemetry import collect_peak, watch_peaks
from rlhf.plan.phases import PHASES
from rlhf.plan.rehearsal.seams import with_seams
from rlhf.plan.rehearsal.short_runs import ShortRuns, StageFn
from rlhf.process.torch_setup import set_up_torch
from rlhf.recipe import PinnedRecipe, Recipe, StageName
from rlhf.stages.supervised.training import free_memory

CUDA = torch.device("cuda")


class PhasePeak(TypedDict):
    """The peak of a phase in bytes: allocated, and on CUDA also what torch's allocator reserved."""

    bytes: int
    reserved: NotRequired[int]


MeasuredPeaks = dict[str, PhasePeak]  # by phase
CountPeaks = Callable[[Recipe, StageFn], MeasuredPeaks]  # runs a stage on the device that it counts for


class RealRuns(ShortRuns[PhasePeak]):
    """Runs stages at the recipe's own depth on a real device, and those that they build on first, once."""

    def __init__(self, count_peaks: CountPeaks):
        super().__init__(layers=None)
        self.count_peaks = count_peaks

    def measure(self, recipe: Recipe, run_stage: StageFn) -> MeasuredPeaks:
        """Return the peaks as `count_peaks` counts them."""
        return self.count_peaks(recipe, run_stage)

    def make_parents(self, changed: PinnedRecipe, stages: Sequence[StageName], folder: Path) -> None:
        """Run the stages."""
        for stage in stages:
            self.run(changed, stage, folder)


def tracked_on_cpu(recipe: Recipe, run_stage: StageFn) -> MeasuredPeaks:
    """Return the bytes of storages alive, as the tracker counts them on real CPU tensors."""
    assert recipe.model.architecture and recipe.model.architecture.vocab_size
    with alone(), Tracker("cpu", PHASES, recipe.model.architecture.vocab_size) as tracker:
        run_stage(torch.device("cpu"))
    return {phase: {"bytes": peak.bytes} for phase, peak in tracker.peaks().items()}


def allocated_on_cuda(recipe: Recipe, run_stage: StageFn) -> MeasuredPeaks:
    """Return the peaks of torch's CUDA allocator in each phase, and of the WHOLE stage."""
    with alone(), AllocatorPeaks() as meter:
        run_stage(CUDA)
        collect_peak(CUDA)
    peaks: MeasuredPeaks = meter.peaks
    return peaks


@contextmanager
def alone() -> Iterator[None]:
    """Free what earlier work has left before a measurement, and what it leaves itself after it, also when it fails.

    A Trainer refers to itself, so that its model lives on until Python's garbage collector runs: a whole base, which
    would count as the next stage's.
    """
    free_unused()
    try:
        yield
    finally:
        free_unused()


def free_unused() -> None:
    """Free models that nothing refers to any more, and return the allocator's unused memory to the card."""
    free_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class AllocatorPeaks(TorchDispatchMode):
    """Peaks of torch's CUDA allocator per phase, in `peaks`, while the mode is on.

    Phases are blocks of `torch.profiler.record_function` with a name in PHASES; one inside another is `outer/inner`
    and counts for both. Telemetry takes peaks as well; each credits the other's phases
    (`rlhf.observe.telemetry.collect_peak`).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no annotations
        self.peaks: MeasuredPeaks = {}
        self._open: list[str | None] = []
        watch_peaks(self, CUDA)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.profiler._record_function_enter_new.default:
            collect_peak(CUDA)
            self._open.append(args[0] if args[0] in PHASES else None)
        elif func is torch.ops.profiler._record_function_exit._RecordFunction:
            collect_peak(CUDA)
            self._open.pop()
        return func(*args, **(kwargs or {}))

    def record_peak(self, allocated: int, reserved: int) -> None:
        """Credit a peak, in bytes, to the phases that are open."""
        names = [name for name in self._open if name]
        for depth in range(len(names) + 1):
            peak = self.peaks.setdefault("/".join(names[:depth]), {"bytes": 0, "reserved": 0})
            peak["bytes"] = max(peak["bytes"], allocated)
            peak["reserved"] = max(peak.get("reserved", 0), reserved)


@contextmanager
def measuring(loaded: PinnedRecipe) -> Iterator[Callable[[StageName], MeasuredPeaks]]:
    """Yield a function that runs a stage and returns the peaks of its phases.

    A stage takes two steps with the recipe's settings, random weights and the longest rows. Stages that it builds on
    run first, once.
    """
    set_up_torch(loaded.recipe)  # attention kernels and memory cap, as in a run
    count = tracked_on_cpu if loaded.recipe.hardware.device == "cpu" else allocated_on_cuda
    with with_seams():
        run_and_measure = RealRuns(count)
        yield lambda stage: run_and_measure(loaded, stage)


def measure(loaded: PinnedRecipe, stages: Sequence[StageName]) -> dict[str, dict[str, int]]:
    """Return the bytes at the peak of each phase of each of the stages, as `measuring` has them."""
    with measuring(loaded) as measure_stage:
        return {s: {phase: peak["bytes"] for phase, peak in measure_stage(s).items()} for s in stages}
