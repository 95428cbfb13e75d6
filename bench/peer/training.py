"""How the scripts of the peers take the time and the memory of a trainer. Needs torch and transformers alone."""

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from typing_extensions import TypedDict


class Taken(TypedDict):
    """What the steps of a trainer took after its warm-up. A script prints it as one line of JSON."""

    wall: list[float]  # seconds of each step
    cpu: list[float]  # seconds of each step, of all threads of the process
    tokens: int | None  # of these steps, as the trainer counts them, without padding; None where it counts none
    peak: int  # bytes, of resident pages on a CPU, of torch's allocator on a GPU


class StepClock(TrainerCallback):
    """Wall and CPU seconds at the end of every optimizer step, and the tokens that the trainer has counted by then."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []
        self.tokens: list[int] = []  # since the beginning, at the end of each step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the end of a step; the trainer calls this."""
        self.tokens.append(state.num_input_tokens_seen)
        self.mark()

    def mark(self) -> None:
        """Note the seconds now, with the GPU idle."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.marks.append((time.monotonic(), time.process_time()))


def timed(trainer: Any, clock: StepClock, cuda: bool, warm_up: int) -> Taken:
    """Train; return what the steps after the first `warm_up` took.

    Tokens are of the same steps: a sampler that puts the longest rows first gives the warm-up more of them.
    """
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    clock.marks.clear()
    clock.mark()
    trainer.train()
    wall, cpu = ([b - a for a, b in pairwise(marks)] for marks in zip(*clock.marks[warm_up:], strict=True))
    tokens = clock.tokens[-1] - clock.tokens[warm_up - 1] if clock.tokens else 0
    peak = torch.cuda.max_memory_allocated() if cuda else resident_peak()
    return {"wall": wall, "cpu": cpu, "tokens": tokens or None, "peak": peak}


def resident_peak() -> int:
    """Return the most bytes that this process has held in memory."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
