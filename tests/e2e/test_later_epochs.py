"""SFT, reward model and DPO are stopped inside a later epoch, and end with the bytes of a run that was left alone."""

from pathlib import Path
from typing import Any

import pytest

from rlhf.stages.supervised.trainer import RunTrainer
from tests.helpers import Crash, beside, content_of, run_stages, small

ROOT = Path("cpu-tiny/v1")
# 70 rows in batches of 8: an epoch has 9 steps, and its last batch is short. Records and checkpoints fall between.
EPOCHS: dict[str, Any] = {"num_train_epochs": 3, "max_samples": 70, "logging_steps": 2, "save_steps": 4}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("stage", ["sft", "rm", "dpo"])
def test_resumed_inside_the_second_epoch(trained, tmp_path, monkeypatch, stage, grouped):
    batches = {"group_by_length": grouped, "per_device_train_batch_size": 8 if grouped else 4}
    batches["gradient_accumulation_steps"] = 8 // batches["per_device_train_batch_size"]
    changes = {f"{stage}__{key}": value for key, value in (EPOCHS | batches).items()}
    if stage == "sft":  # for the others it would be another SFT than the shared one
        changes["lora__lora_dropout"] = 0.1
    parents = [name for name in ("pretrain", "sft", "rm") if name != stage and (stage != "sft" or name == "pretrain")]
    loaded = small(**changes)
    rows: list[tuple[int, list[Any]]] = []
    step = RunTrainer.training_step

    def noted(self, model, inputs, *rest):
        rows.append((self.state.global_step, inputs["input_ids"].tolist()))
        return step(self, model, inputs, *rest)

    monkeypatch.setattr(RunTrainer, "training_step", noted)
    whole = beside(trained, tmp_path / "whole", *parents) / ROOT / stage
    run_stages(loaded, tmp_path / "whole", stage)
    alone = list(rows)
    assert alone[-1][0] == 26
    cut = beside(trained, tmp_path / "cut", *parents) / ROOT / stage

    def dies(self, model, inputs, *rest):
        if self.state.global_step == 14:
            raise Crash
        return noted(self, model, inputs, *rest)

    monkeypatch.setattr(RunTrainer, "training_step", dies)
    with pytest.raises(Crash):
        run_stages(loaded, tmp_path / "cut", stage)
    monkeypatch.setattr(RunTrainer, "training_step", noted)
    rows.clear()
    run_stages(loaded, tmp_path / "cut", stage, resume=True)
    assert content_of(cut / "manifest.json")["resumed_from"] == "step-000012"
    assert rows == [row for row in alone if row[0] >= 12]
    for name in ("metrics.jsonl", "adapter/adapter_model.safetensors"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name
    assert content_of(cut / "summary.json")["metrics"] == content_of(whole / "summary.json")["metrics"]
