"""The benchmarks: what counts as a loss, what a record says, and items of the GPU benchmark on a CPU."""

import json
import statistics

import pytest

from bench import memory, records, tables
from bench import steps as stage_steps
from bench.__main__ import losses
from bench.against.__main__ import MEMORY, TIME, Change
from bench.gpu import __main__ as gpu
from bench.peer.__main__ import summary
from bench.records import StageSteps
from rlhf import recipe
from tests.helpers import RECIPE


def row(seconds: float, peak: int | None = None, width: float = 0.01) -> StageSteps:
    spread: records.Spread = {"median": seconds, "low": seconds - width, "high": seconds + width, "n": 3}
    return {"step_seconds": spread, "peak_vram_bytes": peak, "phase_seconds": {}}


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        (row(1.0), row(1.2), ["sft: step"]),
        (row(1.0), row(1.05), []),
        (row(1.0, width=0.2), row(1.2, width=0.2), []),  # the ranges from quartile to quartile overlap
        (row(1.0, 100), row(1.0, 104), ["sft: peak"]),
        (row(1.0, 100), row(1.0, 102), []),
        (row(1.0), {"out_of_memory": True}, ["sft: no longer fits"]),
        ({"out_of_memory": True}, row(1.0), []),
    ],
)
def test_a_stage_that_costs_more_than_before_is_a_loss(before, after, lost):
    found = [*losses({"sft": before}, {"sft": after}, "2026-01-01")]
    assert [line.startswith(start) for line, start in zip(found, lost, strict=True)] == [True] * len(lost)


@pytest.mark.parametrize(
    ("what", "ratios", "share", "worse"),
    [
        ("operations", [1.06], 0.06, True),
        ("operations", [1.04], 0.04, False),
        ("operations", [2.0], 0.001, False),  # of a phase that the stage does not feel
        (MEMORY, [1.03], 0.03, True),
        (TIME, [1.2, 1.1, 1.3], 0.2, True),
        (TIME, [1.2, 0.99, 1.3], 0.2, False),  # one pair was faster
    ],
)
def test_a_change_is_worse_beyond_its_bound_in_every_pair(what, ratios, share, worse):
    change = Change("sft", what, 100.0, 100 * statistics.median(ratios), ratios, share)
    assert change.worse(slower=0.05, larger=0.02) == worse
    assert "sft" in change.text() and what in change.text()


def test_numbers_that_changed_beyond_their_tolerance_are_named():
    before = {"stages": {"sft": {"train": {"base": 100, "logits": 100}}}, "work": {"sft": {"train": {"flops": 1000}}}}
    now = {"stages": {"sft": {"train": {"base": 90, "logits": 112}}}, "work": {"sft": {"train": {"flops": 1011}}}}
    assert [line.split()[0] for line in memory.changed(before, now)] == ["work/sft/train/flops"]  # 202 are within 3 %
    now["stages"]["sft"]["train"]["logits"] = 120
    assert next(line.split()[0] for line in memory.changed(before, now)) == "stages/sft/train"
    del now["work"]
    assert "work/sft/train/flops is gone" in [*memory.changed(before, now)]


def test_a_peer_that_takes_twice_as_long_is_half_as_fast():
    ours = [
        {"step": 1.0, "tokens_per_second": 100.0, "peak_bytes": 50},
        {"step": 1.1, "tokens_per_second": 90.0, "peak_bytes": 50},
    ]
    theirs = [
        {"step": 2.0, "tokens_per_second": 50.0, "peak_bytes": 100},
        {"step": 2.0, "tokens_per_second": 50.0, "peak_bytes": 100},
    ]
    found = summary(theirs, ours)
    assert found["times_faster"] == pytest.approx(1.9) and found["times_faster_range"] == [1.8, 2.0]
    assert found["memory_ratio"] == 0.5
    assert "times_faster" not in summary(ours, ours)


def test_a_record_is_compared_with_the_newest_of_the_same_machine(tmp_path):
    loaded = recipe.load(RECIPE)
    record = records.new("steps", loaded) | {"shape": "hh", "stages": {"sft": row(1.0)}}
    assert records.newest_before(record, tmp_path) is None
    for day, threads in (("2026-01-01", 1), ("2026-01-02", 64)):
        other = record | {"date": day, "device": record["device"] | {"threads": threads}}
        records.save(other, tmp_path / records.place(other))
    found = records.newest_before(record | {"device": record["device"] | {"threads": 1}}, tmp_path)
    assert found and found["date"] == "2026-01-01"


def test_every_record_that_is_kept_has_a_section():
    page = tables.index()
    for file in records.RESULTS.rglob("*.json"):
        assert file.name in page, f"{file}: its kind is in no section of bench/tables.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["device", "published-4090", "hours-v4", "training", "decoding"])
def test_an_item_runs_on_the_cpu(name, tmp_path):
    item = next(item for item in gpu.ITEMS if item.name == name)
    assert gpu.run(item, tmp_path, 600, dry_run=True) == "done", (tmp_path / "logs" / f"{name}.log").read_text()[-2000:]
    (file,) = (tmp_path / "results").rglob("*.json")
    record = json.loads(file.read_text())
    assert (record["kind"], record["gpu_item"], record["outcome"]) == ("gpu", name, "done")
    assert record["measured"]


@pytest.mark.slow
def test_a_stage_s_steps_are_measured(tmp_path):
    found = stage_steps.measure(recipe.load(RECIPE), ["sft"], tmp_path, steps=2, shape="hh", preflight=False)["sft"]
    assert found["step_seconds"]["n"] == 2 and found["clock"] == "cpu"
    assert found["tokens_per_second"] > 0 and found["peak_rss_bytes"] > 10**8
