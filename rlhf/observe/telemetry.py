"""What a stage costs: seconds per phase, real tokens per second, peak memory."""

import os
import platform
import re
import resource
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor, nn

UNCOUNTED = ("load", "evaluate")  # phases that count no tokens


class PeakWatcher(Protocol):
    """Something that wants to know the memory peaks of this process on CUDA."""

    def credit(self, allocated: int, reserved: int) -> None:
        """Take note of a peak, in bytes, that was reached since the last call."""


_watchers: "weakref.WeakSet[PeakWatcher]" = weakref.WeakSet()


def watch_peaks(watcher: PeakWatcher, device: torch.device) -> None:
    """Call `watcher.credit` with every peak that is taken from now on, until the watcher is deleted."""
    take_peak(device)  # what came before belongs to the others
    _watchers.add(watcher)


def take_peak(device: torch.device) -> None:
    """Read the peaks of torch's CUDA allocator, credit them to every watcher, and start them anew.

    Torch keeps one peak of each kind for the whole process, so whoever resets it takes it from everyone else. This is
    the only place that does.
    """
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    for watcher in list(_watchers):
        watcher.credit(allocated, reserved)


class Telemetry:
    """Sums wall and CPU seconds per named phase, the tokens that went through the model, and watches memory.

    A phase inside another one is named `outer/inner` and counts towards both.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.joules: dict[str, float] = defaultdict(float)
        self._board = Board(device)
        self.seconds: dict[str, float] = defaultdict(float)
        self.cpu_seconds: dict[str, float] = defaultdict(float)
        self.tokens = 0
        self._lap = {"total": time.monotonic(), "cpu/total": time.process_time()}
        self._open: list[str] = []
        self._loaded: int | None = None
        self._peaks: dict[str, int] = {"": 0}  # bytes, per phase on CUDA; "" is all of the time
        self._peak_since_loaded = 0
        self._peak_since_asked = 0
        self._reserved = 0
        self._components: dict[str, int] | None = None
        if device.type == "cuda":
            watch_peaks(self, device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block; work queued on a GPU is waited for at both ends, so that it counts where it was asked for."""
        self._wait()
        self._note_peak()
        self._open.append(name)
        full = "/".join(self._open)
        wall, cpu, energy = time.monotonic(), time.process_time(), self._board.joules()
        try:
            with torch.profiler.record_function(name):  # in profiles, and for the prediction of memory
                yield
        finally:
            self._wait()
            self.seconds[full] += time.monotonic() - wall
            self.cpu_seconds[full] += time.process_time() - cpu
            self.joules[full] += self._board.joules() - energy
            self._note_peak()
            self._open.pop()

    def loaded(self) -> None:
        """From here on memory is watched for what the stage adds to the loaded models."""
        self._note_peak()
        self._peak_since_loaded = 0
        if self.device.type == "cuda":
            self._loaded = torch.cuda.memory_allocated(self.device)
        else:
            self._loaded = _forget_peak_rss()

    def lap(self) -> dict[str, float]:
        """Wall seconds per phase since the last call, CPU seconds as `cpu/<phase>`; `total` is all that has passed."""
        cpu = {**self.cpu_seconds, "total": time.process_time()}
        totals = {**self.seconds, "total": time.monotonic(), **{f"cpu/{name}": value for name, value in cpu.items()}}
        spent = {name: round(total - self._lap.get(name, 0.0), 4) for name, total in totals.items()}
        self._lap = totals
        return spent

    def memory(self) -> int:
        """Bytes: on CUDA the peak since the last call, elsewhere what the process holds now."""
        if self.device.type != "cuda":
            return resident_bytes()
        self._note_peak()
        peak, self._peak_since_asked = self._peak_since_asked, 0
        return peak

    def note_components(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Record the sizes of what is trained, for published figures of single components."""
        self._components = component_bytes(model, optimizer)

    def count(self, tokens: int) -> None:
        """Real tokens, padding left out."""
        self.tokens += tokens

    def costs(self) -> dict[str, Any]:
        """The cost keys of summary.json; tokens per second over the phases that count tokens."""
        parts = {name: name.split("/") for name in self.seconds}
        counted = sum(self.seconds[name] for name, part in parts.items() if len(part) == 1 and name not in UNCOUNTED)
        inside = [name for name, part in parts.items() if len(part) == 2 and part[1] in UNCOUNTED]
        seconds = counted - sum(self.seconds[name] for name in inside if parts[name][0] not in UNCOUNTED)
        self._note_peak()
        cuda = self.device.type == "cuda"
        return {
            "tokens_per_second": round(self.tokens / seconds, 3) if self.tokens and seconds else None,
            "phase_seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "peak_vram_bytes": self._peaks[""] if cuda else None,
            "phase_peak_bytes": {name: peak for name, peak in self._peaks.items() if name} if cuda else None,
            "reserved_vram_bytes": self._reserved if cuda else None,
            "used_vram_bytes": self._board.used_bytes(),
            "phase_joules": {n: round(spent) for n, spent in self.joules.items()} if self._board.handle else None,
            "peak_rss_bytes": peak_rss_bytes() if cuda else self._peaks[""],
            "component_bytes": self._components,
            "peak_over_loaded_bytes": self._peak_since_loaded - self._loaded if self._loaded is not None else None,
        }

    def _note_peak(self) -> None:
        """Take note of the peak since the last call: of the process, or on CUDA of the allocator."""
        if self.device.type == "cuda":
            take_peak(self.device)
            return
        peak = peak_rss_bytes()
        self._peaks[""] = max(self._peaks[""], peak)
        self._peak_since_loaded = peak

    def credit(self, allocated: int, reserved: int) -> None:
        """Credit a peak on CUDA, in bytes, to the phases that are open."""
        for depth in range(len(self._open) + 1):
            name = "/".join(self._open[:depth])
            self._peaks[name] = max(self._peaks.get(name, 0), allocated)
        self._peak_since_loaded = max(self._peak_since_loaded, allocated)
        self._peak_since_asked = max(self._peak_since_asked, allocated)
        self._reserved = max(self._reserved, reserved)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Board:
    """What NVIDIA's management library says about a GPU; nothing where there is none, or no `nvidia-ml-py`."""

    def __init__(self, device: torch.device):
        self.handle: Any = None
        if device.type != "cuda":
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)  # not every card counts it
            self.library = pynvml
        except Exception:  # costs are told as far as they are known; the library raises a type for each reason
            self.handle = None

    def joules(self) -> float:
        """Energy that the whole board has used since its driver was loaded; 0 where it is not counted."""
        return self.library.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1000 if self.handle else 0.0

    def used_bytes(self) -> int | None:
        """Memory that is taken on the card now: by every process, with what the driver holds."""
        return self.library.nvmlDeviceGetMemoryInfo(self.handle).used if self.handle else None


def component_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of a model's base, of its adapters and of the optimizer's states, on this device, each tensor once.

    The scalar heads and the scales beside 4-bit weights belong to none of the three, as in the prediction.
    """
    found = {"base": 0, "adapters": 0, "optimizer": 0}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not {"score", "value_head"} & {*name.split(".")}:
            found["adapters" if "lora_" in name else "base"] += _bytes(tensor)
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    found["optimizer"] = sum(map(_bytes, {id(state): state for state in states}.values()))  # 8-bit states share tables
    return found


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def peak_rss_bytes() -> int:
    """Return the most memory in bytes that this process has held so far.

    Read by hand, because psutil knows no peak on Linux. The operating system counts in KiB there, in bytes on macOS.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as handle:
            line = next(line for line in handle if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):  # ru_maxrss on Linux may be the peak of the process that started this one
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _forget_peak_rss() -> int | None:
    """Reset the operating system's record of this process's peak to what it holds now, in bytes, and return that.

    Return None where the system has no such reset, which only Linux has.
    """
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as handle:
            handle.write("5")  # man 5 proc: resets VmHWM
    except OSError:
        return None
    return resident_bytes()


def resident_bytes() -> int:
    """Return the bytes of memory that this process holds now."""
    return psutil.Process().memory_info().rss


def device_facts(device: torch.device) -> dict[str, Any]:
    """Name, memory and driver of the device, for manifest.json."""
    if device.type != "cuda":
        return {"type": "cpu", "name": "cpu", "model": cpu_model(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "memory_cap": os.environ.get("RLHF_VRAM_CAP"),
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def cpu_model() -> str:
    """What the processor calls itself, with its architecture where the system does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _driver() -> str | None:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as handle:
            return handle.readline().strip()
    except OSError:
        return None
