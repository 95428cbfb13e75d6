"""The benchmark's own logic: what counts as a loss, which budgets are broken, how steps are summarised."""

import copy
import json

import pytest

from bench import __main__ as bench
from bench import compare, goals, steps
from rlhf import recipe
from rlhf.memory import Phase
from rlhf.memory.strategies import one_by_one
from tests.conftest import RECIPE

STAGE = {
    "clock": "wall",
    "step_seconds": {"median": 1.0, "low": 0.95, "high": 1.05, "n": 8},
    "phase_seconds": {"train": {"median": 1.0, "low": 0.95, "high": 1.05, "n": 8}},
    "tokens_per_second": 100.0,
    "peak_vram_bytes": 10_000_000_000,
    "phase_peak_bytes": {"train": 9_000_000_000},
    "peak_rss_bytes": 1_000_000_000,
    "predicted_peak_bytes": 9_500_000_000,
    "hours": 3.0,
    "mfu": None,
    "mbu": None,
}
RECORD = {
    "recipe": "4090-llama2-7b",
    "version": "v1",
    "recipe_sha256": "0",
    "shape": "hh",
    "device": {"name": "card"},
    "stages": {"sft": STAGE},
}


def changed(**values):
    """The record with some values of its stage changed."""
    record = copy.deepcopy(RECORD)
    record["stages"]["sft"] |= values
    return record


def seconds(median, low, high):
    return {"train": {"median": median, "low": low, "high": high, "n": 8}}


def test_the_same_record_is_no_loss():
    assert not list(compare.losses(RECORD, RECORD))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"peak_vram_bytes": 10_290_000_000}, None),
        ({"peak_vram_bytes": 10_310_000_000}, "sft: peak memory +3.1%, 10.00 to 10.31 GB"),
        ({"phase_peak_bytes": {"train": 9_500_000_000}}, "sft/train: peak memory +5.6%"),
        ({"phase_seconds": seconds(1.09, 1.08, 1.10)}, None),  # slower by less than a tenth
        ({"phase_seconds": seconds(1.2, 1.1, 1.3)}, "sft/train: +20%, 1 to 1.2 s"),
        ({"phase_seconds": seconds(1.2, 1.0, 1.4)}, None),  # the two spreads overlap
        ({"out_of_memory": True}, "sft no longer fits"),
    ],
)
def test_a_planted_loss_is_caught_and_noise_is_not(values, said):
    found = list(compare.losses(RECORD, changed(**values)))
    assert found == [] if said is None else [line for line in found if line.startswith(said)] == found != []


def test_without_a_gpu_the_memory_of_the_process_counts():
    none = {"peak_vram_bytes": None, "phase_peak_bytes": None}
    before, now = changed(**none), changed(**none, peak_rss_bytes=1_100_000_000)
    assert list(compare.losses(before, now)) == ["sft: peak memory +10.0%, 1.00 to 1.10 GB"]


def test_records_of_other_devices_are_not_compared():
    other = copy.deepcopy(RECORD)
    other["device"]["name"] = "another card"
    with pytest.raises(ValueError, match="card and another card"):
        list(compare.losses(RECORD, other))


def test_budgets_that_are_broken_are_named():
    loaded = recipe.load(RECIPE.parents[1] / "4090-llama2-7b" / "v1")
    rows, broken = bench.budgets(loaded, RECORD)
    assert not broken
    assert rows[0][-1] == "within"
    _, broken = bench.budgets(loaded, changed(peak_vram_bytes=20_100_000_000, hours=4.5))
    assert sorted(broken) == ["sft: hours 4.5 is over 4", "sft: peak_vram_gb 20.1 is over 20"]
    rows, broken = bench.budgets(loaded, changed(out_of_memory=True))
    assert broken == ["sft: out of memory"]
    assert rows[0][-1] == "OUT OF MEMORY"


def test_steps_are_summarised_without_the_warm_up(tmp_path):
    summary = {
        "peak_vram_bytes": 5,
        "phase_peak_bytes": {},
        "reserved_vram_bytes": 6,
        "used_vram_bytes": None,
        "phase_joules": None,
        "peak_rss_bytes": 7,
    }
    summary |= {"predicted_peak_vram_bytes": None, "phase_seconds": {"evaluate": 1.0}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    rows = [{"step": n + 1, "train": t, "tokens": 100} for n, t in enumerate([50.0, 9.0, 1.0, 2.0, 3.0])]
    (tmp_path / "telemetry.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = steps.summarise(tmp_path)
    assert found["step_seconds"] == {"median": 2.0, "low": 1.5, "high": 2.5, "n": 3}
    assert found["tokens_per_second"] == 300 / 6
    assert found["clock"] == "wall"


def test_the_ablation_changes_one_thing_at_a_time():
    loaded = recipe.load(RECIPE.parents[1] / "h100-mistral-7b" / "v1")
    made = one_by_one(loaded, "sft")
    off = made["none"].recipe
    assert (off.model.quantization, off.model.attention, off.sft.gradient_checkpointing) == ("none", "eager", False)
    batch = off.sft.per_device_train_batch_size * off.sft.gradient_accumulation_steps
    for name, changed in made.items():
        options = changed.recipe.sft
        assert options.per_device_train_batch_size * options.gradient_accumulation_steps == batch, name
        keys = recipe.differences(off.model_dump(), changed.recipe.model_dump())
        assert len(keys) <= 2 or name == "combined", keys
    assert set(made) == {
        *("none", "gradient_checkpointing", "quantization", "flash_attention", "batch_size", "context_length"),
        "combined",
    }


def test_goals_are_ratios_that_are_reached_at_one():
    stages = {
        "sft": {"mfu": 0.21, "hours": 1.0},
        "rm": {"hours": 1.0},
        "ppo": {"mbu": 0.9, "hours": 6.0},
        "dpo": {"mfu": None, "hours": 1.0},
    }
    found = {row[0]: row[1:] for row in goals.rows({"recipe": "h100-mistral-7b", "stages": stages})}
    assert found["sft: MFU"] == ("≥ 0.42", "0.21", "0.50")
    assert found["dpo: MFU"][1:] == ("-", "-")
    assert found["ppo: MBU of decoding"][-1] == "1.50"
    assert found["sft, rm and ppo: hours"] == ("≤ 4 h", "8", "0.50")
    assert goals.rows({"recipe": "cpu-tiny", "stages": stages}) == []
    (row, *_) = goals.rows({"recipe": "4090-llama2-7b", "stages": {"sft": {"peak_vram_bytes": 6e9}}})
    assert row[-1] == "2.00"


@pytest.mark.parametrize("recomputed", [0, 250])
def test_mfu_leaves_out_what_is_computed_again(recomputed):
    """500 operations a step in 2 s, on a device that does 1,000 a second: a quarter of it, less what is repeated."""
    loaded = recipe.load(RECIPE)
    accumulated = loaded.recipe.sft.gradient_accumulation_steps
    assert accumulated <= 2, "all of a step is rehearsed"
    predicted = {name: Phase(1, {"base": 1}, 0, 1000, recomputed) for name in ("", "train")}
    row = STAGE | {"phase_seconds": seconds(2.0, 2.0, 2.0)}
    found = bench.derived(loaded, "sft", row, predicted, {"flops": 1000.0, "bandwidth": 1.0}, "longest")
    assert found["hfu"] == 0.25
    assert found["mfu"] == (500 - recomputed / 2) / 2 / 1000
    assert bench.derived(loaded, "sft", row, predicted, {"flops": 1000.0}, "hh")["mfu"] is None, "lengths vary"
