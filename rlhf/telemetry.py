"""What a stage costs: seconds per phase, real tokens per second, peak memory."""

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Telemetry:
    """Sums wall seconds per named phase and the tokens that went through the model."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self.tokens = 0
        self._lap: dict[str, float] = {}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block; work queued on a GPU is waited for at both ends, so that it counts where it was asked for."""
        self._wait()
        start = time.monotonic()
        try:
            yield
        finally:
            self._wait()
            self.seconds[name] += time.monotonic() - start

    def lap(self) -> dict[str, float]:
        """Seconds per phase since the last call."""
        spent = {name: round(total - self._lap.get(name, 0.0), 4) for name, total in self.seconds.items()}
        self._lap = dict(self.seconds)
        return spent

    def count(self, tokens: int) -> None:
        """Real tokens, padding left out."""
        self.tokens += tokens

    def costs(self) -> dict[str, Any]:
        """The cost keys of summary.json; tokens per second over all phases but `evaluate`, which counts no tokens."""
        seconds = sum(spent for name, spent in self.seconds.items() if name != "evaluate")
        on_gpu = self.device.type == "cuda"
        return {
            "tokens_per_second": round(self.tokens / seconds, 3) if self.tokens and seconds else None,
            "phase_seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "peak_vram_bytes": torch.cuda.max_memory_allocated(self.device) if on_gpu else None,
            "peak_rss_bytes": peak_rss_bytes(),
        }

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def peak_rss_bytes() -> int:
    """Most memory that this process has held so far, as the operating system counts (Linux in KiB, macOS in bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_facts(device: torch.device) -> dict[str, Any]:
    """Name, memory and driver of the device, for manifest.json."""
    if device.type != "cuda":
        return {"type": "cpu", "name": "cpu", "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def _driver() -> str | None:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as handle:
            return handle.readline().strip()
    except OSError:
        return None
