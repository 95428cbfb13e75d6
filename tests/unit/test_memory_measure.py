"""How peaks are measured on a card, with an allocator made for the test; what is freed between two measurements."""

import gc
import weakref
from typing import Any

import pytest
import torch

from bench.memory import measure
from rlhf.models.loading import load_base
from rlhf.observe.telemetry import Telemetry
from rlhf.stages import sft
from tests.helpers import small

CUDA = torch.device("cuda")


class Allocator:
    """Counts bytes as torch's CUDA allocator does: one peak for the process, forgotten when it is reset."""

    def __init__(self) -> None:
        self.held = self.peak = 0

    def use(self, size: int) -> None:
        """Allocate `size` bytes and free them again."""
        self.peak = max(self.peak, self.held + size)

    def reset(self, device: torch.device | None = None) -> None:
        self.peak = self.held


@pytest.fixture
def allocator(monkeypatch) -> Allocator:
    counted = Allocator()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: counted.peak)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device=None: 2 * counted.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", counted.reset)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: counted.held)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return counted


def test_telemetry_and_the_measurement_see_the_same_peaks(allocator):
    """Both ask for the allocator's one peak at the edges of phases, and inside them: neither may take it away."""
    costs: dict[str, Any] = {}

    def run_stage(device: torch.device) -> None:
        telemetry = Telemetry(device)
        with telemetry.phase("load"):
            allocator.use(50)
            allocator.held = 10
        telemetry.loaded()
        with telemetry.phase("train"):
            for peak in (1000, 100):
                allocator.use(peak - 10)
                telemetry.memory()  # after each step, as the trainer's callback asks
        with telemetry.phase("rollout"):
            allocator.use(140)
            with telemetry.phase("decode"):
                allocator.use(390)
            allocator.use(190)
        with telemetry.phase("evaluate"), torch.profiler.record_function("decode"):  # a phase that telemetry ignores
            allocator.use(690)
        costs.update(telemetry.costs())

    peaks = measure.allocated_on_cuda(small().recipe, run_stage)
    expected = {"load": 50, "train": 1000, "rollout": 400, "rollout/decode": 400, "evaluate": 700}
    assert costs["phase_peak_bytes"] == expected
    assert costs["peak_vram_bytes"] == 1000
    assert costs["reserved_vram_bytes"] == 2000
    assert {name: peak["bytes"] for name, peak in peaks.items()} == {"": 1000, **expected, "evaluate/decode": 700}
    assert all(peak.get("reserved") == 2 * peak["bytes"] for peak in peaks.values())


def test_a_telemetry_that_begins_later_takes_no_peak_from_the_measurement(allocator):
    def run_stage(device: torch.device) -> None:
        with torch.profiler.record_function("load"):
            allocator.use(300)
            Telemetry(device)
            allocator.use(20)

    assert measure.allocated_on_cuda(small().recipe, run_stage)["load"]["bytes"] == 300


def test_no_model_of_a_stage_is_alive_when_the_next_one_is_measured(monkeypatch):
    """The trainer that holds it refers to itself, so it waits for a collection; none happens by itself here."""
    bases: list[weakref.ref[Any]] = []

    def spy(*args, **kwargs):
        base = load_base(*args, **kwargs)
        bases.append(weakref.ref(base))
        return base

    monkeypatch.setattr(sft, "load_base", spy)
    with measure.measuring(small(sft__max_length=64, sft__max_prompt_length=32)) as measure_stage:
        gc.disable()
        try:
            measure_stage("sft")
            assert [base() for base in bases] == [None]
        finally:
            gc.enable()


def test_the_error_of_a_prediction_is_relative_to_what_was_measured():
    """Above 0 where more was predicted than measured; phases of one side, and the whole stage, have no row."""
    rows = measure.beside("sft", {"train": 120, "load": 90, "save": 1}, {"": 99, "train": 100, "load": 100})
    assert [(row["phase"], round(row["error"], 9)) for row in rows] == [("train", 0.2), ("load", -0.1)]
