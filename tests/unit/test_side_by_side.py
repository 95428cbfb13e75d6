"""Published, predicted and measured figures stand in one table, in README as on the console."""

import json
from pathlib import Path

import pytest

from rlhf.plan import side_by_side
from rlhf.plan.side_by_side import Line

ROOT = Path(__file__).parents[2]
H200 = {"type": "cuda", "name": "NVIDIA H200", "memory_cap": "24GB"}


def lines(results: Path, here: side_by_side.Found | None = None) -> dict[tuple[str, str], Line]:
    of_recipe = side_by_side.lines(ROOT / "recipes", results, "4090-llama2-7b", here)
    return {(line.stage, line.quantity): line for line in of_recipe}


def record(folder: Path, version: str, date: str, **measured: object) -> None:
    file = folder / "4090-llama2-7b" / version / "card" / f"{date}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"date": date, "version": version, "device": H200, **measured}))


def value(line: Line) -> float:
    assert line.measured
    return line.measured.value


def steps(**hours: float) -> dict[str, dict[str, float]]:
    return {stage: {"hours": value, "tokens_per_second": 100.0} for stage, value in hours.items()}


def test_every_stage_of_both_guides_has_a_line_of_memory_and_one_of_time():
    shown = {(line.recipe, line.stage, line.quantity) for line in side_by_side.lines(ROOT / "recipes", Path("none"))}
    stages = {"4090-llama2-7b": ("sft", "rm", "ppo", "all"), "h100-mistral-7b": ("sft", "rm", "ppo", "dpo", "all")}
    for name, of_recipe in stages.items():
        assert {(name, stage, quantity) for stage in of_recipe for quantity in side_by_side.QUANTITIES} <= shown


def test_without_a_card_the_guide_s_settings_decide_as_predicted(tmp_path):
    line = lines(tmp_path)["ppo", "hours"]
    assert line.of_guide and line.ours and line.of_guide.low < 12 < line.of_guide.value
    assert (line.measured, line.verdict) == (None, "overlaps")
    assert line.cells()[-4:] == ("–", "–", "overlaps", "–")


def test_what_a_card_measured_decides_and_is_named_with_card_and_date(tmp_path):
    record(tmp_path, "v2", "2026-12-01", phases=[{"stage": "ppo", "measured_bytes": size} for size in (9, 23 * 10**9)])
    record(tmp_path, "v2", "2026-12-02", measured={"shape": "hh", "stages": steps(sft=1.0, rm=2.0, ppo=30.0)})
    found = lines(tmp_path)
    memory, hours = found["ppo", "peak_vram_gb"], found["ppo", "hours"]
    assert memory.cells()[-3:] == ("23 (v2)", "met", "H200 held to 24GB, 2026-12-01")
    assert hours.cells()[-4:] == ("30 (v2)", "100", "missed", "H200 held to 24GB, 2026-12-02")
    assert value(found["all", "hours"]) == 33.0 and found["all", "peak_vram_gb"].measured is None


def test_the_guide_s_settings_come_before_ours_and_a_new_run_before_records(tmp_path):
    record(tmp_path, "v2", "2026-12-02", stages=steps(sft=1.0))
    record(tmp_path, "v1", "2026-12-01", stages=steps(sft=3.0))
    assert value(lines(tmp_path)["sft", "hours"]) == 3.0
    stages = {"sft": {"hours": 5.0, "peak_vram_bytes": 19 * 10**9}}
    content = {"date": "2026-12-03", "version": "v2", "device": H200, "shape": "longest", "stages": stages}
    here = side_by_side.of_record(content, "this run")
    found = lines(tmp_path, here)
    assert (value(found["sft", "hours"]), value(found["sft", "peak_vram_gb"])) == (5.0, 19.0)


@pytest.mark.parametrize("change", [{"device": {"type": "cpu", "name": "cpu"}}, {"stages": {}}])
def test_a_cpu_and_a_record_of_another_kind_measure_nothing(tmp_path, change):
    record(tmp_path, "v2", "2026-12-02", **{"stages": steps(sft=1.0)} | change)
    assert lines(tmp_path)["sft", "hours"].measured is None
