"""What telemetry says about a board, with a management library that was made for the test."""

import sys
from types import SimpleNamespace

import pytest
import torch

from rlhf.observe.device import Board
from rlhf.observe.telemetry import Telemetry, component_bytes

CUDA = torch.device("cuda")


class Library:
    """1 kJ and 1 GB more at every question."""

    def __init__(self) -> None:
        self.asked = 0
        self.uuid = ""

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.uuid = uuid
        return "handle"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        assert handle == "handle"
        self.asked += 1
        return 1_000_000 * self.asked  # millijoules

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=7_000_000_000)


@pytest.fixture
def library(monkeypatch) -> Library:
    found = Library()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    properties = SimpleNamespace(uuid="11111111-2222")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return found


def test_components_are_sums_over_tensors_each_counted_once():
    base = torch.nn.Linear(4, 3)  # 15 float32
    model = torch.nn.ModuleDict({"q": base, "tied": base, "lora_A": torch.nn.Linear(4, 2, bias=False)})
    model["score"] = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model["lora_A"].parameters())
    model["lora_A"](torch.ones(4)).sum().backward()
    optimizer.step()
    steps = sum(state["step"].numel() * 4 for state in optimizer.state.values())
    assert component_bytes(model, optimizer) == {"base": 60, "adapters": 32, "optimizer": 64 + steps}
    table = torch.zeros(10)
    for state in optimizer.state.values():
        state |= {"qmap1": table, "qmap2": table}
    assert component_bytes(model, optimizer)["optimizer"] == 64 + steps + 40


def test_without_a_gpu_or_the_library_nothing_is_told(monkeypatch):
    assert Board(torch.device("cpu")).handle is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Board(CUDA).handle is None
    costs = Telemetry(torch.device("cpu")).costs()
    assert (costs["used_vram_bytes"], costs["phase_joules"]) == (None, None)


def test_energy_is_credited_to_each_phase(library):
    telemetry = Telemetry(torch.device("cpu"))
    telemetry._board = Board(CUDA)
    with telemetry.phase("outer"), telemetry.phase("inner"):
        pass
    with telemetry.phase("other"):
        pass
    assert telemetry.costs()["phase_joules"] == {"outer/inner": 1000, "outer": 3000, "other": 1000}


def test_memory_on_a_gpu_is_the_peak_since_it_was_asked_last(monkeypatch):
    """Phases reset torch's own peak; what is asked between them still sees all of it, and changes none of them."""
    peak = {"bytes": 0}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak["bytes"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: peak["bytes"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.update(bytes=1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    telemetry = Telemetry(CUDA)
    with telemetry.phase("rollout"):
        peak["bytes"] = 500
    with telemetry.phase("update"):
        peak["bytes"] = 300
        assert telemetry.memory() == 500
    peak["bytes"] = 20
    assert telemetry.memory() == 20
    found = telemetry.costs()
    assert found["phase_peak_bytes"] == {"rollout": 500, "update": 300} and found["peak_vram_bytes"] == 500


def test_evaluation_inside_training_is_no_training_time(monkeypatch):
    clock = iter([0.0, 0.0, 1.0, 4.0, 5.0])  # the first lap; training, evaluation, and the end of both
    monkeypatch.setattr("rlhf.observe.telemetry.time.monotonic", lambda: next(clock))
    telemetry = Telemetry(torch.device("cpu"))
    with telemetry.phase("train"), telemetry.phase("evaluate"):
        pass
    telemetry.count(100)
    costs = telemetry.costs()
    assert costs["phase_seconds"] == {"train/evaluate": 3.0, "train": 5.0}
    assert costs["tokens_per_second"] == 50.0


def test_a_row_has_the_seconds_of_phases_that_are_open(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 4.0, 6.0, 9.0])  # the first lap; training, two rows, its end, the third row
    monkeypatch.setattr("rlhf.observe.telemetry.time.monotonic", lambda: next(clock))
    telemetry = Telemetry(torch.device("cpu"))
    with telemetry.phase("train"):
        rows = [telemetry.since_last_call(), telemetry.since_last_call()]
    rows.append(telemetry.since_last_call())
    assert [row["train"] for row in rows] == [2.0, 1.0, 2.0]
    assert [row["total"] for row in rows] == [3.0, 1.0, 5.0] and all("cpu/train" in row for row in rows)


def test_a_row_has_the_tokens_of_all_steps_since_the_last_one():
    telemetry = Telemetry(torch.device("cpu"))
    for tokens in (5, 7):
        telemetry.count(tokens)
    assert telemetry.since_last_call()["tokens"] == 12
    telemetry.count(3)
    row = telemetry.since_last_call()
    assert row["tokens"] == 3 and telemetry.tokens == 15 and row["memory_bytes"] > 0
