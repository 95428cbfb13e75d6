"""How the scripts of the peers take the time and the memory of a trainer."""

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback


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

    def taken(self, cuda: bool, warm_up: int) -> dict[str, Any]:
        """Return what the steps after the first `warm_up` took: wall and CPU seconds of each, their tokens, the peak.

        Tokens are of the same steps: a sampler that puts the longest rows first gives the warm-up more of them. The
        peak is of resident pages on a CPU, of torch's allocator on a GPU.
        """
        wall, cpu = ([b - a for a, b in pairwise(marks)] for marks in zip(*self.marks[warm_up:], strict=True))
        tokens = self.tokens[-1] - self.tokens[warm_up - 1] if self.tokens else 0
        peak = torch.cuda.max_memory_allocated() if cuda else resident_peak()
        return {"wall": wall, "cpu": cpu, "tokens": tokens or None, "peak": peak}


def resident_peak() -> int:
    """Return the most bytes that this process has held in memory."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
