"""Recipes: what loads, which key and place a refusal names, and which settings decide a stage."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf import recipe
from rlhf.data.tokenize import train
from rlhf.errors import UserError
from rlhf.plan.predict import predicted_stages
from rlhf.recipe import plain_yaml, strict
from rlhf.recipe.chain import changed_settings, differences
from rlhf.recipe.pinned import BLOCK
from rlhf.recipe.rehearsal import random_weights_changes
from rlhf.recipe.schema import Sft
from rlhf.recipe.schema_model import SMALLEST_TRAINED
from rlhf.recipe.schema_online import Ppo
from tests.helpers import GROUP

ROOT = Path(__file__).parents[2] / "recipes"
CPU = ROOT / "cpu-tiny" / "v1"


def written(folder: Path, **sections: Any) -> Path:
    """A copy of the CPU recipe in which sections have other keys (AWAY removes one) or other values."""
    content = plain_yaml.read_yaml(CPU / "recipe.yaml")
    for name, changes in sections.items():
        old = content.get(name)
        new = old | changes if isinstance(old, dict) and isinstance(changes, dict) else changes
        content[name] = {k: v for k, v in new.items() if v != AWAY} if isinstance(new, dict) else new
    target = folder / "mine" / "v1"
    target.mkdir(parents=True)
    (target / "recipe.yaml").write_text(yaml.safe_dump(content))
    return target


AWAY = "away"


@pytest.mark.parametrize("directory", recipe.available(ROOT), ids=lambda d: f"{d.parent.name}-{d.name}")
def test_every_recipe_loads(directory):
    loaded = recipe.load(directory)
    assert not loaded.modified
    names = {(figure.stage, figure.name) for figure in loaded.figures}
    assert len(names) == len(loaded.figures)


HUB = {"data.source": "hub", "data.name": "a/b", "data.revision": "0" * 40}
LEAN = {"hardware.trunk": "lean"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ppo.kl_coeff": 0.1}, "ppo.kl_coef"),
        ({"ppo.lr": 0.1}, "ppo.learning_rate"),
        ({"sft.epochs": 1}, "sft.num_train_epochs"),
        ({"sft.batch_size": 1}, "sft.per_device_train_batch_size"),
        ({"sfft": {}}, "sft"),
        ({"ppo.lamda": 1}, "ppo.lam"),
        ({"ppo.learning_rat": 1}, "ppo.learning_rate"),
        ({"training.warmup_ratio": 0.25}, "training"),
        ({"grpo.steps": 3}, "grpo."),
        ({"data.lengths.pairs": 3}, "data.lengths."),
        ({"lora": None}, "lora = null"),
        ({"lora.target_modules": ["q_proj", "lm_head"]}, "target_modules"),
        ({"lora.target_modules": "all_linear"}, "lora.target_modules = 'all_linear'"),
        ({"ppo.kl_penalty": "loss"}, "kl_penalty"),
        ({"ppo.kl_target": 0.1, "ppo.kl_coef": 0}, "kl_target"),
        ({"ppo.lam": 10}, "ppo.lam = 10"),
        ({"ppo.sigmoid_scores": True}, "sigmoid_scores"),
        ({"ppo.value_warmup_steps": 40}, "value_warmup_steps"),
        ({"ppo.keep_checkpoints": 0}, "ppo.keep_checkpoints = 0"),
        ({"ppo.keep_checkpoints": "some"}, "ppo.keep_checkpoints = 'some'"),
        ({"sft.weight_decay": float("nan")}, "sft.weight_decay = nan"),
        ({"ppo.vllm_url": "localhost:8000"}, "vllm_url: localhost:8000"),
        ({"tokenizer.revision": "a" * 40}, "tokenizer: revision"),
        ({"ppo.steps": "ten"}, "ppo.steps = 'ten'"),
        ({"ppo.steps": True}, "ppo.steps = True"),
        ({"ppo.steps": -1}, "ppo.steps = -1"),
        ({"model.architecture.head_dim": 2**21}, "head_dim: 2097152"),
        ({"model.architecture.head_dim": True}, "head_dim: True"),
        ({"model.architecture.num_attention_heads": 5}, "num_attention_heads"),
        ({"model.attention": "flash_attention_2"}, "model.attention"),
        ({"sft.learning_rate": 0}, "sft.learning_rate = 0"),
        ({"sft.learning_rate": 1e300}, "sft.learning_rate = 1e+300"),
        ({"sft.warmup_ratio": 1.0}, "sft.warmup_ratio = 1.0"),
        ({"ppo.kl_estimator": "k4"}, "ppo.kl_estimator = 'k4'"),
        ({"ppo.num_mini_batches": 3}, "num_mini_batches: 3"),
        ({"ppo.logging_steps": 3}, "logging_steps: 3"),
        ({"sft.save_steps": 7}, "save_steps: 7"),
        ({"sft.max_prompt_length": 256}, "max_prompt_length"),
        ({"sft.max_length": 4096}, "sft.max_length: 4,096"),
        ({"sft.eval_steps": 20}, "eval_steps: 20"),
        ({"dpo.adapter": "best"}, "adapter"),
        ({"model.source": "hub", "model.name": "a/b"}, "model: source: hub needs revision"),
        ({"model.revision": "0" * 40}, "model: revision"),
        ({"pretrain": None}, "pretrain"),
        ({"tokenizer.source": "local", "tokenizer.name": "x"}, "tokenizer.source"),
        ({"tokenizer.template": "plain"}, "tokenizer.template"),
        ({"tokenizer.vocab_size": 1}, "vocab_size: 1"),
        ({"data.source": "files"}, "data: source: files needs files"),
        ({"data.files": ["a.jsonl"]}, "data: files"),
        ({"data.name": "a/b"}, "data: name"),
        (HUB | {"data.revision": "main"}, "data: source: hub needs revision"),
        (HUB | {"data.split": "train[:10]"}, "data: split"),
        ({"data.validation_fraction": 0.1}, "validation_fraction: 0.1"),
        ({"data.toy.pairs": 99999999999999}, "data.toy.pairs"),
        ({"hardware.count": 100_000}, "hardware.count"),
        ({"dpo.eval_steps": 100, "hardware.count": 2, "hardware.engine": "fsdp"}, "dpo.eval_steps"),
        (LEAN | {"lora.lora_dropout": 0.05}, "lora.lora_dropout"),
        (LEAN | {"hardware.count": 2, "hardware.engine": "fsdp"}, "hardware.trunk"),
        (LEAN | {"model.architecture.model_type": "olmo2"}, "hardware.trunk"),
        ({"merge.stage": "grpo"}, "merge.stage: grpo"),
        ({"rm": None}, "ppo needs a section rm"),
        ({"ppo": None}, "merge.stage: ppo"),
        ({"seed": 2**32}, "seed = 4294967296"),
        ({"description": "x" * 100_000}, "description"),
        ({"grpo": GROUP | {"betta": 1}}, "grpo.beta"),
        ({"grpo": GROUP | {"batch_size": 12, "num_mini_batches": 1, "rollout_batch_size": 12, "num_generations": 4},
          "hardware.count": 2}, "grpo: batch_size / num_generations"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_refusal_is_one_line_that_names_file_and_key(changes, named):
    with pytest.raises(UserError) as caught:
        recipe.load(CPU, changes)
    message = str(caught.value)
    assert str(CPU / "recipe.yaml") in message and "--set" in message and named in message
    assert "\n" not in message and len(message) < 600


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("ppo", "foo", 1), ("ppo", "cliprange", "wide"), ("training", "warmup_ration", 0.1), ("hardware", "name", 4090)],
)
def test_a_mistake_in_the_file_is_named_with_its_line(tmp_path, section, key, value):
    folder = written(tmp_path, **{section: {key: value}})
    lines = (folder / "recipe.yaml").read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.startswith(f"  {key}:"))
    with pytest.raises(UserError, match=rf"recipe\.yaml:{line}: .*{section}\.{key}"):
        recipe.load(folder)


def test_a_missing_key_is_named(tmp_path):
    with pytest.raises(UserError, match=r"recipe\.yaml: .*ppo\.lam"):
        recipe.load(written(tmp_path, ppo={"lam": AWAY}))


@pytest.mark.parametrize(
    ("folder", "content"), [("a/final", "seed: 0\n"), ("a/v1", ""), ("a/v1", "- 1\n"), ("a/v1", "seed: 1\nseed: 2\n")]
)
def test_a_folder_that_is_no_recipe_is_named(tmp_path, folder, content):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "recipe.yaml").write_text(content)
    for place in (tmp_path / folder, tmp_path / "none" / "v1"):
        with pytest.raises(UserError, match=str(place)):
            recipe.load(place)


# -- changes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "items",
    [
        *(["ppo.kl_coef"], ["=3"], [".ppo=1"], ["a b=1"], ["ppo.steps=[1"], ["ppo.steps=&a [*a]"], ["x" * 300 + "=1"]),
        *(["ppo.steps=10,", "ppo.kl_coef=0.1"], ["ppo.steps=10, ppo.kl_coef=0.1"]),
    ],
)
def test_a_change_that_is_not_one_is_refused_by_its_option(items):
    with pytest.raises(UserError, match="--set "):
        recipe.parse_overrides(items)


@pytest.mark.parametrize(
    "value",
    [
        *("true", "null", "yes", "on", "sft", "a/b", "1e3", "12", "", "a b", "#"),
        *(True, None, 2, ["a, b", 1], {"a": [1, "b: c"]}),
    ],
)
def test_what_is_written_after_set_is_read_back_as_it_was(value):
    assert recipe.parse_overrides([f"a={recipe.as_yaml(value)}"]) == {"a": value}
    assert recipe.as_yaml(["b, c", 1]) == '["b, c",1]', "a space would begin another change in make's SET"


def test_overrides_are_typed_and_mark_the_run_modified():
    overrides = recipe.parse_overrides(["ppo.kl_coef=1e-1", "lora.target_modules=[q_proj, v_proj]", "ppo.steps=7"])
    loaded = recipe.load(CPU, overrides)
    assert (loaded.recipe.options(Ppo).kl_coef, loaded.recipe.options(Ppo).steps) == (0.1, 7)
    assert loaded.recipe.lora.target_modules == ("q_proj", "v_proj")
    assert loaded.modified and loaded.sha256 == recipe.load(CPU).sha256


def test_of_two_changes_of_a_key_the_later_one_counts():
    assert recipe.parse_overrides(["a=1", "b=3", "a=2"]) == {"b": 3, "a": 2}
    section = {"source": "words", "vocab_size": 700, "template": "hh"}
    for items, size in (
        ([f"tokenizer={recipe.as_yaml(section)}", "tokenizer.vocab_size=900"], 900),
        (["tokenizer.vocab_size=900", f"tokenizer={recipe.as_yaml(section)}"], 700),
    ):
        changes = recipe.parse_overrides(items)
        assert strict.with_overrides({}, changes) == {"tokenizer": section | {"vocab_size": size}}
        assert changes["tokenizer"] == section, "what was given stays as it was"


def test_further_changes_win_over_what_they_overlap_and_can_be_given_on_a_command_line():
    """The benchmark changes a recipe further that its user changed already, and passes everything on with --set."""
    loaded = recipe.load(CPU, {"tokenizer.vocab_size": 700, "pretrain.max_steps": 7, "seed": 5})
    changed = loaded.with_changes(random_weights_changes(loaded.recipe, 8, "hh"))
    assert (changed.recipe.tokenizer.source, changed.recipe.tokenizer.vocab_size) == ("words", 700)
    assert changed.recipe.pretrain is None and changed.recipe.seed == 5
    again = changed.with_changes({"tokenizer.vocab_size": 900, "model.architecture.vocab_size": 900})
    assert (again.recipe.tokenizer.source, again.recipe.tokenizer.vocab_size) == ("words", 900)
    items = [f"{key}={recipe.as_yaml(value)}" for key, value in again.overrides.items()]
    assert recipe.load(CPU, recipe.parse_overrides(items)).recipe == again.recipe


def test_the_seed_is_no_modification_but_another_run():
    loaded = recipe.load(CPU, seed=5)
    assert (loaded.recipe.seed, loaded.modified) == (5, False)
    of_seed, other = (recipe.deciding_settings(r.recipe, "sft") for r in (loaded, recipe.load(CPU)))
    assert [*differences(of_seed, other)] == ["seed"]
    assert loaded.with_changes({"seed": 7}).recipe.seed == 7
    assert loaded.with_changes({"ppo.steps": 5}).recipe.seed == 5


# -- the block `training`, hashes, folders ----------------------------------------------------------------------------


def test_sections_that_lack_a_key_have_the_blocks(tmp_path):
    block = {"learning_rate": 0.25, "warmup_ratio": 0.5}
    away = {"learning_rate": AWAY, "warmup_ratio": AWAY}
    folder = written(tmp_path, **{BLOCK: block}, sft=away, ppo={"learning_rate": AWAY}, dpo={"warmup_ratio": AWAY})
    loaded, own = recipe.load(folder).recipe, recipe.load(CPU).recipe
    assert (loaded.options(Sft).learning_rate, loaded.options(Sft).warmup_ratio) == (0.25, 0.5)
    assert loaded.options(Ppo).learning_rate == 0.25
    assert loaded.dpo and own.dpo and loaded.dpo.warmup_ratio == 0.5
    assert loaded.dpo.learning_rate == own.dpo.learning_rate, "its own comes first"
    assert recipe.load(folder, {"sft.warmup_ratio": 0.125}).recipe.options(Sft).warmup_ratio == 0.125


def test_the_hash_sees_every_value_and_no_comment(tmp_path):
    contents: list[dict[str, Any]] = [{}, {"seed": 9}, {BLOCK: {"warmup_ratio": 0}}]
    folders = [written(tmp_path / str(number), **content) for number, content in enumerate(contents)]
    hashes = [recipe.load(folder).sha256 for folder in folders]
    assert hashes[0] == recipe.load(CPU).sha256 and len({*hashes}) == 3


@pytest.mark.parametrize("place", ["v1", ".", "../cpu-tiny/v1", "v1/../v1", "./v1/"])
def test_a_recipe_has_its_name_however_its_folder_is_written(monkeypatch, place):
    monkeypatch.chdir(CPU if place == "." else CPU.parent)
    loaded = recipe.load(Path(place))
    assert (loaded.name, loaded.version) == ("cpu-tiny", "v1")


def test_hw_resolves_to_the_newest_released_default(tmp_path):
    root = tmp_path / "all"
    for version, status in (("v1", "released"), ("v2", "released"), ("v10", "draft")):
        made = written(tmp_path / version, status=status, default=True)
        (root / "mine").mkdir(parents=True, exist_ok=True)
        made.rename(root / "mine" / version)
    assert recipe.resolve("cpu", root).name == "v2"
    assert [d.name for d in recipe.available(root)] == ["v1", "v2", "v10"]
    with pytest.raises(UserError, match=r"--hw 4090.*cpu"):
        recipe.resolve("4090", root)
    shutil.copytree(root / "mine", root / "second")
    with pytest.raises(UserError, match="--hw cpu: mine and second"):
        recipe.resolve("cpu", root)


def test_a_recipe_that_is_wrong_stands_in_the_way_of_its_own_hardware_only(tmp_path):
    shutil.copytree(CPU, tmp_path / "mine/v1")
    text = (CPU / "recipe.yaml").read_text()
    broken = {
        "of-4090": "hardware: {name: '4090'}\ndefault: true\n",
        "of-none": "hardware: 3\n",
        "of-cpu": text.replace("\nppo:", "\npop:").replace("default: true", "default: false"),
    }
    for name, text in broken.items():
        (tmp_path / name / "v1").mkdir(parents=True)
        (tmp_path / name / "v1/recipe.yaml").write_text(text)
    assert recipe.resolve("cpu", tmp_path) == tmp_path / "mine/v1"
    with pytest.raises(UserError, match=r"of-4090/v1/recipe\.yaml"):
        recipe.resolve("4090", tmp_path)


# -- what a recipe says ------------------------------------------------------------------------------------------------


def test_only_settings_that_decide_a_stage_count_for_it():
    def deciding(stage: recipe.StageName, changes: recipe.Changes) -> Any:
        return recipe.deciding_settings(recipe.load(CPU, changes).recipe, stage)

    assert deciding("sft", {}) == deciding("sft", {"ppo.kl_coef": 0.9})
    assert [*differences(deciding("ppo", {}), deciding("ppo", {"ppo.kl_coef": 0.9}))] == ["ppo.kl_coef"]
    assert deciding("ppo", {}) != deciding("ppo", {"sft.learning_rate": 0.5})
    rounding: recipe.Changes = {"hardware.trunk": "lean", "lora.r": 4}
    assert [*differences(deciding("ppo", {}), deciding("ppo", rounding))] == ["lora.r"]
    other = recipe.load(CPU, {"hardware.memory_gb": 24.0, "sft.max_samples": 8}).recipe
    assert [*changed_settings(deciding("sft", {}), other, "sft")] == ["sft.max_samples"], "the card decides nothing"


def test_the_smallest_trained_tokenizer_is_as_small_as_the_schema_says():
    """One token for each byte, the three special ones and the two turns; merges are what comes on top."""
    assert len(train(["some text"], SMALLEST_TRAINED)) == SMALLEST_TRAINED
    assert len(train(["some text"], SMALLEST_TRAINED + 1)) == SMALLEST_TRAINED + 1


def test_a_recipe_has_the_stages_whose_sections_it_has():
    without = recipe.load(CPU, {"rm": None, "ppo": None, "dpo": None, "merge": None})
    loaded = without.recipe
    assert [*loaded.sections()] == ["pretrain", "sft", "evaluate"]
    assert recipe.parents(loaded, "evaluate") == ["pretrain", "sft"]
    assert loaded.policies() == []
    assert {key.partition(".")[0] for key in loaded.lengths()} == {"pretrain", "sft", "evaluate"}
    assert "rm" not in recipe.deciding_settings(loaded, "evaluate")
    assert predicted_stages(loaded) == ["sft", "evaluate"]
    assert loaded.options(Sft) is loaded.sft
    with pytest.raises(UserError, match="ppo"):
        loaded.options(Ppo)
    with pytest.raises(UserError, match=f"grpo: {CPU}"):
        without.require("grpo")
