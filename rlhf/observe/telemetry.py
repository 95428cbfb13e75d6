"""The cost of a stage: seconds per phase, real tokens per second, peak memory."""

import resource
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import psutil
import torch
from torch import Tensor, nn

from rlhf.observe.device import Board
from rlhf.run.records import Costs

UNCOUNTED = ("load", "evaluate")  # phases that count no tokens


class PeakWatcher(Protocol):
    """A receiver of the memory peaks of this process on CUDA."""

    def record_peak(self, allocated: int, reserved: int) -> None:
        """Note a peak, in bytes, that was reached since the last call."""


_watchers: "weakref.WeakSet[PeakWatcher]" = weakref.WeakSet()


def watch_peaks(watcher: PeakWatcher, device: torch.device) -> None:
    """Call `watcher.record_peak` with every peak from now on, until the watcher is deleted."""
    collect_peak(device)  # earlier peaks belong to the other watchers
    _watchers.add(watcher)


def collect_peak(device: torch.device) -> None:
    """Read the peaks of torch's CUDA allocator, credit them to every watcher, and reset them.

    Torch keeps one peak of each kind for the whole process, so whoever resets it takes it from everyone else. Only this
    function does.
    """
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    for watcher in list(_watchers):
        watcher.record_peak(allocated, reserved)


class Telemetry:
    """Wall and CPU seconds of each named phase, tokens that went through the model, and memory.

    A phase inside another one is named `outer/inner` and counts towards both.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.joules: dict[str, float] = defaultdict(float)
        self._board = Board(device)
        self.seconds: dict[str, float] = defaultdict(float)
        self.cpu_seconds: dict[str, float] = defaultdict(float)
        self.tokens = self._tokens_at_last_call = 0
        self._last_call = {"total": time.monotonic(), "cpu/total": time.process_time()}
        self._open: dict[str, tuple[float, float]] = {}  # wall and CPU time at which each open phase began
        self._peaks: dict[str, int] = {"": 0}  # bytes, per phase on CUDA; "" is the whole stage
        self._peak_since_read = 0
        self._reserved = 0
        self._components: dict[str, int] | None = None
        if device.type == "cuda":
            watch_peaks(self, device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block. Both ends wait for work queued on a GPU, so that it counts in the phase that queued it."""
        self._wait()
        self._note_peak()
        path = "/".join((*[*self._open][-1:], name))
        energy = self._board.joules()
        self._open[path] = wall, cpu = time.monotonic(), time.process_time()
        try:
            with torch.profiler.record_function(name):  # for profiles and for the prediction of memory
                yield
        finally:
            self._wait()
            self.seconds[path] += time.monotonic() - wall
            self.cpu_seconds[path] += time.process_time() - cpu
            self.joules[path] += self._board.joules() - energy
            self._note_peak()
            del self._open[path]

    def since_last_call(self) -> dict[str, float]:
        """Return what the steps since the last call cost: a row of telemetry.jsonl.

        It has the wall seconds of each phase, open ones included, its CPU seconds as `cpu/<phase>`, and all time that
        has passed as `total`; the tokens; and as `memory_bytes` what `memory` returns.
        """
        seconds, cpu = {**self.seconds, "total": time.monotonic()}, {**self.cpu_seconds, "total": time.process_time()}
        for name, (wall_begun, cpu_begun) in self._open.items():
            seconds[name] = self.seconds[name] + seconds["total"] - wall_begun
            cpu[name] = self.cpu_seconds[name] + cpu["total"] - cpu_begun
        totals = seconds | {f"cpu/{name}": value for name, value in cpu.items()}
        spent = {name: round(total - self._last_call.get(name, 0.0), 4) for name, total in totals.items()}
        tokens = self.tokens - self._tokens_at_last_call
        self._last_call, self._tokens_at_last_call = totals, self.tokens
        return {**spent, "tokens": tokens, "memory_bytes": self.memory()}

    def memory(self) -> int:
        """Return bytes: on CUDA the peak since the last call, elsewhere what the process holds now."""
        if self.device.type != "cuda":
            return resident_bytes()
        self._note_peak()
        peak, self._peak_since_read = self._peak_since_read, 0
        return peak

    def note_components(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Record the sizes of what is trained, for published figures of single components."""
        self._components = component_bytes(model, optimizer)

    def count(self, tokens: int) -> None:
        """Add real tokens; padding does not count."""
        self.tokens += tokens

    def costs(self) -> Costs:
        """Return the cost keys of summary.json. Tokens per second are over the phases that count tokens."""
        parts = {name: name.split("/") for name in self.seconds}
        counted = sum(self.seconds[name] for name, part in parts.items() if len(part) == 1 and name not in UNCOUNTED)
        inside = [name for name, part in parts.items() if len(part) == 2 and part[1] in UNCOUNTED]
        seconds = counted - sum(self.seconds[name] for name in inside if parts[name][0] not in UNCOUNTED)
        self._note_peak()
        joules = {name: round(spent) for name, spent in self.joules.items()}
        cuda = self.device.type == "cuda"
        return {
            "tokens_per_second": round(self.tokens / seconds, 3) if self.tokens and seconds else None,
            "phase_seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "peak_vram_bytes": self._peaks[""] if cuda else None,
            "phase_peak_bytes": {name: peak for name, peak in self._peaks.items() if name} if cuda else None,
            "reserved_vram_bytes": self._reserved if cuda else None,
            "used_vram_bytes": self._board.used_bytes(),
            "phase_joules": joules if self._board.counts_energy else None,
            "peak_rss_bytes": peak_rss_bytes() if cuda else self._peaks[""],
            "component_bytes": self._components,
        }

    def _note_peak(self) -> None:
        """Note the peak since the last call: of the allocator on CUDA, of the process elsewhere."""
        if self.device.type == "cuda":
            collect_peak(self.device)
            return
        self._peaks[""] = max(self._peaks[""], peak_rss_bytes())

    def record_peak(self, allocated: int, reserved: int) -> None:
        """Credit a peak on CUDA, in bytes, to the open phases."""
        for name in ("", *self._open):
            self._peaks[name] = max(self._peaks.get(name, 0), allocated)
        self._peak_since_read = max(self._peak_since_read, allocated)
        self._reserved = max(self._reserved, reserved)

    def _wait(self) -> None:
        """Wait for work queued on a GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def component_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of a model's base, its adapters and the optimizer's states on this device, each tensor once.

    The scalar heads and the scales of 4-bit weights belong to none of the three, as in the prediction.
    """
    sizes = {"base": 0, "adapters": 0, "optimizer": 0}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not {"score", "value_head"} & {*name.split(".")}:
            sizes["adapters" if "lora_" in name else "base"] += _bytes(tensor)
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    sizes["optimizer"] = sum(map(_bytes, {id(state): state for state in states}.values()))  # 8-bit states share tables
    return sizes


def _bytes(tensor: Tensor) -> int:
    """Return the size of a tensor in bytes."""
    return tensor.numel() * tensor.element_size()


def peak_rss_bytes() -> int:
    """Return the most memory in bytes that this process has held so far.

    Read by hand, because psutil knows no peak on Linux, which counts in KiB.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as handle:
            line = next(line for line in handle if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):  # some containers' kernels lack the line; ru_maxrss may be the parent's peak
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes() -> int:
    """Return the bytes of memory that this process holds now."""
    return psutil.Process().memory_info().rss
