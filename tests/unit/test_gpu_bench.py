"""The GPU benchmark without a GPU: its plan, its processes, its records, and every item on a stand-in."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bench import records, results, targets
from bench.gpu import (
    command,
    decoding,
    machine,
    memory,
    packages,
    plan,
    record,
    runner,
    speed,
    suites,
    tables,
    training,
    variants,
)
from bench.gpu.item import Context, beside_allocator, load, with_random_weights
from bench.gpu.measured import (
    ITEM_FIGURES,
    DeviceFigures,
    MemoryFigures,
    MicroBatch,
    MicroBatchTime,
    PhasePeaks,
    SpeedFigures,
    SuiteFigures,
    TrainingFigures,
)
from bench.gpu.model import shared_base
from bench.gpu.plan import ITEMS, RTX4090
from bench.gpu.record import Decision, GpuRecord
from bench.kinds import Spread, StageSteps
from bench.memory.measure import beside, unmatched
from bench.provenance import in_file_name
from bench.reading import check
from peakmem.cards import Rates
from rlhf.cli import guarded
from rlhf.errors import UserError
from tests.helpers import called, noted, wait_until

ROOT = Path(__file__).parents[2]
BY_NAME = {item.name: item for item in ITEMS}
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def gpu_bench(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `python -m bench.gpu <arguments>`, in this process."""
    return called(monkeypatch, capsys, lambda: guarded(command.command), "bench.gpu", *arguments)


def good_record(name: str = "memory-4090", **changes) -> GpuRecord:
    """A record as a GPU would leave it, with some keys changed."""
    item = BY_NAME[name]
    row = record.new_record(item, False, None if item.recipe is None else load(item, False))
    row["outcome"], row["seconds"] = "done", 1.0
    row["device"] = {"type": "cuda", "name": "NVIDIA H200"}
    row["code"] = {"commit": "0123456789" * 4, "dirty": False}
    record.decide(row, Decision(True, "all | well"))
    row.update(changes)  # type: ignore[typeddict-item]  # names come from the tests
    return row


# ---- the plan ----


def test_the_plan_is_in_order_and_everything_in_it_exists():
    names = [item.name for item in ITEMS]
    assert len(set(names)) == len(names)
    assert names[0] == "device", "what all others depend on comes first"
    assert not {*names} & {*plan.DECIDED}
    assert sum(item.minutes for item in ITEMS) <= 60
    for item in ITEMS:
        module, function = item.function.split(":")
        assert callable(getattr(importlib.import_module(f"bench.gpu.{module}"), function)), item.name
        assert item.claim.endswith("."), item.name
        if item.recipe:
            assert (ROOT / "recipes" / item.recipe / "predicted.json").exists(), item.name


def test_the_plan_can_be_read_without_a_gpu(monkeypatch, capsys):
    code, out, _ = gpu_bench(monkeypatch, capsys, "--list")
    assert code == 0
    assert [name for name in re.findall(r"│ ([\w-]+) +│ [0-9]", out) if name in BY_NAME] == list(BY_NAME)
    assert "A decoding step of 16 rows reads at 60 %" in out


def test_an_unknown_item_or_a_box_without_unit_is_refused(monkeypatch, capsys):
    assert gpu_bench(monkeypatch, capsys, "--only", "fast")[0] == 2
    code, _, err = gpu_bench(monkeypatch, capsys, "--box", "9")
    assert code == 2 and "write 90s, 9m or 1h" in err
    assert [plan.seconds(box) for box in ("90s", "1.5m", "1h")] == [90, 90, 3600]


@no_gpu
def test_without_a_gpu_it_refuses_at_once(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(runner, "run", lambda *_: pytest.fail("an item was started"))
    code, out, err = gpu_bench(monkeypatch, capsys, "--out", str(tmp_path / "out"))
    assert code == 1 and out == ""
    assert len(err.strip().splitlines()) == 1 and "sees none" in err and "--dry-run" in err
    assert not (tmp_path / "out").exists()


# ---- the command, from end to end ----


@no_gpu
def test_a_dry_run_leaves_a_record(tmp_path):
    words = ["--dry-run", "--out", str(tmp_path), "--only", "device"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}  # a child must still find this checkout
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = command.records(tmp_path)
    assert set(row) == set(GpuRecord.__annotations__) and row["dry_run"]
    assert (row["gpu_item"], row["outcome"], row["verdict"]) == ("device", "done", None)
    assert check(row["measured"], DeviceFigures, "device")["ceilings"]["bandwidth"] > 0
    assert row["environment"]["PYTORCH_ALLOC_CONF"]
    assert not list((tmp_path / "unfinished").iterdir())
    assert (tmp_path / runner.RECORDS / record.path_of(row)).exists()


def test_items_wait_for_nothing_once_the_box_is_used_up(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(runner, "run", lambda *_: pytest.fail("an item was started"))
    words = ("--dry-run", "--box", "5s", "--only", "device", "--only", "training", "--out", str(tmp_path))
    code, out, _ = gpu_bench(monkeypatch, capsys, *words)
    assert code == 0 and out.count("skipped (the time box was used up before it)") == 2


@pytest.mark.parametrize(
    ("outcome", "verdict", "code"),
    [("done", "holds", 0), ("failed", None, 1), ("timed out", None, 1), ("done", "does not hold", 1)],
)
def test_the_exit_code_says_whether_all_went_well(monkeypatch, capsys, tmp_path, outcome, verdict, code):
    row = good_record("device", outcome=outcome, verdict=verdict)
    monkeypatch.setattr(runner, "run", lambda item, out, limit, dry_run: row)
    words = ("--dry-run", "--only", "device", "--out", str(tmp_path))
    assert gpu_bench(monkeypatch, capsys, *words)[0] == code


def test_without_packages_it_says_how_to_bring_them():
    done = subprocess.run([sys.executable, "-S", "-m", "bench.gpu"], cwd=ROOT, env={}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "missing: torch >=2.13" in done.stdout and "pip download" in done.stdout
    assert done.stderr.startswith("error: bench.gpu cannot run without torch, transformers")


def test_versions_are_read_tolerantly(monkeypatch, tmp_path):
    (tmp_path / "carried_package.py").write_text("__version__ = '1.2.3'")  # a module without metadata
    monkeypatch.syspath_prepend(tmp_path)
    assert packages.installed_version("carried-package") == "1.2.3"
    assert packages.installed_version("no-such-package") is None
    assert packages.fits("2.13.0+cpu", "==2.13.*") is True
    assert packages.fits("5.17.0", "==5.23.*") is False
    assert packages.fits("unknown", "==5.23.*") is None
    assert {"torch", "trl", "pyyaml"} <= set(packages.required()) and "sacrebleu" not in packages.required()


def test_missing_packages_are_named_through_those_that_need_them(monkeypatch, tmp_path):
    """A client of the hub needs one of HTTP, and that one others: each is named by the one that is here."""
    needs = {"hub_client": ["http_client"], "http_client": ["http_core; python_version > '3'", "odd; extra == 'odd'"]}
    for name, lines in needs.items():
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        metadata = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
        metadata += [f"Requires-Dist: {line}" for line in lines]
        (tmp_path / f"{name}-1.0.dist-info/METADATA").write_text("\n".join(metadata) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(packages, "required", lambda: {"hub_client": ">=1"})
    assert packages.indirect() == ["missing: http_core, needed by http_client"]


# ---- processes ----


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and waits to be collected does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pid_in(file: Path) -> int:
    wait_until(lambda: file.exists() and bool(file.read_text().strip()), f"nothing in {file}", 20)
    return int(file.read_text())


@pytest.mark.parametrize(
    ("script", "limit", "code"),
    [
        ("sleep 60 & echo $! > {file}; wait", 2.0, None),
        ("trap '' TERM; sleep 60 & echo $! > {file}; wait; sleep 60", 2.0, None),  # it will not end when asked
        ("sleep 60 & echo $! > {file}", 60.0, 0),  # the leader ends and leaves its child
    ],
)
def test_no_process_of_an_item_is_left(tmp_path, monkeypatch, script, limit, code):
    end_group = runner.end_group
    monkeypatch.setattr(runner, "end_group", lambda leader: end_group(leader, grace=0.5))
    file = tmp_path / "pid"
    begun = time.monotonic()
    with open(tmp_path / "log", "w") as log:
        exit_code = runner.run_group(["bash", "-c", script.format(file=file)], limit, log, os.environ)
    assert exit_code == code
    assert time.monotonic() - begun < 30
    grandchild = pid_in(file)
    wait_until(lambda: not alive(grandchild), "a process of the item is left", 5)


def test_an_item_that_is_cut_off_keeps_what_it_had_measured(tmp_path, monkeypatch):
    def cut_off(command, limit, output, environment):
        file = Path(command[4])
        file.write_text(json.dumps(good_record("decoding", outcome="started", measured={"rows": {"8": {}}})))
        assert environment["RLHF_VRAM_CAP"] == "24GB"

    monkeypatch.setattr(runner, "run_group", cut_off)
    item = BY_NAME["decoding"]._replace(environment=plan.SMALL_CARD)
    row = runner.run(item, tmp_path, 60.0, False)
    assert row["outcome"] == "timed out" and row["error"] == "not done after 60 s"
    assert row["measured"] == {"rows": {"8": {}}} and row["environment"]["RLHF_VRAM_CAP"] == "24GB"
    assert json.loads((tmp_path / runner.RECORDS / record.path_of(row)).read_text()) == row


@pytest.mark.parametrize(
    ("answer", "idle"), [("451 MiB", 451 << 20), ("451 MiB\n3 MiB", None), ("[N/A]", None), ("", None), (None, None)]
)
def test_the_card_is_read_before_an_item_begins(tmp_path, monkeypatch, answer, idle):
    """By a stand-in for nvidia-smi. Of several cards nobody knows which one is used."""
    tool, values = tmp_path / "nvidia-smi", tmp_path / "values"
    tool.write_text("#!/bin/sh\n" + (f"exec /bin/cat {values}\n" if answer else "exit 9\n"))
    tool.chmod(0o755)
    values.write_text(f"{answer}\n")

    def begin(command, limit, output, environment):
        values.write_text("2900 MiB\n")
        Path(command[4]).write_text(json.dumps(good_record("device")))

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(runner, "run_group", begin)
    row = runner.run(BY_NAME["device"], tmp_path, 60.0, False)
    assert row["idle_bytes"] == idle and row["outcome"] == "done"
    values.write_text(f"{answer}\n")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 51 << 20)
    assert beside_allocator() == (idle and idle - (51 << 20)), "what the item's own process says"


def test_an_item_that_was_done_but_did_not_end_in_time_is_done(tmp_path, monkeypatch):
    def hang(command, limit, output, environment):
        Path(command[4]).write_text(json.dumps(good_record("device")))

    monkeypatch.setattr(runner, "run_group", hang)
    row = runner.run(BY_NAME["device"], tmp_path, 60.0, False)
    assert (row["outcome"], row["verdict"], row["error"]) == ("done", "holds", None)


@pytest.mark.parametrize(
    ("remaining", "dry_run", "limit"), [(1000.0, False, 60.0), (30.0, False, 30.0), (1000.0, True, 1000.0)]
)
def test_an_item_has_its_own_minutes_and_no_more_than_what_is_left(tmp_path, monkeypatch, remaining, dry_run, limit):
    limits: list[float] = []
    monkeypatch.setattr(runner, "run", lambda item, out, limit, dry_run: noted(limits, limit, good_record("device")))
    command.run_item(BY_NAME["device"], tmp_path, remaining, dry_run)
    assert limits == [limit]


def test_an_item_whose_process_dies_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "run_group", lambda *_: -11)
    row = runner.run(BY_NAME["device"], tmp_path, 60.0, False)
    assert row["outcome"] == "failed" and "exit code -11" in (row["error"] or "") and row["device"] is None


# ---- every item on a stand-in ----


EACH = {item.function: item for item in reversed(ITEMS) if "suites" not in item.function}


@pytest.mark.parametrize("item", reversed(EACH.values()), ids=lambda item: item.name)
def test_an_item_runs_on_the_cpu(item, tmp_path, monkeypatch):
    if item.function == "speed:measure":  # what steps.measure does is tested elsewhere, and takes long
        stage = {"step_seconds": dict.fromkeys(("median", "low", "high"), 1.0) | {"n": 4}, "peak_vram_bytes": None}
        monkeypatch.setattr(
            "bench.gpu.speed.steps.measure", lambda loaded, stages, out, **_: dict.fromkeys(stages, stage)
        )
    for module in item.modules:
        pytest.importorskip(module)
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    file = tmp_path / "record.json"
    try:
        row = Context[object](item, True, tmp_path, file).run()
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
    assert (row["outcome"], row["verdict"], row["error"]) == ("done", None, None)
    assert row["why"] and row["measured"]
    assert record.read(file) == row and set(row) == set(GpuRecord.__annotations__)
    CHECKS.get(item.name, lambda measured: None)(row["measured"])


def decoding_has_every_variant(measured: dict[str, Any]) -> None:
    (table,) = measured["rows"].values()
    assert list(table["variants"]) == [*variants.DECODING_VARIANTS, "adapters apart"], "merged weights are the usual"
    assert all(row["step_seconds"]["n"] == decoding.ROUNDS for row in table["variants"].values())
    gone = {name: row for name, row in table["variants"].items() if isinstance(row, str)}
    assert not gone, "a switch in bench/gpu/variants.py is gone"
    # 2 layers of 32 wide, 261 words, tied; LoRA of rank 4; keys and values of 12 + 6 tokens in 4 rows; 4 bytes each
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32
    lora = 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (64 + 32))
    cache = 2 * 2 * 2 * 8 * 4 * 18
    whole = 4 * (2 * layer + 261 * 32 + 2 * lora + cache)
    read = {name: row["bytes_read"] for name, row in table["variants"].items()}
    merged = dict.fromkeys(read, whole - 4 * 2 * lora)
    assert read == merged | {"adapters apart": whole}, "nothing is credited with what it does not read"


def training_has_every_variant(measured: dict[str, Any]) -> None:
    assert set(measured["micro_batches"]) == {"sft", "ppo"} and measured["switch_ms"] > 0
    for table in measured["micro_batches"].values():
        assert list(table["variants"]) == [*variants.TRAINING]
        for row in table["variants"].values():
            # On a CPU both are of the same work, measured one after the other: a busy machine may turn them round.
            assert row["operations"] > 0 and 0 < row["host_seconds"]["low"] <= 3 * row["seconds"]["high"]
            assert row["seconds"]["n"] == training.ROUNDS * training.REPEATS


def memory_has_reserved_or_not(measured: dict[str, Any]) -> None:
    phases = {(row["stage"], row["phase"]) for row in measured["phases"]}
    assert {("sft", "train"), ("sft", "evaluate/decode"), ("rm", "train")} <= phases
    assert all(
        row["measured_bytes"] > 0 and row["reserved_bytes"] is None for row in measured["phases"] if row["phase"]
    )


CHECKS = {
    "decoding": decoding_has_every_variant,
    "training": training_has_every_variant,
    "memory-h100": memory_has_reserved_or_not,
}


@pytest.mark.parametrize(
    ("outcomes", "dry_run", "holds", "why"),
    [
        (["passed", "passed"], False, True, "2 passed"),
        (["passed"], True, None, "1 passed"),
        (["passed", "skipped"], False, True, "1 passed, 1 skipped"),
        (["skipped"], False, None, "1 skipped"),
        (["failure", "passed"], False, False, "1 failure, 1 passed"),
        (["error"], True, False, "1 error"),
        ([], False, None, "no test was chosen"),
    ],
)
def test_a_suite_is_decided_by_its_tests(outcomes, dry_run, holds, why):
    assert suites.decision(dict(zip("abc", outcomes, strict=False)), dry_run) == (holds, why)


def test_a_suite_runs_the_tests_that_are_chosen(tmp_path):
    body = "import pytest\ndef test_chosen():\n    assert 1 == 2\ndef test_chosen_skip():\n    pytest.skip('no GPU')\n"
    (tmp_path / "test_one.py").write_text(body + "def test_other():\n    pass\n")
    context = Context[SuiteFigures](BY_NAME["tests"], True, tmp_path)
    assert suites.measure(context, [str(tmp_path)], "chosen").holds is False
    # In a checkout below the folder of temporary files, a name begins with the path from there.
    outcomes = {name.rpartition(".")[2]: outcome for name, outcome in context.measured["tests"].items()}
    assert outcomes == {"test_one::test_chosen": "failure", "test_one::test_chosen_skip": "skipped"}
    (message,) = context.measured["messages"].values()
    assert "1 == 2" in message


def test_an_error_in_an_item_is_in_its_record(tmp_path):
    row = Context[object](BY_NAME["device"]._replace(function="machine:nothing"), True, tmp_path).run()
    assert row["outcome"] == "failed" and (row["error"] or "").startswith("AttributeError")


# ---- decisions ----


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({}, True),
        ({"capability": [7, 5]}, False),
        ({"other_packages": ["torch 2.12"]}, False),
        ({"smi": "579.99, 1980 MHz"}, False),
        ({"smi": None}, None),  # nvidia-smi cannot be run
        ({"smi": None, "capability": [7, 5]}, False),
    ],
)
def test_the_device_is_decided_by_card_driver_and_packages(change, holds):
    measured: DeviceFigures = {"capability": [9, 0], "other_packages": [], "smi": "580.65.06, 1980 MHz"}
    measured["ceilings"] = {"flops": 6e14, "bandwidth": 2e12}
    assert machine.decision(measured | change).holds is holds


NEAR: PhasePeaks = {
    "stage": "sft",
    "phase": "train",
    "measured_bytes": 100,
    "reserved_bytes": 110,
    "predicted_bytes": 101,
    "error": 0.01,
}


def figures(**changes) -> MemoryFigures:
    """Figures of a memory item with one phase that is near its prediction."""
    measured: MemoryFigures = {"out_of_memory": [], "unmatched": [], "phases": [NEAR]}
    measured.update(changes)  # type: ignore[typeddict-item]  # names come from the tests
    return measured


def test_memory_is_decided_by_the_worst_phase():
    far = NEAR | {"stage": "ppo", "phase": "update", "error": -0.2}
    assert memory.decision(figures(), "h100-mistral-7b").holds is True
    kept = NEAR | {"phase": "evaluate", "reserved_bytes": 300}  # what training has reserved before
    whole: PhasePeaks = {"stage": "sft", "phase": "", "measured_bytes": 100, "reserved_bytes": 112}
    decision = memory.decision(figures(phases=[whole, NEAR, kept, far]), "h100-mistral-7b")
    assert decision.holds is False and "ppo/update -20.0%" in decision.why and "at most 12% more" in decision.why
    assert memory.decision(figures(out_of_memory=[{"stage": "dpo", "error": ""}]), "").holds is False
    assert memory.decision(figures(phases=[]), "").holds is None


@pytest.mark.parametrize(("error", "holds"), [(0.05, True), (-0.05, True), (0.0501, False), (-0.0501, False)])
def test_memory_holds_within_5_percent_on_both_sides(error, holds):
    assert memory.decision(figures(phases=[NEAR | {"error": error}]), "h100-mistral-7b").holds is holds


@pytest.mark.parametrize(("peak", "holds"), [(12.0, True), (12.01, False)])
def test_a_recipe_s_targets_for_peaks_are_decided_where_memory_is_measured(peak, holds):
    """The highest phase of a stage counts; each has the bytes that were predicted."""
    phases = [
        NEAR | {"stage": "ppo", "phase": name, "measured_bytes": size} for name, size in (("", peak * 1e9), ("load", 9))
    ]
    decision = memory.decision(figures(phases=[NEAR, *phases]), "4090-llama2-7b")
    assert decision.holds is holds and ("ppo: peak memory 12.01 GB" in decision.why) is not holds
    assert memory.decision(figures(phases=phases), "h100-mistral-7b").holds is True, "which has no such target"


def test_memory_does_not_hold_where_a_phase_is_missing_on_one_side():
    for predicted, measured, line in (
        ({"update": 1, "rollout": 2}, {"": 3, "update": 1}, "ppo/rollout: predicted, not measured"),
        ({"update": 1}, {"": 3, "update": 1, "rollout": 2}, "ppo/rollout: measured, not predicted"),
    ):
        assert len(beside("ppo", predicted, measured)) == 1
        lines = unmatched("ppo", predicted, measured)
        assert memory.decision(figures(unmatched=lines), "") == (False, line)
    assert unmatched("ppo", {"update": 1}, {"": 3, "update": 1}) == []


def test_speed_is_decided_by_the_targets_of_its_recipe():
    def measured(
        mfu: float | None, mbu: float | None, shape: str = "longest", hours: float | None = None
    ) -> SpeedFigures:
        spread: Spread = {"median": 1.0, "low": 1.0, "high": 1.0, "n": 4}
        row: StageSteps = {"step_seconds": spread, "peak_vram_bytes": 5, "hours": hours, "mfu": mfu}
        return {"shape": shape, "stages": {"sft": row, "rm": row, "dpo": row, "ppo": {**row, "mbu": mbu}}}

    assert speed.decision(measured(0.5, 0.7), "h100-mistral-7b").holds is True
    assert speed.decision(measured(0.5, 0.5), "h100-mistral-7b").holds is False
    almost = speed.decision(measured(0.4199, 0.7), "h100-mistral-7b")
    assert almost.holds is False, "99.98 % of a target is not all of it, though it is printed as 0.42"
    assert speed.decision(measured(None, None), "cpu-tiny").holds is None
    spread: Spread = {"median": 1.0, "low": 0.9, "high": 1.1, "n": 4}
    for mfu, holds in ((0.4201, None), (0.4199, None), (0.47, True), (0.37, False)):
        near = measured(0.5, 0.7)
        near["stages"]["sft"] = {**near["stages"]["sft"], "mfu": mfu, "step_seconds": spread}
        decided = speed.decision(near, "h100-mistral-7b")
        assert decided.holds is holds and ("within its spread" in decided.why) is (holds is None), mfu
    lost: SpeedFigures = {"shape": "longest", "stages": {"sft": {"out_of_memory": True}}}
    assert speed.decision(lost, "h100-mistral-7b").holds is False
    assert speed.decision(measured(0.5, 0.5, shape="hh"), "4090-llama2-7b").holds is True
    assert speed.decision(measured(0.5, 0.7, hours=9.0), "h100-mistral-7b").holds is True, "not of the longest rows"
    for hours, holds in ((1.3, True), (1.4, False), (None, None)):
        assert speed.decision(measured(None, None, "hh", hours), "h100-mistral-7b").holds is holds, hours


def test_hours_are_measured_on_rows_of_usual_length():
    """For each recipe with a target in hours an item of the plan measures its stages as a run has them."""
    for name, wanted in targets.TARGETS.items():
        for stages in (target.stages for target in wanted if target.key == "hours"):
            assert [
                item
                for item in ITEMS
                if (item.recipe or "").startswith(f"{name}/") and item.options == {"shape": "hh", "stages": [*stages]}
            ], name


def test_a_speed_record_that_was_cut_off_does_not_hold(monkeypatch):
    stage = {
        "step_seconds": {"median": 1.0, "low": 1.0, "high": 1.0, "n": 4},
        "peak_vram_bytes": 5,
        "phase_seconds": {},
    }
    measured = {"shape": "longest", "ceilings": {"flops": 1.0, "bandwidth": 1.0}, "stages": {"sft": stage}}
    row = good_record("speed-h100", outcome="timed out", verdict=None, measured=measured)
    monkeypatch.setattr("rlhf.plan.predict.Predictor.predict", lambda *_: None)
    monkeypatch.setattr("rlhf.plan.projection.step_limits", lambda *_: {})
    monkeypatch.setattr("bench.derived.derived_figures", lambda *_: {"mfu": 0.5, "mbu": None, "hours": 1.0})
    speed.conclude(row)
    assert record.speed_of(row)["stages"]["sft"]["mfu"] == 0.5
    assert row["verdict"] is None and "sft: MFU 0.5" in row["why"]
    row["outcome"] = "done"
    speed.conclude(row)
    assert row["verdict"] is not None


def test_a_speed_record_has_the_bounds_of_its_phases(monkeypatch, capsys):
    """Least seconds are the projection's at the rates that the record has; each has its share of the measured."""
    row = good_record("speed-h100")
    seconds = {key: {"median": 4.0, "low": 4.0, "high": 4.0, "n": 4} for key in ("rollout/decode", "update")}
    stage = {"step_seconds": seconds["update"], "peak_vram_bytes": 5, "phase_seconds": seconds}
    row["measured"] = {"shape": "longest", "ceilings": {"flops": 1e15, "bandwidth": 1e12}, "stages": {"ppo": stage}}

    def limits(recipe: object, stage: str, predicted: object, card: Rates, longest: bool) -> dict[str, float]:
        assert (stage, card.flops, card.bandwidth, longest) == ("ppo", 1e15, 1e12, True)
        return {"rollout/decode": 1.0, "update": 2.0, "score": 3.0}

    monkeypatch.setattr("rlhf.plan.predict.Predictor.predict", lambda *_: None)
    monkeypatch.setattr("bench.derived.derived_figures", lambda *_: {})
    monkeypatch.setattr("rlhf.plan.projection.step_limits", limits)
    speed.conclude(row)
    bounds = record.speed_of(row)["stages"]["ppo"]["roofline"]
    assert set(bounds) == {"rollout/decode", "update"}, "what was measured"
    assert bounds["update"] == {"least_seconds": 2.0, "seconds": 4.0, "reached": 0.5}
    tables.show_records([row])
    assert "speed-h100: ppo/update" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("host", "switch", "holds"), [(0.8, 5.0, True), (0.81, 5.0, False), (0.8, 5.1, False), (0.1, 0.1, True)]
)
def test_training_holds_where_the_host_is_ahead_and_roles_switch_fast(host, switch, holds):
    def spread(median: float) -> Spread:
        return {"median": median, "low": 0.5 * median, "high": 2 * median, "n": 6}

    time: MicroBatchTime = {
        "seconds": spread(1.0),
        "host_seconds": spread(host),
        "scoring_seconds": spread(0.3),
        "operations": 1,
        "peak_bytes": None,
        "mfu": 0.4,
    }
    table: MicroBatch = {"rows": 1, "length": 2, "variants": {variants.AS_IT_IS: time}}
    faster: MicroBatch = {**table, "variants": {variants.AS_IT_IS: {**time, "host_seconds": spread(0.1)}}}
    measured: TrainingFigures = {"switch_ms": switch, "micro_batches": {"sft": faster, "ppo": table}}
    assert training.decision(measured, False).holds is holds, "the worst micro-batch decides"
    assert training.decision(measured, True).holds is None
    table["variants"][variants.AS_IT_IS] = "RuntimeError: no kernel"
    assert training.decision(measured, False) == (False, "ppo: RuntimeError: no kernel")
    table["variants"].clear()
    assert training.decision(measured, False) == (None, "ppo is not measured yet"), "an item may be cut off"


def test_training_that_is_cut_off_has_measured_both_stages(tmp_path, monkeypatch):
    left = [training.RoundTimes([1.0], [0.5], [0.3], None)] * 3

    def micro_batch(*_: object) -> training.RoundTimes:
        if not left:
            raise KeyboardInterrupt
        return left.pop()

    monkeypatch.setattr(training, "micro_batch", micro_batch)
    monkeypatch.setattr(training, "counted", lambda *_: 1)
    context = Context[TrainingFigures](BY_NAME["training"], True, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        training.measure(context)
    found = {stage: list(table["variants"]) for stage, table in context.measured["micro_batches"].items()}
    assert found == {"sft": [*variants.TRAINING], "ppo": [variants.AS_IT_IS]}


def test_a_micro_batch_is_trained_and_scored_as_stages_do_and_the_host_is_timed_on_few_tokens(tmp_path, monkeypatch):
    """Passes with gradients are in training mode. What the host needs, it does not wait for on a whole micro-batch."""
    tiny = load(BY_NAME["training"], True)
    assert tiny
    loaded = with_random_weights(tiny)
    shared, _ = shared_base(loaded, torch.device("cpu"), tmp_path)
    passes: list[tuple[bool, bool, tuple[int, ...]]] = []

    def note(module: Any, args: object, keywords: dict[str, Any]) -> None:
        passes.append((torch.is_grad_enabled(), module.training, tuple(keywords["input_ids"].shape)))

    shared.base.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    monkeypatch.setattr(training, "timed", lambda work: (work(), ([2.0], [1.0]))[1])
    times = training._passes(shared, 2, 16)
    few = (1, training.FEW_TOKENS)
    assert passes == [(True, True, (2, 16))] * 2 + [(True, True, few)] * 2 + [(False, False, (2, 16))] * 2
    assert (times.seconds, times.host_seconds, times.scoring_seconds) == ([2.0], [1.0], [2.0])


# ---- variants ----


def test_variants_take_turns_and_one_that_fails_is_left_out():
    done: list[tuple[str, int]] = []

    def fail(number: int) -> float:
        done.append(("bad", number))
        raise RuntimeError("no kernel")

    def work(name: str):
        return lambda number: noted(done, (name, number), float(number))

    results = dict(variants.in_rounds({"a": work("a"), "bad": fail, "b": work("b")}, 2))
    assert done == [("a", 0), ("bad", 0), ("b", 0), ("b", 1), ("a", 1)], "in reverse the second time"
    assert results == {"a": [0.0, 1.0], "bad": "RuntimeError: no kernel", "b": [0.0, 1.0]}


def test_the_first_rollout_is_not_counted_and_the_spread_of_the_others_is_kept():
    """10 steps after the prefill; 300 bytes a step at 1,000 bytes a second."""
    runs = [{"decode": seconds, "prefill": 1.0, "rollout": seconds + 1.5} for seconds in (90.0, 10.0, 5.0, 20.0)]
    row = decoding.figures(runs, 11, 300, 1000.0)
    assert row["first_step_seconds"] == 9.0 and row["mbu"] == 0.3
    assert row["step_seconds"] == {"median": 1.0, "low": 0.75, "high": 1.5, "n": 3}
    assert row["outside_seconds"] == {"median": 0.5, "low": 0.5, "high": 0.5, "n": 3}
    assert decoding.decision(row, 16, False).holds is False
    for mbu, holds in ((0.61, None), (0.59, None), (0.95, True)):  # the quartiles are 0.67 and 1.33 times as fast
        assert decoding.decision({**row, "mbu": mbu}, 16, False).holds is holds, mbu
    assert decoding.decision(decoding.figures(runs[:1], 11, 300, 1000.0), 16, False).holds is None
    assert "replay_seconds" not in row and "kernels" not in row
    assert decoding.figures([runs[0] | {"kernels": 460.0}, *runs[1:]], 11, 300, 1000.0) == row | {"kernels": 460}
    captured = decoding.figures([run | {"replay": run["decode"] / 20} for run in runs], 11, 300, 1000.0)
    assert captured == row | {"replay_seconds": {"median": 0.5, "low": 0.375, "high": 0.75, "n": 3}}


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_replay_is_timed_without_the_step_before_it_and_its_capture(monkeypatch):
    """A decoding of 2 s before the first of two replays, which take 3 s each; the prefill is no part of it."""
    clock = [0.0]
    monkeypatch.setattr(decoding, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def takes(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: takes(3))
    spent: dict[str, float] = {}
    with decoding._phase("prefill", spent):
        takes(5)
    with decoding._phase("decode", spent):
        takes(2)
        for _ in range(2):
            torch.cuda.CUDAGraph.replay(cast(Any, None))
    assert spent == {"prefill": 5, "decode": 8, "replay": 3}
    counting: dict[str, float] = {}
    with decoding._phase("decode", counting, counted=True):
        for _ in range(2):
            torch.cuda.CUDAGraph.replay(cast(Any, None))
    assert counting == {"decode": 6, "kernels": 0}, "in the rollout that does not count, the first replay's kernels"


# ---- records ----


def test_a_record_says_where_it_belongs_and_the_page_lists_it(tmp_path):
    row = good_record()
    assert str(record.path_of(row)).startswith(
        f"{RTX4090}/nvidia-h200/gpu/{in_file_name(row['date'])}_01234567_memory-4090"
    )
    later = row | {"date": "2999-01-01T00:00:01"}
    assert record.path_of(later) != record.path_of(row), "a second run on the same day and commit replaces none"
    alone = good_record("device")
    assert record.path_of(alone).parts[:2] == ("gpu", "nvidia-h200")
    for kept in (row, alone):
        runner.keep(kept, tmp_path)
    page = results.page(tmp_path / runner.RECORDS)
    assert "| GPU, memory-4090: The peak of every phase" in page and "| holds: all \\| well |" in page
    assert page.count("| NVIDIA H200 |") == 2


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"dry_run": True}, "it was not measured on a GPU"),
        ({"device": {"type": "cpu", "name": "cpu"}}, "it was not measured on a GPU"),
        ({"device": None}, "it was not measured on a GPU"),
        ({"code": {"commit": None, "dirty": None}}, "its code has no commit"),
        ({"code": {"commit": "0" * 40, "dirty": True}}, "its code differed from the commit"),
        ({"code": {"commit": "0" * 40, "dirty": None}}, "its code differed from the commit"),  # nobody knows
        ({"recipe_sha256": "0"}, "recipe 4090-llama2-7b v2 has changed since"),
        ({"version": "v9"}, "there is no recipe 4090-llama2-7b v9"),
        ({"modified": True}, "its recipe was modified"),
        ({"packages": {}}, "it names no version of torch"),
        ({"schema": 0}, "schema 0"),
        ({"gpu_item": "speed"}, "there is no item speed"),
        ({"gpu_item": "graphs"}, None),  # decided: its record stays
        ({"verdict": "perhaps"}, "verdict 'perhaps'"),
    ],
)
def test_a_record_that_cannot_be_traced_is_no_result(change, problem):
    problems = record.problems(good_record(**change), ROOT / "recipes")
    assert problems == [] if problem is None else [line for line in problems if line.startswith(problem)] != []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": "1"}, "seconds: input should be a valid number"),
        ({"device": {"type": "cuda"}}, "key 'device.name' is missing"),
        ({"measured": {"phases": [{"stage": "sft"}]}}, "measured: key 'phases.0.phase' is missing"),
    ],
)
def test_a_record_that_is_damaged_is_named_with_its_key(tmp_path, change, message):
    file = runner.keep(good_record(**change | {"recipe": None}), tmp_path) if "device" not in change else tmp_path / "x"
    file.write_text(json.dumps(good_record(**change)))
    with pytest.raises(UserError) as error:
        record.read(file)
    assert str(error.value).startswith(str(file)) and message in str(error.value)


def test_a_record_without_a_key_is_no_result(tmp_path):
    row = {key: value for key, value in good_record().items() if key != "seed"}
    assert records.problems(row, Path("gpu/x.json"), ROOT / "recipes") == [
        "gpu/x.json: key 'seed' is missing: damaged, or of another version"
    ]


def test_every_item_says_what_it_measures():
    assert {item.function for item in ITEMS} == set(ITEM_FIGURES)


def test_records_are_verified_from_the_command_line(monkeypatch, capsys, tmp_path):
    runner.keep(good_record(), tmp_path)
    assert gpu_bench(monkeypatch, capsys, "--verify", "--out", str(tmp_path))[0] == 0
    runner.keep(good_record("device", dry_run=True), tmp_path)
    code, out, _ = gpu_bench(monkeypatch, capsys, "--verify", "--out", str(tmp_path))
    assert code == 1 and "device.json: it was not measured on a GPU" in out
    code, _, err = gpu_bench(monkeypatch, capsys, "--verify", "--out", str(tmp_path / "none"))
    assert code == 1 and "there are no records" in err


def test_items_that_the_time_did_not_reach_are_no_obstacle_to_the_others(monkeypatch, capsys, tmp_path):
    """The default box is shorter than the plan: what was measured can be contributed all the same."""
    runner.keep(good_record(), tmp_path)
    runner.skip(BY_NAME["decoding-nf4"], tmp_path, False, command.USED_UP)
    code, out, _ = gpu_bench(monkeypatch, capsys, "--verify", "--out", str(tmp_path))
    assert code == 0 and f"decoding-nf4: not measured ({command.USED_UP})" in out
    (file,) = (tmp_path / runner.RECORDS).rglob("*.json")
    assert "memory-4090" in file.name, "what may be copied to results/ is measured"
    runner.keep(good_record("decoding-nf4"), tmp_path)
    assert [row["outcome"] for row in command.records(tmp_path)] == ["done", "done"], "it is measured now"


def test_a_damaged_record_is_named_and_the_others_are_verified(monkeypatch, capsys, tmp_path):
    damaged = runner.keep(good_record(), tmp_path)
    damaged.write_text("{")
    runner.keep(good_record("device"), tmp_path)
    code, out, _ = gpu_bench(monkeypatch, capsys, "--verify", "--out", str(tmp_path))
    assert code == 1 and f"{damaged}: cannot be read" in out


def test_an_interruption_ends_the_item_and_keeps_every_record(tmp_path):
    """As Ctrl-C, a lost connection and SIGTERM do; the item's own processes are gone, too."""
    words = ["--dry-run", "--out", str(tmp_path), "--only", "device", "--only", "decoding"]
    child = subprocess.Popen(
        [sys.executable, "-m", "bench.gpu", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert child.stdout
    for line in child.stdout:
        if line.startswith("decoding: at most"):
            break
    started = tmp_path / "unfinished" / "decoding.json"
    wait_until(started.exists, "the item did not start", 60)
    child.send_signal(signal.SIGHUP)
    rest, _ = child.communicate(timeout=60)
    assert child.returncode == command.INTERRUPTED, rest
    assert "interrupted" in rest and "what was decided" in rest
    rows = {row["gpu_item"]: row for row in command.records(tmp_path)}
    assert rows["device"]["outcome"] == "done"
    assert (rows["decoding"]["outcome"], rows["decoding"]["error"]) == ("failed", "interrupted")


def test_a_signal_that_is_ignored_stays_ignored():
    """Or a run under nohup would end with its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with command.interruptible():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_prediction_that_fails_leaves_the_others_and_says_so(monkeypatch, capsys, tmp_path):
    """Everything is measured by then: the tables are still printed, and --conclude tries again."""
    rows = [good_record(name, measured={"stages": {"sft": {}}}) for name in ("speed-h100", "ppo-4090")]

    def conclude(row: GpuRecord) -> None:
        if row["gpu_item"] == "speed-h100":
            raise RuntimeError("no such operation")
        row["why"] = "predicted"

    monkeypatch.setattr(speed, "conclude", conclude)
    assert command.add_predictions(rows, tmp_path) is False
    assert "speed-h100: not predicted (RuntimeError: no such operation): --conclude" in capsys.readouterr().out
    assert [row["why"] for row in command.records(tmp_path)] == ["predicted"]


def test_the_command_that_goes_on_names_the_items_that_the_time_did_not_reach(monkeypatch, capsys, tmp_path):
    words = ("--dry-run", "--box", "5s", "--only", "device", "--only", "training", "--out", str(tmp_path))
    _, out, _ = gpu_bench(monkeypatch, capsys, *words)
    assert f"to go on: python -m bench.gpu --only device --only training --out {tmp_path}" in out
