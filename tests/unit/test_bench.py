"""The benchmark's own logic: what counts as a loss, which published figures are exceeded, how steps are summarised."""

import copy
import json
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from bench import __main__ as bench
from bench import ablation, baseline, ceilings, compare, costs, derived, options, provenance, results, steps, targets
from bench.kinds import Ceilings, Device, Spread, StageSteps, StepsRecord
from bench.memory import budgets
from bench.paths import ROOT
from bench.rounds import in_order
from rlhf import recipe
from rlhf.errors import UserError
from rlhf.plan import prediction_file, projection, published_figures
from rlhf.plan.phases import ON_HOST, PredictedPhase, PredictedStage, PredictionError, Work
from rlhf.plan.plan import plan_of
from rlhf.plan.strategies import StrategyCost, one_by_one
from rlhf.process.exhaustion import EXHAUSTED
from rlhf.recipe import StageName
from rlhf.recipe.chain import differences
from rlhf.recipe.schema import Sft
from rlhf.recipe.schema_online import Ppo
from rlhf.recipe.stages import TRAINING_STAGES, stage_name
from rlhf.run.records import Code
from tests.helpers import RECIPE, noted

STAGE: StageSteps = {
    "clock": "wall",
    "step_seconds": {"median": 1.0, "low": 0.95, "high": 1.05, "n": 8},
    "phase_seconds": {"train": {"median": 1.0, "low": 0.95, "high": 1.05, "n": 8}},
    "tokens_per_step": 100.0,
    "tokens_per_second": 100.0,
    "peak_vram_bytes": 10_000_000_000,
    "phase_peak_bytes": {"train": 9_000_000_000},
    "peak_rss_bytes": 1_000_000_000,
    "predicted_peak_bytes": 9_500_000_000,
    "hours": 3.0,
    "mfu": None,
    "mbu": None,
}
RECORD: StepsRecord = {
    "recipe": "4090-llama2-7b",
    "version": "v1",
    "recipe_sha256": "0",
    "date": "2026-01-01",
    "shape": "hh",
    "steps": 8,
    "code": {"commit": "0" * 40, "dirty": False},
    "packages": {},
    "python": "3.11.7",
    "device": {"type": "cuda", "name": "card"},
    "ceilings": {"flops": 1e15, "bandwidth": 1e12},
    "stages": {"sft": STAGE},
}


def changed(**values) -> StepsRecord:
    """The record with some values of its stage changed."""
    record = copy.deepcopy(RECORD)
    record["stages"]["sft"].update(values)  # type: ignore[typeddict-item]  # names come from the tests
    return record


def seconds(median, low, high):
    return {"train": {"median": median, "low": low, "high": high, "n": 8}}


def test_the_same_record_is_no_loss():
    assert not list(compare.losses(RECORD, RECORD))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"peak_vram_bytes": 10_290_000_000}, None),
        ({"peak_vram_bytes": 10_310_000_000}, "sft: peak memory +3.1%, 10.00 to 10.31 GB"),
        ({"phase_peak_bytes": {"train": 9_500_000_000}}, "sft/train: peak memory +5.6%"),
        ({"phase_seconds": seconds(1.09, 1.08, 1.10)}, None),  # slower by less than a tenth
        ({"phase_seconds": seconds(1.2, 1.1, 1.3)}, "sft/train: +20%, 1 to 1.2 s"),
        ({"phase_seconds": seconds(1.2, 1.0, 1.4)}, None),  # the two spreads overlap
        ({"phase_seconds": seconds(1.2, 1.04, 1.4)}, None),  # above the old median, within its spread
        ({"out_of_memory": True}, "sft no longer fits"),
    ],
)
def test_a_planted_loss_is_caught_and_noise_is_not(values, expected):
    losses = [loss.line() for loss in compare.losses(RECORD, changed(**values))]
    assert losses == [] if expected is None else [line for line in losses if line.startswith(expected)] == losses != []


def test_small_losses_that_are_large_together_are_caught():
    """Each record is 9 % slower and 2.9 % larger than the one before, which is no loss by itself."""
    first, second, third = (
        changed(phase_seconds=seconds(*[1.09**n] * 3), peak_vram_bytes=round(1.029**n * 1e10)) | {"date": f"day {n}"}
        for n in range(3)
    )
    assert not list(compare.losses(second, third)) and not compare.losses_since([first], second)
    found = compare.losses_since([second, first], third)
    assert found == [
        "since day 0: sft: peak memory +5.9%, 10.00 to 10.59 GB",
        "since day 0: sft/train: +19%, 1 to 1.19 s",
    ]
    again = compare.losses_since([third, second], changed(phase_seconds=seconds(2.0, 2.0, 2.0)))
    assert again == ["since day 2: sft/train: +68%, 1.19 to 2 s"], "a line for each, since the newest"


@pytest.mark.parametrize("key", ["recipe", "version", "recipe_sha256", "shape"])
def test_records_of_another_recipe_or_shape_are_not_compared(key):
    other = copy.deepcopy(RECORD)
    changes: Any = {key: "other"}
    other.update(changes)
    with pytest.raises(ValueError, match=f"records of another {key} cannot be compared: .* and other"):
        list(compare.losses(RECORD, other))


def test_no_loss_hides_another_of_the_same_stage_or_phase():
    """A phase that is both larger and slower has two lines, and so has a stage; each since the newest record."""
    after = changed(
        phase_seconds=seconds(2.0, 1.9, 2.1), peak_vram_bytes=11_000_000_000, phase_peak_bytes={"train": 9_900_000_000}
    )
    assert compare.losses_since([RECORD, RECORD], after) == [
        "since 2026-01-01: sft: peak memory +10.0%, 10.00 to 11.00 GB",
        "since 2026-01-01: sft/train: peak memory +10.0%, 9.00 to 9.90 GB",
        "since 2026-01-01: sft/train: +100%, 1 to 2 s",
    ]


def grown(growth_bytes: float, **values) -> StepsRecord:
    """A record of a CPU whose process grows by these bytes in a step."""
    return changed(peak_vram_bytes=None, phase_peak_bytes=None, growth_bytes=growth_bytes, **values)


def test_what_a_process_holds_is_no_loss_but_its_growth_in_every_step_is():
    """What is resident spreads by a tenth in equal code. 4 MB more in every step of 1 GB are 4 % in ten steps."""
    before = grown(0)
    assert not list(compare.losses(before, grown(0, peak_rss_bytes=1_100_000_000)))
    (leak,) = compare.losses(before, grown(4e6))
    assert leak.line() == "sft: memory grows in every step, by 0.004 GB"
    assert not list(compare.losses(before, grown(2e6))), "within the limit"
    assert not list(compare.losses(changed(), grown(4e6))), "an older record does not say"


@pytest.mark.parametrize(
    ("held", "growth"),
    [
        ([100, 104, 108, 112, 116], 4),
        ([100, 100, 108, 108, 116], 4),  # pages come in jumps
        ([100, 140, 140, 140, 140], 0),  # a buffer
        ([140, 140, 140, 140, 180], 0),
        ([100, 90, 80, 70, 60], -10),
        ([100, 104, 108], 4),
        ([100, 104], 4),
        ([100], 0),
        ([100, 103, 106, 110, 112, 114], 2),
    ],
)
def test_growth_in_every_step_by_hand(held, growth):
    assert steps.growth(held) == growth


def test_records_of_other_devices_are_not_compared():
    other = copy.deepcopy(RECORD)
    other["device"] = {"type": "cuda", "name": "another card"}
    with pytest.raises(ValueError, match="card and another card"):
        list(compare.losses(RECORD, other))


def test_times_of_other_threads_or_by_another_clock_are_not_compared():
    """More threads take more seconds of the process's clock, and fewer of the wall's."""
    device: Device = {"type": "cpu", "name": "cpu", "model": "Processor A", "threads": 1}
    one: StepsRecord = {**RECORD, "device": device}
    with pytest.raises(ValueError, match="records of 1 and 16 threads cannot be compared"):
        list(compare.losses(one, {**one, "device": {**device, "threads": 16}}))
    with pytest.raises(ValueError, match="seconds of the wall and the CPU clock cannot be compared"):
        list(compare.losses(one, changed(clock="cpu") | {"device": device}))


def loaded_of(name: str):
    return recipe.load(RECIPE.parents[1] / name / "v1")


def stages_of(**stages) -> dict[StageName, StageSteps]:
    """Stages with a peak in GB and projected hours each."""
    return {
        stage_name(stage): STAGE | {"peak_vram_bytes": round(peak * 1e9), "hours": hours}
        for stage, (peak, hours) in stages.items()
    }


def verdicts_of(
    name: str, stages: dict[StageName, StageSteps], price: float | None = None
) -> dict[tuple[str, str], str]:
    """Stage and figure as the table prints them -> verdict."""
    compared = costs.comparisons(loaded_of(name), stages, price)
    return {(row[0], f"{row[1]} {row[2]}"): row[4] for row in costs.figure_rows(compared)}


def test_only_records_of_the_same_processor_are_compared(tmp_path, monkeypatch):
    """`cpu` is the name of every CPU."""
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    here: Device = {"type": "cpu", "name": "cpu", "model": "Processor A", "threads": 1}
    other: Device = {**here, "model": "Processor B"}
    stored: dict[str, Device] = {"old": {"type": "cpu", "name": "cpu", "threads": 1}, "other": other}
    loaded = recipe.load(RECIPE)
    now: StepsRecord = {**RECORD, "recipe": loaded.name, "version": loaded.version, "device": here}
    folder = bench.folder_of(now)
    folder.mkdir(parents=True)
    for name, device in stored.items():
        (folder / f"2026-01-01_{name}_hh.json").write_text(json.dumps(now | {"device": device, "date": name}))
    assert bench.comparable(loaded, now) == []
    assert [bench.beside_row(record)[1] for record in baseline.before(now, tmp_path)] == [
        "cpu: Processor B" if name == "other" else "cpu" for name in sorted(stored, reverse=True)
    ]
    with pytest.raises(ValueError, match="records of cpu: Processor B and cpu: Processor A cannot be compared"):
        list(compare.losses({**now, "device": other}, now))
    (folder / "2025-01-01_mine_hh.json").write_text(json.dumps(now | {"date": "mine"}))
    assert [earlier["date"] for earlier in bench.comparable(loaded, now)] == ["mine"]
    assert not bench.comparable(loaded, now | {"recipe_sha256": "f" * 64}), "a draft that was edited"
    assert not bench.comparable(loaded, now | {"device": {**here, "threads": 16}}), "other threads"
    seconds: dict[StageName, StageSteps] = {"sft": {**STAGE, "clock": "cpu"}}
    assert not bench.comparable(loaded, now | {"stages": seconds}), "another clock"


def test_of_two_records_of_one_day_the_later_is_the_newest(tmp_path, monkeypatch):
    """Whatever the hashes of their commits."""
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    loaded = recipe.load(RECIPE)
    record: StepsRecord = {**RECORD, "recipe": loaded.name, "version": loaded.version}
    bench.folder_of(record).mkdir(parents=True)
    for moment, commit in (("2026-12-01T09:00:00", "f" * 40), ("2026-12-01T10:00:00", "0" * 40)):
        monkeypatch.setattr(provenance, "now", lambda moment=moment: moment)
        bench.new_file(record | {"code": {"commit": commit, "dirty": False}}).write_text(
            json.dumps(record | {"date": commit})
        )
    assert [earlier["date"] for earlier in bench.comparable(loaded, record)] == ["0" * 40, "f" * 40]


GPU = [file for file in (ROOT / "results").rglob("nvidia-h200/gpu/*.json") if baseline.as_steps(file)]


@pytest.mark.parametrize("file", GPU, ids=lambda file: file.stem)
def test_records_of_a_card_are_held_against_those_of_the_same_card(file, tmp_path):
    """Whichever item measured them: memory by bytes, time by its ratio."""
    honest = json.loads(file.read_text())
    new = tmp_path / "new.json"

    def found(ratio: float, size: float, **changes: object) -> tuple[list[str], int]:
        def grown(value: Any, key: str = "") -> Any:
            if isinstance(value, dict):
                return {name: grown(one, f"{key}/{name}") for name, one in value.items()}
            if isinstance(value, list):
                return [grown(one, key) for one in value]
            if "bytes" in key and isinstance(value, int):
                return round(size * value)
            return ratio * value if isinstance(value, float) else value

        later = honest | {"date": "2999-01-01", "measured": grown(honest["measured"])} | changes
        new.write_text(json.dumps(later))
        return baseline.show([new])

    assert found(1.05, 1.02) == ([], 1)
    timed = "memory" not in honest["gpu_item"]
    assert any("%, " in line and " s" in line for line in found(1.3, 1.0)[0]) is timed
    assert any("peak memory +4.0%" in line for line in found(1.0, 1.04)[0]) is ("decoding" not in honest["gpu_item"])
    assert found(1.3, 1.3, device=honest["device"] | {"name": "NVIDIA H100"}) == ([], 0)
    assert found(1.3, 1.3, device=honest["device"] | {"memory_cap": "12GB"}) == ([], 0)
    assert found(1.3, 1.3, recipe_sha256="0" * 64) == ([], 0)


def test_make_bench_on_a_card_finds_the_records_of_its_items():
    """Five were kept of the H200: hours of v2's stages, peaks of both recipes, and parts of a step."""
    assert sorted({baseline.as_steps(file)["shape"] for file in GPU}) == [  # type: ignore[index]  # all are one
        "hh",
        "longest",
        "micro-batches",
        "steps of decoding",
    ]
    (hours,) = (file for file in GPU if "hours" in file.name)
    record = baseline.as_steps(hours)
    assert record
    now: StepsRecord = {**record, "date": "now"}
    assert [one["date"] for one in baseline.before(now)] == [record["date"]]


def test_published_figures_that_are_exceeded_are_named():
    loaded = loaded_of("4090-llama2-7b")
    assert not list(costs.worse(costs.comparisons(loaded, RECORD["stages"])))
    (row,) = bench.stage_rows(RECORD["stages"])
    assert row[5] == "10.00"
    over = list(costs.worse(costs.comparisons(loaded, changed(peak_vram_bytes=20_100_000_000, hours=4.6)["stages"])))
    assert over == [
        "sft: peak_vram_gb 20.1 misses peak memory (Step 1, SFT Training), 18 – 20 GB (+0.5 %)",
        "sft: hours 4.6 misses time (Step 1, SFT Training), 2 – 4 hours (+15.0 %); time on the timeline (Training "
        "Metrics Timeline), 4 hours (+15.0 %)",
    ]
    lost = changed(out_of_memory=True)["stages"]
    assert bench.out_of_memory(lost) == ["sft: out of memory"]
    assert bench.stage_rows(lost)[0][5] == "OUT OF MEMORY"
    assert not list(costs.worse(costs.comparisons(loaded, lost)))


def test_the_table_names_the_clock_of_its_seconds():
    """On a CPU the seconds are those of the process, which a busy machine does not stretch."""
    assert bench.stage_columns(RECORD["stages"])[1:3] == ("step, wall s", "tokens/wall s")
    columns = bench.stage_columns(changed(clock="cpu")["stages"])
    assert (columns[1], columns[2], columns[-1]) == ("step, CPU s", "tokens/CPU s", "CPU hours")
    assert len(columns) == len(bench.stage_rows(RECORD["stages"])[0])
    assert bench.stage_columns({"sft": {"out_of_memory": True}})[1] == "step, wall s"


def test_every_figure_of_a_cost_is_a_row_and_one_that_is_reproduced_is_enough():
    verdicts = verdicts_of("h100-mistral-7b", stages_of(sft=(58, 5.0)))
    assert verdicts["sft", "peak memory at batch 16 and 512 tokens (Hardware and Cost) about 61 GB"] == ("met (-4.9 %)")
    assert verdicts["sft", "peak memory (RLHF Architecture) 45 GB"] == "missed (+28.9 %)"
    assert verdicts["sft", "time (RLHF Architecture) 2 – 8 hours"] == "met"
    compared = costs.comparisons(loaded_of("h100-mistral-7b"), stages_of(sft=(58, 5.0)))
    assert not list(costs.worse(compared))
    compared = costs.comparisons(loaded_of("h100-mistral-7b"), stages_of(sft=(68, 5.0)))
    assert [line.partition(" misses ")[0] for line in costs.worse(compared)] == ["sft: peak_vram_gb 68"]


def test_figures_of_all_stages_are_compared_once_the_chain_is_measured():
    chain = {"sft": (58, 8.0), "rm": (25, 4.0), "ppo": (70.4, 20.0), "dpo": (36, 99.0)}
    verdicts = verdicts_of("h100-mistral-7b", stages_of(**chain), price=1.99)
    assert verdicts["all", "fits the card with LoRA (Overview) ≤ 80 GB"] == "met"
    assert verdicts["all", "time of the PPO route (FAQ) 12 – 36 hours"] == "met"
    assert verdicts["all", "time of the run that is priced (Overview) 24 hours"] == "missed (+33.3 %)"
    assert verdicts["all", "cost of a run (Overview) 47.76 USD"] == "missed (+33.3 %)"
    assert verdicts["ppo", "peak memory (RLHF Architecture) 70 GB"] == "met (+0.6 %)"
    assert verdicts["ppo", "peak memory while scoring and in the backward pass (Step 3) 75 GB"] == "better (-6.1 %)"
    unpriced = verdicts_of("h100-mistral-7b", stages_of(**chain))
    assert unpriced["all", "cost of a run (Overview) 47.76 USD"] == "not compared: needs the price of an hour (--price)"


def test_a_part_of_the_chain_is_not_compared_with_a_total_unless_it_is_over_already():
    key = "all", "fits the card with LoRA (Overview) ≤ 80 GB"
    assert verdicts_of("h100-mistral-7b", stages_of(sft=(58, 5.0)))[key] == "not compared: needs rm, ppo"
    assert verdicts_of("h100-mistral-7b", stages_of(sft=(84, 5.0)))[key] == "missed (+5.0 %)"
    over = costs.worse(costs.comparisons(loaded_of("h100-mistral-7b"), stages_of(sft=(84, 5.0))))
    assert "all: peak_vram_gb 84 misses fits the card with LoRA (Overview), ≤ 80 GB (+5.0 %)" in " ".join(over)
    combined = stages_of(sft=(24.9, 1.0), rm=(19, 1.0), ppo=(19, 1.0))
    verdicts = verdicts_of("4090-mistral-7b", combined)
    assert verdicts["all", "peak memory (VRAM Optimization Strategies) 20 GB"] == "missed (+24.5 %)"


def test_sizes_that_a_stage_reports_are_compared():
    stages = stages_of(ppo=(20, 8.0))
    stages["ppo"]["component_bytes"] = {"base": 3_760_000_000, "adapters": 640_000_000}
    verdicts = verdicts_of("4090-llama2-7b", stages)
    assert verdicts["ppo", "memory of the base (Memory Usage Breakdown) about 3.5 GB"] == "met (+7.4 %)"
    assert verdicts["ppo", "memory of the adapters (Memory Usage Breakdown) about 0.05 GB"] == "missed (+1,180 %)"
    kept = verdicts["ppo", "memory of the key-value cache (Memory Usage Breakdown) about 2 – 4 GB"]
    assert kept.startswith("not compared: predicted only")
    stages = stages_of(ppo=(20, 8.0))
    stages["ppo"]["adapter_bytes"] = 54_500_000
    verdicts = verdicts_of("h100-mistral-7b", stages)
    assert verdicts["ppo", "size of the adapter (Step 5) 0.05 GB"] == "met (+9.0 %)"


PINNED = budgets.pinned_recipes(ROOT / "recipes")


@pytest.mark.parametrize("directory", PINNED, ids=lambda d: f"{d.parent.name}-{d.name}")
def test_a_recipe_that_needs_what_is_predicted_is_not_worse_than_published(directory):
    """Memory beyond a guide's is explained in published.yaml, hours by what is projected; a tenth more is worse."""
    pinned = budgets.pinned(directory)
    first = pinned.get("sft", next(iter(pinned.values())))
    adapter = max(parts.get("adapters", 0) for parts in first.values())

    def row(stage: StageName, times: float) -> StageSteps:
        phases = pinned[stage].values()
        components = {part: max(p.get(part, 0) for p in phases) for part in ("base", "adapters", "optimizer")}
        peak = max(sum(parts.values()) for parts in phases)
        return STAGE | {
            "peak_vram_bytes": round(peak * times),
            "adapter_bytes": round(adapter * times),
            "component_bytes": {part: round(size * times) for part, size in components.items()},
            "hours": hours[stage],
        }

    loaded = recipe.load(directory)
    content = prediction_file.read(directory)
    assert content
    plan = plan_of(loaded, prediction_file.stages_of(content))
    times = ((stage, planned.time) for stage, planned in plan.stages.items())
    hours: dict[StageName, float | None] = {stage: time.projected_hours if time else None for stage, time in times}
    trained = [stage for stage in pinned if stage not in ON_HOST]
    assert not list(costs.worse(costs.comparisons(loaded, {stage: row(stage, 1.0) for stage in trained})))
    more = list(costs.worse(costs.comparisons(loaded, {stage: row(stage, 1.12) for stage in trained})))
    assert len(more) >= len({(f.stage, f.metric) for f in loaded.figures if f.explained})


def test_an_ablation_compares_what_it_measured():
    none: StageSteps = {"peak_vram_bytes": 85_000_000_000, "step_seconds": seconds(2.0, 2.0, 2.0)["train"]}
    row: StageSteps = {"peak_vram_bytes": 63_750_000_000, "step_seconds": seconds(2.5, 2.5, 2.5)["train"]}
    effect = ablation.effect(row, none)
    assert effect == {"memory_gb": -21.25, "memory_percent": -25, "time_factor": 1.25, "time_percent": 25}
    verdicts = published_figures.of_strategy(loaded_of("h100-mistral-7b"), "gradient_checkpointing", effect)
    assert verdicts == ["memory_percent -30 – -20: met", "time_percent 10 – 20: missed (+5 points)"]


SUMMARY = {
    "peak_vram_bytes": 5,
    "phase_peak_bytes": {},
    "reserved_vram_bytes": 6,
    "used_vram_bytes": None,
    "phase_joules": None,
    "peak_rss_bytes": 7,
    "predicted_peak_vram_bytes": None,
    "phase_seconds": {"evaluate": 1.0},
}


def finished(folder: Path, summary: dict[str, object], rows: list[dict[str, float]]) -> Path:
    """A run directory of a finished stage."""
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "telemetry.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_stage_does_not_fit_if_its_exit_code_says_so_and_not_its_words(tmp_path, monkeypatch):
    def ended(code: int) -> None:
        done = subprocess.CompletedProcess([], code, stderr="error: this is a bug: out of memory\n")
        monkeypatch.setattr("bench.steps.subprocess.run", lambda *_, **__: done)

    ended(EXHAUSTED)
    assert steps.measure(recipe.load(RECIPE), ["sft"], tmp_path, steps=1, shape="hh") == {
        "sft": {"out_of_memory": True}
    }
    ended(70)
    with pytest.raises(UserError, match="sft: error: this is a bug"):
        steps.measure(recipe.load(RECIPE), ["sft"], tmp_path, steps=1, shape="hh")


def test_a_stage_whose_parent_did_not_fit_does_not_fit_and_others_are_measured(tmp_path, monkeypatch):
    tried: list[str] = []

    def run(_, stage, *__):
        return noted(tried, stage, "out of memory" if stage in too_large else "done")

    monkeypatch.setattr(steps, "_run", run)
    monkeypatch.setattr(steps, "stage_steps", lambda folder, warm_up: {"hours": 1.0})
    loaded, lost = recipe.load(RECIPE), {"out_of_memory": True}
    too_large = {"sft"}
    assert steps.measure(loaded, ["ppo"], tmp_path, steps=1, shape="hh") == {"ppo": lost}
    assert tried == ["sft"]
    too_large = {"ppo"}
    measured = steps.measure(loaded, ["ppo", "dpo"], tmp_path, steps=1, shape="hh")
    assert measured == {"ppo": lost, "dpo": {"hours": 1.0}}


@pytest.mark.parametrize(
    ("stages", "measured", "taken"),
    [
        (["ppo"], None, {"sft": 1, "rm": 1, "ppo": 5, "dpo": 9}),
        (["ppo"], ["sft", "ppo"], {"sft": 9, "rm": 1, "ppo": 5}),
        (["sft"], ["sft", "ppo"], {"sft": 9, "rm": 1, "ppo": 5}),
        (["evaluate"], None, {"sft": 1, "ppo": 1, "dpo": 1}),
        (["sft"], None, {"sft": 9}),
    ],
)
def test_a_parent_takes_one_step_unless_it_is_measured(stages, measured, taken, tmp_path, monkeypatch):
    """Calls for one folder agree about the steps of each stage: a finished parent stays."""
    shorts: list[Any] = []
    monkeypatch.setattr(steps, "measure_short", lambda short, *_, **__: noted(shorts, short.recipe, {}))
    more: Any = {"steps": 3, "supervised_steps": 7, "shape": "hh", "measured": measured}
    steps.measure(recipe.load(RECIPE), stages, tmp_path, **more)
    sections = {stage: getattr(shorts[0], stage) for stage in taken}
    assert {stage: getattr(x, "max_steps", None) or x.steps for stage, x in sections.items()} == taken


def test_steps_are_summarised_without_the_warm_up(tmp_path):
    times, tokens = [50.0, 9.0, 1.0, 2.0, 6.0], [7, 7, 100, 200, 600]
    rows = [
        {"step": n, "train": t, "cpu/train": 2 * t, "tokens": count}
        for n, (t, count) in enumerate(zip(times, tokens, strict=True), 1)
    ]
    row = steps.stage_steps(finished(tmp_path, SUMMARY, rows))
    assert row["step_seconds"] == {"median": 2.0, "low": 1.5, "high": 4.0, "n": 3}
    assert row["tokens_per_second"] == 900 / 9 and row["tokens_per_step"] == 300
    assert row["clock"] == "wall", "a GPU works while its process waits"


def test_on_a_cpu_seconds_are_the_process_s_and_details_of_the_rollout_count_once(tmp_path):
    names = {"rollout": 4.0, "rollout/prefill": 1.0, "rollout/decode": 3.0, "score": 2.0, "update": 5.0}
    cpu = {f"cpu/{name}": seconds for name, seconds in names.items()}
    rows = [{"step": n, "tokens": 22, **dict.fromkeys(names, 100.0), **cpu} for n in (1, 2, 3, 4)]
    row = steps.stage_steps(finished(tmp_path, SUMMARY | {"peak_vram_bytes": None}, rows))
    assert row["clock"] == "cpu"
    assert row["step_seconds"]["median"] == 11.0 and row["tokens_per_second"] == 2.0
    assert {name: spread["median"] for name, spread in row["phase_seconds"].items()} == names


@pytest.mark.parametrize(
    ("summary", "rows", "message"),
    [
        ({"peak_rss_bytes": None}, [], r"summary\.json: peak_rss_bytes: input should be a valid integer"),
        ({}, [], r"telemetry\.jsonl: it has no step"),
        ({}, [{"step": 1}], r"telemetry\.jsonl:1: key 'tokens' is missing"),
        ({}, [{"step": 2, "tokens": 1, "train": 1.0}], "all of its steps are warm-up"),
    ],
)
def test_a_run_that_cannot_be_summarised_is_named_with_its_file(tmp_path, summary, rows, message):
    with pytest.raises(UserError, match=message):
        steps.stage_steps(finished(tmp_path, SUMMARY | summary, rows))


def test_the_limits_of_a_device_count_both_terms_of_a_product_and_both_ways_of_a_copy(monkeypatch):
    """A product of 4 x 4 matrices has 64 multiplications and as many sums; a copy of 10 bytes reads and writes them."""
    monkeypatch.setitem(ceilings.SIZES, "cpu", (4, 10, 1))
    monkeypatch.setattr(ceilings, "_median_seconds", lambda *_: 2.0)
    rates = ceilings.ceilings(torch.device("cpu"), torch.float32)
    assert rates == {"flops": 64.0, "bandwidth": 10.0, "clock": "cpu"}


@pytest.mark.parametrize(("device", "clock"), [("cpu", "process_time"), ("cuda", "perf_counter")])
def test_a_limit_is_the_median_of_the_runs_after_two_that_warm_up_by_the_clock_of_the_steps(monkeypatch, device, clock):
    """By another clock MFU and MBU would be no shares: a busy machine stretches the wall's seconds alone."""
    marks = iter([0.0, 90.0, 0.0, 80.0, 0.0, 1.0, 0.0, 3.0, 0.0, 2.0])
    monkeypatch.setattr(time, clock, lambda: next(marks))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    assert ceilings._median_seconds(lambda: None, torch.device(device), 3) == 2.0


def test_after_its_limits_are_measured_a_card_has_its_memory_back(monkeypatch):
    """Stages run in processes of their own on what is left of it."""
    done: list[str] = []
    rates: Ceilings = {"flops": 1.0, "bandwidth": 1.0}
    monkeypatch.setattr(ceilings, "_rates", lambda *_: noted(done, "measured", rates))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    assert ceilings.ceilings(torch.device("cuda"), torch.bfloat16) == rates
    assert done == ["measured", "emptied"]


def test_hours_are_those_of_the_mean_step_and_mbu_counts_every_batch_of_a_rollout(monkeypatch):
    loaded = recipe.load(RECIPE, {"ppo.batch_size": 64, "ppo.rollout_batch_size": 48})
    monkeypatch.setattr(projection, "decoding_step_bytes", lambda *_: 1000.0)
    monkeypatch.setattr(projection, "step_flops", lambda *_: {"update": 1.0})
    spread: Spread = {"median": 2.0, "low": 1.0, "high": 3.0, "n": 8}
    row = STAGE | {"step_seconds": spread, "phase_seconds": {"update": spread, "rollout/decode": spread}}
    row |= {"tokens_per_step": 250.0, "tokens_per_second": 100.0}
    predicted = PredictedStage(PredictedPhase(1, {"base": 1}, 0, Work()), {})
    best: Ceilings = {"flops": 1.0, "bandwidth": 1.0}
    figures, usual = (
        derived.derived_figures(loaded, "ppo", row, predicted, best, shape) for shape in ("longest", "hh")
    )
    assert figures["mbu"] == 2 * (loaded.recipe.options(Ppo).response_length - 1) * 1000 / 2.0, (
        "48 rows, then the other 16"
    )
    total = projection.optimizer_steps(loaded.recipe, "ppo")
    assert total is not None and usual["hours"] == total * 2.5 / 3600, "a total is of means"
    assert figures["hours"] is None and usual["mbu"] is None, "a stage's rows are not all of the longest"


def test_what_was_measured_is_kept_where_nothing_is_predicted(capsys):
    def fails(*_: object) -> PredictedStage:
        raise PredictionError("memory of sft cannot be predicted: its process ended")

    loaded = recipe.load(RECIPE)
    predicted = bench.predicted_or_none(fails, loaded, "sft")
    assert predicted is None and capsys.readouterr().err.startswith("memory of sft cannot be predicted")
    best: Ceilings = {"flops": 1.0, "bandwidth": 1.0}
    figures, usual = (derived.derived_figures(loaded, "sft", STAGE, None, best, shape) for shape in ("longest", "hh"))
    total = projection.optimizer_steps(loaded.recipe, "sft")
    assert total is not None and usual["hours"] == total / 3600
    assert figures["mfu"] is figures["mbu"] is figures["predicted_peak_bytes"] is usual["predicted_peak_bytes"] is None
    assert bench.stage_rows({"sft": STAGE | figures})[0][5:] == ("10.00", "-", "-")


def test_the_ablation_changes_one_thing_at_a_time():
    loaded = recipe.load(RECIPE.parents[1] / "h100-mistral-7b" / "v1")
    made = one_by_one(loaded, "sft")
    off = made["none"].recipe
    sft = off.options(Sft)
    assert (off.model.quantization, off.model.attention, sft.gradient_checkpointing) == ("none", "eager", False)
    batch = sft.per_device_train_batch_size * sft.gradient_accumulation_steps
    for name, changed in made.items():
        options = changed.recipe.options(Sft)
        assert options.per_device_train_batch_size * options.gradient_accumulation_steps == batch, name
        keys = differences(off.model_dump(), changed.recipe.model_dump())
        assert len(keys) <= 2 or name == "combined", keys
    assert set(made) == {
        *("none", "gradient_checkpointing", "quantization", "flash_attention", "batch_size", "context_length"),
        "combined",
    }


def test_the_ablation_shows_flash_attn_beside_torch_s_own_kernel(monkeypatch, tmp_path):
    """Where the package cannot run, its row says why and the others stand."""
    taken: list[float] = []

    def measure(loaded, stages, *_, **__):
        taken.append(1.0 + len(taken))
        if loaded.recipe.model.attention == "flash_attention_2":
            raise UserError("sft: model.attention: flash_attention_2 has kernels for CUDA only")
        seconds = {"median": taken[-1], "low": taken[-1], "high": taken[-1], "n": 4}
        return {"sft": {"peak_vram_bytes": 2_000_000_000, "peak_rss_bytes": 1, "step_seconds": seconds}}

    monkeypatch.setattr(steps, "measure", measure)
    file = tmp_path / "ablation.json"

    def predicted(*_: object) -> defaultdict[str, StrategyCost]:
        assert file.exists(), "a prediction that fails costs no measurement"
        return defaultdict(lambda: StrategyCost(3 * 10**9, 1.0))

    monkeypatch.setattr(ablation, "costs_alone", predicted)
    monkeypatch.setattr(provenance, "code_version", lambda: Code(commit="0" * 40, dirty=False))
    monkeypatch.setattr("rlhf.process.torch_setup.device_of", lambda _: torch.device("cpu"))
    folder = str(RECIPE.parents[1] / "h100-mistral-7b" / "v1")
    result = CliRunner().invoke(ablation.main, ["--recipe", folder, "--save", str(file)])
    assert result.exit_code == 0, result.output
    whole = json.loads(file.read_text())
    assert (whole["stage"], whole["rounds"], whole["device"]["type"]) == ("sft", 3, "cpu")
    headline = results._ablation(whole, "a record")[1]
    assert headline.startswith("time of a step: gradient_checkpointing x ") and ablation.PACKAGE not in headline
    record = whole["strategies"]
    assert "CUDA only" in record[ablation.PACKAGE]["cannot_run"]
    rounds = [record[name]["round_seconds"] for name in one_by_one(recipe.load(Path(folder)), "sft")]
    count = len(rounds)
    assert [first for first, *_ in rounds] == [1.0 + at for at in range(count)], "each once, in turn"
    later = len(rounds) + 1  # the package cannot run, and is not tried again
    assert [second for _, second, _ in rounds] == [later + count - at for at in range(count)], "in reverse"
    assert record["none"]["step_seconds"]["median"] == record["none"]["round_seconds"][1], "the median round"


def test_the_time_of_a_strategy_is_relative_to_none_in_the_same_round():
    def measured(*rounds: float) -> StageSteps:
        spread: Spread = {"median": rounds[1], "low": 0.0, "high": 9.0, "n": 4}
        return {"step_seconds": spread, "round_seconds": [*rounds], "peak_vram_bytes": 10**9, "peak_rss_bytes": 1}

    loaded = recipe.load(RECIPE)
    row = ablation._row("lora", measured(3.0, 2.0, 8.0), measured(2.0, 1.0, 2.0), {}, loaded)
    assert row[:4] == ("lora", "1.00", "+0%", "x 2.00 (1.50 to 4.00)")


def test_every_second_round_is_in_reverse():
    assert [in_order("abc", number) for number in range(3)] == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]]


def test_an_ablation_has_a_median_round():
    result = CliRunner().invoke(ablation.main, ["--rounds", "2"])
    assert (result.exit_code, "2 is even" in result.output) == (2, True)


def test_targets_are_ratios_that_are_reached_at_one():
    stages: dict[StageName, StageSteps] = {
        "sft": {"mfu": 0.21, "hours": 1.0},
        "rm": {"hours": 1.0},
        "ppo": {"mbu": 0.9, "hours": 6.0},
        "dpo": {"mfu": None, "hours": 1.0},
    }
    rows = {row[0]: row[1:] for row in targets.rows("h100-mistral-7b", stages)}
    assert rows["sft: MFU"] == ("≥ 0.42", "0.21", "0.50")
    assert rows["dpo: MFU"][1:] == ("-", "-")
    partly = {row[0]: row[1:] for row in targets.rows("h100-mistral-7b", {"sft": {"hours": 1.0}, "rm": {"hours": 1.0}})}
    assert partly["sft, rm and ppo: hours"][1:] == ("-", "-"), "a sum of some stages is not that of all"
    assert rows["ppo: MBU of decoding"][-1] == "1.50"
    assert rows["sft, rm and ppo: hours"] == ("≤ 4 h", "8", "0.50")
    assert targets.rows("cpu-tiny", stages) == []
    (row, *_) = targets.rows("4090-llama2-7b", {"sft": {"peak_vram_bytes": 6 * 10**9}})
    assert row[-1] == "2.00"


@pytest.mark.parametrize("recomputed", [0, 125])
def test_mfu_leaves_out_what_is_computed_again(recomputed):
    """500 operations a step in 2 s, on a device that does 1,000 a second: a quarter of it, less what is repeated."""
    loaded = recipe.load(RECIPE)
    accumulated = loaded.recipe.options(Sft).gradient_accumulation_steps
    assert accumulated <= 2, "all of a step is rehearsed"
    train = PredictedPhase(1, {"base": 1}, 0, Work(500, recomputed))
    predicted = PredictedStage(train, {"train": train})
    best: Ceilings = {"flops": 1000.0, "bandwidth": 1.0}
    row = STAGE | {"phase_seconds": seconds(2.0, 2.0, 2.0)}
    figures = derived.derived_figures(loaded, "sft", row, predicted, best, "longest")
    assert figures["hfu"] == 0.25
    assert figures["mfu"] == (500 - recomputed) / 2 / 1000
    assert derived.derived_figures(loaded, "sft", row, predicted, best, "hh")["mfu"] is None, "lengths vary"


def test_mfu_is_that_of_the_phases_but_decoding(monkeypatch):
    """Decoding is bound by memory, and has its own share, MBU."""
    loaded = recipe.load(RECIPE)
    flops = {"rollout/prefill": 100.0, "rollout/decode": 1e9, "score": 200.0, "update": 300.0}
    monkeypatch.setattr(projection, "step_flops", lambda *_: flops)
    monkeypatch.setattr(projection, "decoding_step_bytes", lambda *_: 1.0)
    spread: Spread = {"median": 2.0, "low": 2.0, "high": 2.0, "n": 8}
    row = STAGE | {"phase_seconds": dict.fromkeys(flops, spread)}
    predicted = PredictedStage(PredictedPhase(1, {"base": 1}, 0, Work()), {})
    best: Ceilings = {"flops": 1000.0, "bandwidth": 1.0}
    assert derived.derived_figures(loaded, "ppo", row, predicted, best, "longest")["mfu"] == 600 / 6 / 1000


def test_no_benchmark_raises_clicks_own_exception():
    """What a user can put right is a UserError; `rlhf.cli.guarded` prints it and ends with code 1."""
    assert not [file for file in (ROOT / "bench").rglob("*.py") if "ClickException" in file.read_text()]


def test_a_prediction_that_is_missing_or_damaged_is_named(tmp_path):
    with pytest.raises(UserError, match=r"predicted\.json: no such file; `make budgets ARGS=--write`"):
        budgets.content(tmp_path)
    file = tmp_path / "predicted.json"
    file.write_text('{"unit": "bytes", "stages": {"sft": {"train": {"base": "large"}}}}')
    with pytest.raises(UserError, match=r"predicted\.json: stages\.sft\.train\.base: .*: damaged"):
        budgets.content(tmp_path)
    file.write_text('{"unit": "bytes", "stages": {"sft": {"train": {"base": 5}}}}')
    assert budgets.pinned(tmp_path) == {"sft": {"train": {"base": 5}}}
    assert (budgets.pinned_step(tmp_path), budgets.pinned_needs(tmp_path)) == ({}, {}), "older files lack them"


def test_stages_are_those_of_the_recipe_unless_some_are_chosen():
    groups = recipe.load(ROOT / "recipes/cpu-tiny-groups/v1")
    assert options.stages_of(groups, (), TRAINING_STAGES) == ["sft", "rm", "ppo", "rloo", "grpo", "dpo"]
    assert options.stages_of(groups, ("grpo", "sft"), TRAINING_STAGES) == ["sft", "grpo"]
    with pytest.raises(UserError, match=r"--stage grpo: .*cpu-tiny/v2 has no section grpo"):
        options.stages_of(recipe.load(RECIPE.parents[1] / "cpu-tiny/v2"), ("grpo",), TRAINING_STAGES)


def chosen(*words: str) -> str:
    """The recipe that a benchmark takes with these options."""

    @options.command()
    @options.HW
    @options.RECIPE
    @options.SET
    def command(hw: str, directory: Path | None, changes: tuple[str, ...]) -> None:
        loaded = options.load(hw, directory, changes)
        print(f"{loaded.name}/{loaded.version}{' modified' * loaded.modified}")

    result = CliRunner().invoke(command, words)
    return result.stdout.strip() or str(result.exception)


def test_a_benchmark_takes_the_version_of_the_guide():
    assert chosen("--hw", "4090") == "4090-llama2-7b/v2"
    assert chosen("--hw", "4090", "--guide") == "4090-llama2-7b/v1"
    assert chosen("--recipe", str(RECIPE), "--set", "ppo.steps=2") == "cpu-tiny/v1 modified"
    assert "follows no published guide" in chosen("--guide"), "cpu-tiny"
    assert chosen("--hw", "4090", "--recipe", str(RECIPE)) == "2", "a usage error"
