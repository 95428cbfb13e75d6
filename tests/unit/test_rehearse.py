"""Dress rehearsals of card recipes: what is changed, what stays, the made rows, and what ends a rehearsal."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf import recipe
from rlhf.data.needs import check_rows
from rlhf.files import write_json
from rlhf.process import children
from rlhf.process.task import Task
from rlhf.recipe import PinnedRecipe, Recipe
from rlhf.recipe import rehearsal as rehearse_content
from rlhf.recipe.chain import differences
from rlhf.stages import rehearsal as rehearse
from tests.helpers import noted, rlhf, task_of
from tests.records import write_records

RECIPES = Path(__file__).parents[2] / "recipes"
LOADED = [recipe.load(folder) for folder in recipe.available(RECIPES)]
CARDS = [loaded for loaded in LOADED if loaded.recipe.hardware.device != "cpu"]
CPUS = [loaded for loaded in LOADED if loaded.recipe.hardware.device == "cpu"]
FAMILIES = {"sft", "rm", "ppo", "rloo", "grpo", "dpo", "evaluate", "merge"}  # the stages that card recipes have
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


def of_cards(loaded: PinnedRecipe, **changes: Any) -> Recipe:
    return loaded.with_changes({key.replace("__", "."): value for key, value in changes.items()}).recipe


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


def test_data_that_are_here_are_taken_as_they_are(tmp_path):
    here: dict[str, Any] = {f"data.{key}": None for key in CARDS[0].recipe.data.own_keys()}
    loaded = CARDS[0].with_changes(here | {"data.source": "files", "data.files": ["mine.jsonl"]})
    changed = rehearsed(loaded, tmp_path / "rows.jsonl").recipe
    assert changed.data == loaded.recipe.data


def test_batches_keep_whether_they_are_divided(tmp_path):
    loaded = next(loaded for loaded in CARDS if name_of(loaded) == "4090-llama2-7b-v2")
    one = rehearsed(loaded, tmp_path).recipe.ppo
    two = rehearsed(loaded.with_changes({"ppo.rollout_batch_size": 10, "ppo.batch_size": 40}), tmp_path).recipe.ppo
    assert one and (one.batch_size, one.num_mini_batches, one.per_device_train_batch_size) == (4, 2, 2)
    assert two and (two.rollout_batch_size, two.per_device_train_batch_size) == (2, 1)
    assert one.rollout_batch_size == 4 and one.warmup_steps == 1


@pytest.mark.parametrize("loaded", CPUS[:1], ids=name_of)
def test_a_recipe_for_a_cpu_is_refused_with_a_way_out(loaded, monkeypatch, capsys, tmp_path):
    code, out, err = rlhf(monkeypatch, capsys, "rehearse", "--recipe", loaded.directory, "--out", tmp_path)
    assert (code, out) == (1, "") and "CPU" in err
    assert not [*tmp_path.iterdir()]


# ---- the command


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """`rlhf rehearse` of a recipe, whose stages are `of_stage` in place of processes."""

    def call(of_stage, *options: object, name: str = "4090-llama2-7b/v3") -> tuple[int, str, str]:
        def run_child(words: list[str], stop_when=None) -> int:
            task = None if "report" in words else task_of(words)
            code: int = of_stage(task, task.stage if task else "report", stop_when)
            return code

        monkeypatch.setattr("rlhf.process.children.run_child", run_child)
        return rlhf(monkeypatch, capsys, "rehearse", "--recipe", RECIPES / name, "--out", tmp_path, *options)

    return call


def finish(tmp_path: Path, stage: str, **metrics: float | None) -> int:
    folder = tmp_path / "rehearsal/4090-llama2-7b/v3" / stage
    write_records(folder, {"resumed_from": "step-000001"}, {"metrics": metrics, "findings": ["nan"]})
    return 0


def test_each_stage_that_trains_is_stopped_at_a_checkpoint_and_resumed(command, tmp_path):
    calls: list[tuple[str, bool, bool]] = []

    def of_stage(task, stage, stop_when):
        calls.append((stage, stop_when is not None, bool(task and task.resume)))
        if stop_when:
            assert not stop_when()
            (tmp_path / "rehearsal/4090-llama2-7b/v3" / stage / "checkpoints/step-000001").mkdir(parents=True)
            assert stop_when()
            return rehearse.STOPPED
        return 0 if stage == "report" else finish(tmp_path, stage, score=1.0)

    code, out, err = command(of_stage)
    assert (code, err) == (0, "")
    trained = [(stage, *how) for stage in ("sft", "rm", "ppo", "dpo") for how in ((True, False), (False, True))]
    assert calls == [*trained, ("evaluate", False, False), ("merge", False, False), ("report", False, False)]
    assert out.startswith("not tried: the model")
    assert out.count("step-000001") == 6 and out.count("yes") == 6 and "nan" in out


def test_settings_given_with_set_come_last(command):
    asked: list[Task] = []
    command(lambda task, *_: noted(asked, task, 1), "--set", "sft.max_steps=3", "--set", "model.quantization=none")
    settings = asked[0].overrides
    assert settings["sft.max_steps"] == 3 and settings["model.quantization"] == "none"
    assert settings["model.source"] == "package" and settings["hardware.device"] == "cpu"


def test_what_builds_on_a_stage_that_failed_is_not_run_and_the_code_is_its_own(command, tmp_path):
    ran: list[str] = []

    def of_stage(words, stage, _):
        ran.append(stage)
        return 71 if stage == "rm" else finish(tmp_path, stage)

    code, out, err = command(of_stage)
    assert code == 71 and ran == ["sft", "rm", "dpo"]
    assert "exit code 71" in out and out.count("builds on rm") == 3
    assert "error: rm: " in err and "`rlhf run rm " in err


def test_a_number_that_is_not_finite_is_a_failure(command, tmp_path):
    def of_stage(words, stage, _):
        if stage == "sft":
            folder = tmp_path / "rehearsal/4090-llama2-7b/v3/sft"
            folder.mkdir(parents=True)
            (folder / "metrics.jsonl").write_text('{"step": 1, "loss": null, "eval/score_gain_sd": null}\n')
        return finish(tmp_path, stage)

    code, out, _ = command(of_stage)
    assert code == 1 and "no: loss " in out and out.count("builds on sft") == 5


def test_an_earlier_rehearsal_is_replaced(command, tmp_path):
    old = tmp_path / "rehearsal/4090-llama2-7b/v3/sft/old"
    old.mkdir(parents=True)
    command(lambda *_: 1)
    assert not old.exists() and (old.parents[1] / "rows.jsonl").is_file()


def test_rows_of_ones_own_are_read(command, tmp_path):
    (tmp_path / "mine.jsonl").touch()
    asked: list[Task] = []
    _, out, _ = command(lambda task, *_: noted(asked, task, 1), "--data", tmp_path / "mine.jsonl")
    settings = asked[0].overrides
    assert settings["data.files"] == [f"{tmp_path}/mine.jsonl"] and settings["sft.max_samples"] == 64
    assert "made rows" not in out and not (tmp_path / "rehearsal/4090-llama2-7b/v3/rows.jsonl").exists()


def test_random_weights_do_not_stand_in(command):
    code, _, err = command(lambda *_: 1, "--weights", "random")
    assert code == 2 and "needs a tokenizer" in err


def test_a_folder_stands_in_with_its_own_architecture(command, tmp_path):
    (tmp_path / "tiny").mkdir()
    write_json(tmp_path / "tiny/config.json", {})
    asked: list[Task] = []
    command(lambda task, *_: noted(asked, task, 1), "--weights", tmp_path / "tiny")
    assert asked[0].overrides["model.name"] == f"{tmp_path}/tiny" and asked[0].overrides["model.architecture"] is None


def test_a_child_is_stopped_as_soon_as_the_time_has_come(tmp_path):
    made = tmp_path / "made"
    code = f"import pathlib, time; pathlib.Path({str(made)!r}).touch(); time.sleep(60)"
    began = time.monotonic()
    assert children.run_child([sys.executable, "-c", code], stop_when=made.exists) == -15
    assert time.monotonic() - began < 30
    assert children.run_child([sys.executable, "-c", ""], stop_when=lambda: False) == 0
