"""How the scripts that run a trainer of TRL take its time and its memory. Needs torch and transformers alone."""

import time
from itertools import pairwise
from pathlib import Path
from typing import Any, TypedDict

import torch
from transformers import TrainerCallback


class Taken(TypedDict):
    """What the steps of a trainer took. A script adds the versions of its packages and prints it as one line."""

    wall: list[float]  # seconds of each counted step
    cpu: list[float]  # seconds of each counted step, of all threads of the process
    growth: int  # bytes
    peak: int  # bytes


class StepClock(TrainerCallback):
    """Wall and CPU seconds at the end of every optimizer step, and the tokens that the trainer has counted by then."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []
        self.tokens: list[int] = []  # since the beginning, at the end of each step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the end of a step; the trainer calls this."""
        self.tokens.append(state.num_input_tokens_seen)
        self.mark()

    def tokens_after(self, warm_up: int) -> int:
        """Return the tokens of the steps after the first `warm_up`: those whose seconds `timed` returns.

        A sampler that puts the longest rows first gives the warm-up more of them.
        """
        return self.tokens[-1] - self.tokens[warm_up - 1]

    def mark(self) -> None:
        """Note the seconds now, with the GPU idle."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.marks.append((time.monotonic(), time.process_time()))


def timed(trainer: Any, clock: StepClock, cuda: bool, warm_up: int) -> Taken:
    """Train; return wall and CPU seconds of each step after the first `warm_up`, and by how much memory grew, in bytes.

    Growth is the peak less what was held before the first step: of resident pages on a CPU, of torch's allocator on a
    GPU.
    """
    held = _begin(cuda)
    clock.marks.clear()
    clock.mark()
    trainer.train()
    peak = torch.cuda.max_memory_allocated() if cuda else _status("VmHWM")
    wall, cpu = ([b - a for a, b in pairwise(marks)] for marks in zip(*clock.marks[warm_up:], strict=True))
    return {"wall": wall, "cpu": cpu, "growth": peak - held, "peak": peak}


def _begin(cuda: bool) -> int:
    """Forget the peak so far; return the bytes that are held now."""
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    """Return a size of this process in bytes, by its name in /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024
