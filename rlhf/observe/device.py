"""The device that a stage runs on: its name and driver, and what a GPU's board reports of energy and memory."""

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch


def device_facts(device: torch.device) -> dict[str, object]:
    """Return name, memory and driver of the device, for manifest.json."""
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
    """Return the processor's name, or its architecture if the system does not name it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _driver() -> str | None:
    """Return the version line of NVIDIA's driver, or None."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as handle:
            return handle.readline().strip()
    except OSError:
        return None


class Board:
    """A GPU as NVIDIA's management library reports it. Without a GPU or `nvidia-ml-py` it reports nothing."""

    def __init__(self, device: torch.device):
        self.handle: Any = None
        self.counts_energy = False
        if device.type != "cuda":
            return
        try:  # missing costs are not an error, and the library has many error types
            import pynvml

            pynvml.nvmlInit()
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        except Exception:
            return
        self.library = pynvml
        self.counts_energy = self._answer("nvmlDeviceGetTotalEnergyConsumption") is not None

    def joules(self) -> float:
        """Return the energy in J that the board has used since its driver was loaded; 0 if it is not counted.

        Once a reading fails, nothing is counted any more: `counts_energy` turns False.
        """
        energy = self._answer("nvmlDeviceGetTotalEnergyConsumption") if self.counts_energy else None
        self.counts_energy = energy is not None
        return 0.0 if energy is None else float(energy / 1000)

    def used_bytes(self) -> int | None:
        """Return the memory in use on the card by all processes and the driver; None if not known."""
        memory = self._answer("nvmlDeviceGetMemoryInfo") if self.handle else None
        return None if memory is None else int(memory.used)

    def _answer(self, question: str) -> Any:
        """Return what a function of the library says of this board, or None: each card answers only some of them."""
        try:
            return getattr(self.library, question)(self.handle)
        except Exception:
            return None
