"""Peaks of the same phases that are predicted, measured on real tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf import cuda
from rlhf.memory.rehearse import PHASES, Rehearsals, shortened
from rlhf.memory.tracker import Tracker
from rlhf.recipe import Loaded, Recipe


def tracked_on_cpu(recipe: Recipe, run_stage: Callable[[Any], Any]) -> dict[str, Any]:
    """Bytes of storages alive, as the tracker counts them on real CPU tensors."""
    assert recipe.model.architecture and recipe.model.architecture.vocab_size
    with Tracker("cpu", PHASES, recipe.model.architecture.vocab_size) as tracker:
        run_stage(torch.device("cpu"))
    return {phase: {"bytes": peak.bytes} for phase, peak in tracker.peaks().items()}


def allocated_on_cuda(recipe: Recipe, run_stage: Callable[[Any], Any]) -> dict[str, Any]:
    """`torch.cuda.max_memory_allocated` in each phase."""
    cuda.configure(recipe.hardware.deterministic)
    torch.cuda.empty_cache()
    with _Allocated() as meter:
        run_stage(torch.device("cuda"))
    return {phase: {"bytes": peak} for phase, peak in meter.peaks().items()}


class _Allocated(TorchDispatchMode):
    """Asks CUDA's allocator for its peak whenever a phase begins or ends."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[str | None] = []
        self.found: dict[str, int] = {}
        torch.cuda.reset_peak_memory_stats()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.profiler._record_function_enter_new.default:
            self.note()
            self.entered.append(args[0] if args[0] in PHASES else None)
        elif func is torch.ops.profiler._record_function_exit._RecordFunction:
            self.note()
            self.entered.pop()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        phase = [name for name in self.entered if name]
        for depth in range(len(phase) + 1):
            name = "/".join(phase[:depth])
            self.found[name] = max(peak, self.found.get(name, 0))
        torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> dict[str, int]:
        self.note()
        return self.found


def measure(loaded: Loaded, stages: list[str]) -> dict[str, dict[str, int]]:
    """Bytes at the peak of each phase of each stage, with the recipe's settings, random weights and longest rows."""
    watch = tracked_on_cpu if loaded.recipe.hardware.device == "cpu" else allocated_on_cuda
    with shortened():
        rehearse = Rehearsals(None, watch)
        return {s: {phase: peak["bytes"] for phase, peak in rehearse(loaded, s).items()} for s in stages}
