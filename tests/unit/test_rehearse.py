"""Dress rehearsals of card recipes: what is changed, what stays, the made rows, and what ends a rehearsal."""

from pathlib import Path
from typing import Any

import pytest

from rlhf import recipe
from rlhf.data.load import check_rows
from rlhf.recipe import PinnedRecipe
from rlhf.recipe import rehearsal as rehearse_content
from rlhf.recipe.chain import differences
from tests.helpers import rlhf, task_of
from tests.records import write_records

RECIPES = Path(__file__).parents[2] / "recipes"
LOADED = [recipe.load(folder) for folder in recipe.available(RECIPES)]
CARDS = [loaded for loaded in LOADED if loaded.recipe.hardware.device != "cpu"]
STAND_IN = rehearse_content.small_model(recipe.load(RECIPES / rehearse_content.STAND_IN).recipe)
# What a rehearsal may change; of a section without a dot all keys. A rehearsal tries the others.
CHANGED = {
    *("hardware.device", "hardware.memory_gb", "hardware.count", "hardware.engine"),
    *("model.source", "model.name", "model.revision", "model.files", "model.sha256", "model.architecture"),
    "model.attention",
    *("tokenizer.source", "tokenizer.name", "tokenizer.revision", "tokenizer.pad_token", "tokenizer.eos_token"),
    *(
        "data.source",
        "data.format",
        "data.files",
        "data.name",
        "data.revision",
        "data.data_dir",
        "data.split",
    ),
    *("data.heldout_fraction", "data.validation_fraction"),
    *("max_samples", "batch_size", "num_samples", "max_prompt_length", "response_length", "max_completion_length"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "max_eval_samples", "max_length", "max_steps"),
    *("steps", "logging_steps", "save_steps", "eval_steps", "num_mini_batches", "rollout_batch_size", "norm_responses"),
    *("num_ppo_epochs", "num_iterations", "num_generations", "score_batch_size", "warmup_steps", "value_warmup_steps"),
}


def rehearsed(loaded: PinnedRecipe, rows: Path, **changes: Any) -> PinnedRecipe:
    """A recipe as its rehearsal runs it."""
    return loaded.with_changes(rehearse_content.changes(loaded.recipe, STAND_IN, rows) | changes)


def name_of(loaded: PinnedRecipe) -> str:
    return f"{loaded.name}-{loaded.version}"


@pytest.mark.parametrize("loaded", CARDS, ids=name_of)
def test_every_card_recipe_is_cut_to_a_cpu_and_keeps_its_settings(loaded, tmp_path):
    rows = tmp_path / "rows.jsonl"
    changed = rehearsed(loaded, rows).recipe
    assert changed.hardware.device == "cpu" and changed.model.source == changed.tokenizer.source == "package"
    assert max(changed.longest(), 1) <= 72
    different = differences(loaded.recipe.model_dump(mode="json"), changed.model_dump(mode="json"))
    keys = {
        key if key.split(".")[0] in ("hardware", "model", "tokenizer", "data") else key.partition(".")[2]
        for key in different
    }
    keys = {"model.architecture" if key.startswith("model.architecture") else key for key in keys}
    assert keys <= CHANGED
    rehearse_content.write_rows(loaded.recipe, rows)
    check_rows(changed, list(changed.sections()))


# ---- the command


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """`rlhf rehearse` of a recipe, whose stages are `of_stage` in place of processes."""

    def call(of_stage, *options: object, name: str = "4090-llama2-7b/v3") -> tuple[int, str, str]:
        def run_child(words: list[str]) -> int:
            code: int = of_stage(task_of(words))
            return code

        monkeypatch.setattr("rlhf.process.children.run_child", run_child)
        return rlhf(monkeypatch, capsys, "rehearse", "--recipe", RECIPES / name, "--out", tmp_path, *options)

    return call


def test_all_stages_are_run_in_order_and_their_page_is_written(command, tmp_path):
    ran: list[str] = []

    def of_stage(task) -> int:
        assert task.stop_on == ["nan"] and task.resume is None
        write_records(tmp_path / "rehearsal/4090-llama2-7b/v3" / task.stage, {}, {})
        ran.append(task.stage)
        return 0

    code, out, _ = command(of_stage)
    assert code == 0 and ran == ["sft", "rm", "ppo", "dpo", "evaluate", "merge"]
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("rehearsal of")] == ran


def test_a_stage_that_fails_ends_the_rehearsal_with_its_code(command):
    ran: list[str] = []

    def of_stage(task) -> int:
        ran.append(task.stage)
        return 71 if task.stage == "rm" else 0

    code, _, err = command(of_stage)
    assert code == 71 and ran == ["sft", "rm"]
    assert "error: rm: " in err and "`rlhf run rm " in err
