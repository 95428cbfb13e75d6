"""The strict loader: what it accepts, and the one line it gives for everything else."""

import re
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
from rlhf.recipe.chain import changed_settings, differences, stages_before
from rlhf.recipe.folders import no_section
from rlhf.recipe.plain_yaml import Yaml
from rlhf.recipe.schema import Sft
from rlhf.recipe.schema_model import SMALLEST_TRAINED
from rlhf.recipe.schema_online import Ppo
from rlhf.recipe.small import random_weights_changes
from tests.helpers import GROUP, RECIPE, rlhf

ROOT = Path(__file__).parents[2] / "recipes"
CPU = ROOT / "cpu-tiny" / "v1"


def copy(folder: Path, change) -> Path:
    """A copy of the CPU recipe under `folder`, its parsed content changed by `change`."""
    content = yaml.load((CPU / "recipe.yaml").read_text(), Yaml)
    change(content)
    target = folder / "mine" / "v1"
    target.mkdir(parents=True)
    (target / "recipe.yaml").write_text(yaml.safe_dump(content))
    return target


@pytest.mark.parametrize("directory", recipe.available(ROOT), ids=lambda d: f"{d.parent.name}-{d.name}")
def test_every_recipe_loads(directory):
    loaded = recipe.load(directory)
    assert not loaded.modified
    names = {(figure.stage, figure.name) for figure in loaded.figures}
    assert len(names) == len(loaded.figures)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["ppo"].update(kl_coeff=0.1), "unknown key 'ppo.kl_coeff'; nearest: ppo.kl_coef (docs/recipes.md"),
        (lambda c: c["ppo"].update(lr=0.1), "unknown key 'ppo.lr'; nearest: ppo.learning_rate (docs/recipes.md"),
        (lambda c: c["sft"].update(epochs=1), "unknown key 'sft.epochs'; nearest: sft.num_train_epochs (docs"),
        (lambda c: c["sft"].update(batch_size=1), "nearest: sft.per_device_train_batch_size (docs/recipes.md"),
        (lambda c: c.update(sfft={}), "unknown key 'sfft'; nearest: sft (docs/recipes.md lists all)"),
        (lambda c: c["ppo"].pop("lam"), "key 'ppo.lam' is missing; add it (docs/recipes.md explains it)"),
        (lambda c: c["ppo"].update(lamda=c["ppo"].pop("lam")), "unknown key 'ppo.lamda'; nearest: ppo.lam"),
        (lambda c: c["lora"].update(target_modules=["q_proj", "lm_head"]), "target_modules: lm_head stays as it is"),
        (lambda c: c["ppo"].update(kl_penalty="loss"), "ppo: kl_penalty: loss needs kl_estimator k2 or k3"),
        (lambda c: c["ppo"].update(kl_target=0.1, kl_coef=0), "ppo: kl_target needs kl_coef above 0"),
        (lambda c: c["ppo"].update(lam=10), "ppo.lam = 10: input should be less than or equal to 1"),
        (lambda c: c["ppo"].update(sigmoid_scores=True), "ppo: choose one of sigmoid_scores and normalize_scores"),
        (lambda c: c["ppo"].update(score_batch_size=0), "ppo.score_batch_size = 0: input should be greater than 0"),
        (lambda c: c["ppo"].update(value_warmup_steps=40), "ppo: value_warmup_steps must be below steps"),
        (lambda c: c["ppo"].update(keep_checkpoints=0), "ppo.keep_checkpoints = 0: input should be greater than 0"),
        (lambda c: c["ppo"].update(score_clip=float("inf")), "ppo.score_clip = inf: input should be a finite number"),
        (lambda c: c["sft"].update(weight_decay=float("nan")), "sft.weight_decay = nan: input should be"),
        (lambda c: c["ppo"].update(vllm_url="localhost:8000"), "ppo: vllm_url: localhost:8000 must begin with http://"),
        (lambda c: c["ppo"].update(keep_checkpoints="some"), "input should be 'all', or a whole number"),
        (lambda c: c["tokenizer"].update(revision="a" * 40), "revision is set, but source is train: set source: hub"),
        (lambda c: c["ppo"].update(steps="ten"), "ppo.steps = 'ten': input should be a valid integer"),
        (lambda c: c["ppo"].update(steps=True), "ppo.steps = True"),
        (
            lambda c: c["model"]["architecture"].update(head_dim=2**21),
            "head_dim: 2097152 must be a whole",
        ),
        (lambda c: c["sft"].update(learning_rate=0), "sft.learning_rate = 0: input should be greater than 0"),
        (lambda c: c["sft"].update(learning_rate=2), "sft.learning_rate = 2: input should be less than or equal to 1"),
        (lambda c: c["ppo"].update(value_learning_rate=2), "ppo.value_learning_rate = 2: input should be less than"),
        (lambda c: c["sft"].update(warmup_ratio=1.0), "sft.warmup_ratio = 1.0: input should be less than 1"),
        (lambda c: c["ppo"].update(kl_estimator="k4"), "ppo.kl_estimator = 'k4': input should be 'k1', 'k2' or 'k3'"),
        (lambda c: c["ppo"].update(num_mini_batches=3), " must be a multiple of num_mini_batches 3"),
        (lambda c: c["model"].update(source="hub", name="a/b"), "model: source: hub needs revision"),
        (lambda c: c.pop("pretrain"), "a recipe has both model.source: pretrain and a pretrain section, or neither"),
        (
            lambda c: c["sft"].update(max_length=4096),
            "sft.max_length: 4,096 tokens are more than the model's context of 512",
        ),
        (lambda c: c["data"].update(source="files"), "data: source: files needs files"),
        (lambda c: c["tokenizer"].update(source="local", name="x"), "tokenizer.source: train and a pretrain section"),
        (lambda c: c["data"].update(source="hub", name="a/b", revision="main"), "data: source: hub needs revision"),
        (lambda c: c["data"]["toy"].update(bayes_accuracy=0.97), "data.toy.bayes_accuracy = 0.97"),
        (
            lambda c: c["data"].update(source="hub", name="a/b", revision="0" * 40, split="train[:10]"),
            "data: split: 'train[:10]' is not the name of one split",
        ),
        (lambda c: c["rm"].update(loss_type="margin_ranking"), "rm: loss_type: margin_ranking needs a margin above 0"),
        (lambda c: c["sft"].update(max_prompt_length=256), "sft: max_prompt_length must leave room"),
        (lambda c: c["ppo"].update(logging_steps=3), "ppo: eval_steps and save_steps must be multiples"),
        (
            lambda c: c["data"].update(validation_fraction=0.1),
            "data: validation_fraction: 0.1 must be below heldout_fraction: 0.1",
        ),
        (lambda c: c["sft"].update(eval_steps=20), "sft: eval_steps: 20 must divide save_steps: 50"),
        (
            lambda c: c["rm"].update(eval_steps=50),
            "rm: eval_steps: 50 must divide save_steps: 100 and be a multiple of",
        ),
        (lambda c: c["dpo"].update(adapter="best"), "dpo: adapter: best needs eval_steps"),
        (
            lambda c: (c["dpo"].update(eval_steps=100), c["hardware"].update(count=2, engine="fsdp")),
            "dpo.eval_steps needs hardware.engine: ddp or hardware.count: 1, not engine: fsdp",
        ),
        (
            lambda c: (c["hardware"].update(trunk="lean"), c["lora"].update(lora_dropout=0.05)),
            "hardware.trunk: lean needs lora.lora_dropout: 0",
        ),
        (
            lambda c: c["hardware"].update(trunk="lean", count=2, engine="fsdp"),
            "hardware.trunk: lean needs hardware.engine: ddp",
        ),
        (
            lambda c: (c["hardware"].update(trunk="lean"), c["model"]["architecture"].update(model_type="olmo2")),
            "hardware.trunk: lean supports the model types llama, mistral, qwen2, qwen3, not olmo2: use",
        ),
        (
            lambda c: c["tokenizer"].update(chat_template_kwargs={"a": None}),
            "tokenizer.chat_template_kwargs.a = null: input should be true or false, or a number, or text",
        ),
        (
            lambda c: c["lora"].update(target_modules="all_linear"),
            "lora.target_modules = 'all_linear': input should be 'all-linear', or a list (docs/recipes.md",
        ),
        (lambda c: c["data"].update(drop="leaked"), "data.drop = 'leaked': a list is written [leaked]"),
        (lambda c: c["ppo"].update(batch_size=1), "ppo.batch_size = 1: input should be greater than 1"),
        (
            lambda c: c["pretrain"].update(max_length=4096),
            "pretrain.max_length: 4,096 tokens are more than the model's context of 512",
        ),
        (lambda c: c["model"]["architecture"].update(num_attention_heads=5), "hidden_size must be a multiple"),
        (
            lambda c: c["model"]["architecture"].update(head_dim="foo"),
            "head_dim: 'foo' must be a whole number from 1 to 1,048,576",
        ),
        (
            lambda c: c["model"]["architecture"].update(hidden_sise=c["model"]["architecture"].pop("hidden_size")),
            "model.architecture: unknown key 'hidden_sise'; nearest: hidden_size",
        ),
        (lambda c: c["model"]["architecture"].update(head_dim=0), "model.architecture: head_dim: 0 must be a whole"),
        (lambda c: c["model"]["architecture"].update(head_dim=-4), "model.architecture: head_dim: -4 must be a whole"),
        (
            lambda c: c["model"]["architecture"].update(head_dim=True),
            "head_dim: True must be a whole number from 1 to 1,048,576",
        ),
        (lambda c: c["ppo"].update(adam_beta1=1.0), "ppo.adam_beta1 = 1.0: input should be less than 1"),
        (lambda c: c["sft"].update(adam_epsilon=0.0), "sft.adam_epsilon = 0.0: input should be greater than 0"),
        (lambda c: c["ppo"].update(cliprange=1.0), "ppo.cliprange = 1.0: input should be less than 1"),
        (lambda c: c["ppo"].update(norm_responses=1), "ppo.norm_responses = 1: input should be greater than 1"),
        (lambda c: c["dpo"].update(max_completion_length=0), "dpo.max_completion_length = 0: input should be greater"),
        (lambda c: c["tokenizer"].update(template="plain"), "data.source: toy writes HH transcripts"),
    ],
)
def test_a_bad_recipe_is_one_line_with_file_and_key(tmp_path, change, message):
    directory = copy(tmp_path, change)
    with pytest.raises(UserError) as caught:
        recipe.load(directory)
    assert re.match(rf"{directory / 'recipe.yaml'}:([0-9]+:)? ", str(caught.value))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_value_is_named_with_its_line(tmp_path):
    text = (CPU / "recipe.yaml").read_text()
    directory = tmp_path / "mine/v1"
    directory.mkdir(parents=True)
    file = directory / "recipe.yaml"
    file.write_text(text.replace("\nppo:\n", "\nppo:\n  foo: 1\n  bar: 2\n"))
    line = text.splitlines().index("ppo:") + 2
    with pytest.raises(UserError, match=rf"recipe\.yaml:{line}: unknown key 'ppo\.foo' \(also unknown: ppo\.bar\); "):
        recipe.load(directory)
    file.write_text(text.replace("cliprange: 0.2\n", "cliprange: wide\n"))
    line = next(i for i, row in enumerate(file.read_text().splitlines(), 1) if "cliprange: wide" in row)
    with pytest.raises(UserError, match=rf"recipe\.yaml:{line}: ppo\.cliprange = 'wide': "):
        recipe.load(directory)
    with pytest.raises(UserError, match=r"recipe\.yaml with --set: ppo\.cliprange = 'wider': "):
        recipe.load(directory, {"ppo.cliprange": "wider"})
    file.write_text(re.sub(r"\n  num_ppo_epochs: .*\n", "\n", text))
    line = text.splitlines().index("ppo:") + 1
    with pytest.raises(UserError, match=r"recipe\.yaml: key 'ppo\.num_ppo_epochs' is missing"):
        recipe.load(directory)
    assert plain_yaml.line_of(file, ["ppo"]) == line and plain_yaml.line_of(file, ["ppo", "num_ppo_epochs"]) is None


def test_keys_of_groups_are_explained_on_their_page():
    with pytest.raises(
        UserError, match=r"unknown key 'grpo\.betta'; nearest: grpo\.beta \(docs/groups\.md lists all\)"
    ):
        recipe.load(CPU, {"grpo": GROUP | {"betta": 1}})
    with pytest.raises(UserError, match=r"key 'grpo\.beta' is missing; add it \(docs/groups\.md explains it\)"):
        recipe.load(CPU, {"grpo": {key: value for key, value in GROUP.items() if key != "beta"}})


def test_hardware_that_is_a_number_is_refused_where_it_stands_and_not_passed_over(tmp_path):
    copy(tmp_path, lambda c: c["hardware"].update(name=4090))
    with pytest.raises(UserError, match=r"recipe\.yaml:\d+: hardware\.name = 4090: "):
        recipe.resolve("4090", tmp_path)


def test_files_of_all_recipes_are_parsed_once():
    """`rlhf recipes` reads each of them once for every other one."""
    folders = recipe.available(ROOT)
    plain_yaml._parse_cached.cache_clear()
    for directory in folders * 2:
        recipe.load(directory)
    files = [file for folder in folders for file in folder.glob("*.yaml") if file.stem in ("recipe", "published")]
    assert plain_yaml._parse_cached.cache_info().misses == len(files)


def test_overrides_are_typed_and_mark_the_run_modified():
    overrides = recipe.parse_overrides(["ppo.kl_coef=1e-1", "lora.target_modules=[q_proj, v_proj]", "ppo.steps=7"])
    loaded = recipe.load(CPU, overrides)
    assert loaded.recipe.options(Ppo).kl_coef == 0.1
    assert loaded.recipe.lora.target_modules == ("q_proj", "v_proj")
    assert loaded.recipe.options(Ppo).steps == 7
    assert loaded.modified
    assert loaded.sha256 == recipe.load(CPU).sha256


def test_a_combination_that_an_override_breaks_names_set():
    with pytest.raises(UserError, match=r"recipe\.yaml with --set: merge\.stage: grpo needs a section grpo"):
        recipe.load(CPU, {"merge.stage": "grpo"})


def test_prompts_of_a_batch_are_divided_among_the_devices():
    """Three prompts of four responses: rows for two devices, but not prompts."""
    rows = {"batch_size": 12, "num_generations": 4, "num_mini_batches": 1, "rollout_batch_size": 12}
    changes: recipe.Changes = {f"grpo.{key}": value for key, value in rows.items()}
    recipe.load(ROOT / "cpu-tiny-groups/v1", changes)
    with pytest.raises(UserError, match=r"grpo: batch_size / num_generations must be divisible by hardware\.count: 2"):
        recipe.load(ROOT / "cpu-tiny-groups/v1", changes | {"hardware.count": 2})


def test_an_override_of_an_unknown_key_names_set_and_the_nearest_key():
    with pytest.raises(UserError, match=r"with --set: unknown key 'ppo.kl_koef'; nearest: ppo.kl_coef"):
        recipe.load(CPU, {"ppo.kl_koef": 0.1})


@pytest.mark.parametrize(
    ("key", "section", "page"),
    [
        ("grpo.steps", "grpo", "docs/groups.md"),
        ("rloo.kl_estimator", "rloo", "docs/groups.md"),
        ("data.lengths.pairs", "data.lengths", "docs/recipes.md"),
    ],
)
def test_a_key_of_a_section_that_the_recipe_lacks_is_named_as_such(key, section, page):
    with pytest.raises(UserError) as caught:
        recipe.load(CPU, {"ppo.steps": 3, key: 3})
    assert str(caught.value).startswith(f"--set {key}: {CPU} has no section {section}; use a recipe that has one")
    assert str(caught.value).endswith(f"({page})")


def test_a_section_that_the_recipe_has_in_part_lacks_its_other_keys(tmp_path):
    directory = copy(tmp_path, lambda c: c.update(grpo={"steps": 3}))
    with pytest.raises(UserError, match=r"recipe\.yaml( with --set)?: key 'grpo\.\w+' is missing"):
        recipe.load(directory, {"grpo.beta": 0.1})


@pytest.mark.parametrize(
    "value",
    [
        *("true", "null", "yes", "on", "sft", "a/b", "1e3", "12", "", "a b", "#"),
        *(True, None, 2, ["a, b", 1], {"a": [1, "b: c"]}),
    ],
)
def test_what_is_written_after_set_is_read_back_as_it_was(value):
    assert recipe.parse_overrides([f"a={recipe.as_yaml(value)}"]) == {"a": value}
    assert recipe.as_yaml("sft") == "sft", "a plain word needs no quotes"
    assert recipe.as_yaml(["b, c", 1]) == '["b, c",1]', "a space would begin another change in make's SET"


def test_a_misspelt_key_of_the_architecture_is_refused_before_anything_is_predicted(monkeypatch, capsys):
    command = ("plan", "--recipe", RECIPE, "--set")
    code, out, err = rlhf(monkeypatch, capsys, *command, "model.architecture.hidden_sise=3")
    assert (code, out) == (2, "")
    assert err.endswith("with --set: model.architecture: unknown key 'hidden_sise'; nearest: hidden_size\n")
    known = {"moe_intermediate_size": 8, "use_sliding_window": False, "attention_bias": True}  # of some types
    assert recipe.load(RECIPE, {f"model.architecture.{key}": value for key, value in known.items()})


@pytest.mark.parametrize("item", ["ppo.kl_coef", "=3", "ppo.steps=[1"])
def test_a_malformed_override_is_refused(item):
    with pytest.raises(UserError, match="--set"):
        recipe.parse_overrides([item])


@pytest.mark.parametrize("items", [["a.b=1", "a={b: 2}"], ["a={b: {c: 2}}", "a.b.c=1"], ["a=1", "a=2"]])
def test_a_value_that_two_overrides_give_is_refused(items):
    with pytest.raises(UserError, match=r"^--set a.*leave one"):
        recipe.parse_overrides(items)
    assert recipe.parse_overrides(["a.b=1", "a.bc=2", "ab=3"]) == {"a.b": 1, "a.bc": 2, "ab": 3}


def test_further_changes_win_over_what_they_overlap_and_can_be_given_on_a_command_line():
    """The benchmark changes a recipe further that its user changed already, and passes everything on with --set."""
    loaded = recipe.load(CPU, {"tokenizer.vocab_size": 700, "pretrain.max_steps": 7, "seed": 5})
    changed = loaded.with_changes(random_weights_changes(loaded.recipe, 8, "hh"))
    assert (changed.recipe.tokenizer.source, changed.recipe.tokenizer.vocab_size) == ("words", 700)
    assert changed.recipe.pretrain is None and changed.recipe.seed == 5
    again = changed.with_changes({"tokenizer.vocab_size": 900, "model.architecture.vocab_size": 900})
    assert (again.recipe.tokenizer.source, again.recipe.tokenizer.vocab_size) == ("words", 900)
    items = [f"{key}={recipe.as_yaml(value)}" for key, value in again.overrides.items()]
    assert recipe.parse_overrides(items) == again.overrides
    assert recipe.load(CPU, again.overrides).recipe == again.recipe


def test_the_memory_of_the_card_makes_no_other_run():
    made: dict[str, Any] = recipe.deciding_settings(recipe.load(CPU).recipe, "sft")
    other = recipe.load(CPU, {"hardware.memory_gb": 24.0, "sft.max_samples": 8}).recipe
    assert changed_settings(made, other, "sft") == ["sft.max_samples"]
    assert made["hardware"]["memory_gb"] is None, "reports read it"


def test_another_seed_is_no_modification_but_another_run():
    loaded = recipe.load(CPU, seed=5)
    assert (loaded.recipe.seed, loaded.modified) == (5, False)
    assert differences(
        recipe.deciding_settings(loaded.recipe, "sft"), recipe.deciding_settings(recipe.load(CPU).recipe, "sft")
    ) == ["seed"]


def test_the_hash_ignores_comments_and_sees_values(tmp_path):
    same = copy(tmp_path / "a", lambda c: None)
    other = copy(tmp_path / "b", lambda c: c["ppo"].update(kl_coef=0.123))
    assert recipe.load(same).sha256 == recipe.load(CPU).sha256  # safe_dump dropped the comments
    assert recipe.load(other).sha256 != recipe.load(CPU).sha256


def test_yaml_numbers_and_repeated_keys(tmp_path):
    assert recipe.parse_overrides(["a=1e-4"]) == {"a": 1e-4}  # plain YAML 1.1 reads text here
    folder = tmp_path / "mine" / "v1"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("seed: 1\nseed: 2\n")
    with pytest.raises(UserError, match=r"recipe.yaml:2: key 'seed' is given twice"):
        recipe.load(folder)
    (folder / "recipe.yaml").write_text("a: [1\n")
    with pytest.raises(UserError, match=r"recipe\.yaml:2: "):
        recipe.load(folder)
    (folder / "recipe.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(UserError, match="not UTF-8 at byte 3"):
        recipe.load(folder)


def test_missing_recipe_and_bad_folder_name(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        recipe.load(tmp_path / "mine" / "v1")
    with pytest.raises(UserError, match="no such file"):
        recipe.load(tmp_path)
    shutil.copy(CPU / "recipe.yaml", tmp_path)
    with pytest.raises(UserError, match="lives in <name>/v<N>"):
        recipe.load(tmp_path)


def test_hw_resolves_to_the_newest_released_default(tmp_path):
    for version, status, default in (("v1", "released", True), ("v2", "released", True), ("v10", "draft", True)):
        made = copy(tmp_path / version, lambda c, s=status, d=default: c.update(status=s, default=d))
        (tmp_path / "all" / "mine").mkdir(parents=True, exist_ok=True)
        made.rename(tmp_path / "all" / "mine" / version)
    assert recipe.resolve("cpu", tmp_path / "all").name == "v2"
    only_drafts = copy(tmp_path / "drafts", lambda c: c.update(status="draft", default=True))
    assert recipe.resolve("cpu", only_drafts.parent.parent) == only_drafts
    assert [d.name for d in recipe.available(tmp_path / "all")] == ["v1", "v2", "v10"]
    with pytest.raises(UserError, match=r"--hw 4090: no recipe for such hardware .*hardware there: cpu"):
        recipe.resolve("4090", tmp_path / "all")
    shutil.copytree(tmp_path / "all" / "mine", tmp_path / "all" / "second")
    with pytest.raises(UserError, match="mine and second are both its default; set default: false in one"):
        recipe.resolve("cpu", tmp_path / "all")


def test_a_recipe_that_is_wrong_stands_in_the_way_of_its_own_hardware_only(tmp_path):
    """And that only as its default."""
    shutil.copytree(CPU, tmp_path / "mine/v1")
    text = (CPU / "recipe.yaml").read_text()
    broken = {
        "of-4090": "hardware: {name: '4090'}\ndefault: true\n",
        "of-none": "hardware: 3\n",
        "unreadable": "hardware: [1\n",
        "of-cpu": text.replace("\nppo:", "\npop:").replace("default: true", "default: false"),
    }
    for name, text in broken.items():
        (tmp_path / name / "v1").mkdir(parents=True)
        (tmp_path / name / "v1/recipe.yaml").write_text(text)
    assert recipe.resolve("cpu", tmp_path) == tmp_path / "mine/v1"
    with pytest.raises(UserError, match=r"of-4090/v1/recipe\.yaml: key '\w+' is missing"):
        recipe.resolve("4090", tmp_path)
    with pytest.raises(UserError, match=r"unreadable/v1/recipe\.yaml:2: "):
        recipe.resolve("h100", tmp_path)
    shutil.rmtree(tmp_path / "unreadable")
    with pytest.raises(UserError, match=r"no recipe for such hardware .*hardware there: 4090, cpu$"):
        recipe.resolve("unknown", tmp_path)


def test_keys_that_affect_rounding_alone_decide_nothing():
    settings = recipe.deciding_settings(recipe.load(CPU).recipe, "ppo")
    hardware = settings["hardware"]
    assert isinstance(hardware, dict) and hardware.keys() & {"count", "engine", "deterministic", "trunk"} == set()
    changed = recipe.deciding_settings(recipe.load(CPU, {"lora.r": 4, "hardware.trunk": "lean"}).recipe, "ppo")
    assert differences(settings, changed) == ["lora.r"]


def test_only_settings_that_decide_a_stage_count_for_it():
    base = recipe.load(CPU).recipe
    other = recipe.load(CPU, {"ppo.kl_coef": 0.9}).recipe
    assert recipe.deciding_settings(base, "sft") == recipe.deciding_settings(other, "sft")
    assert differences(recipe.deciding_settings(base, "ppo"), recipe.deciding_settings(other, "ppo")) == ["ppo.kl_coef"]
    changed_parent = recipe.load(CPU, {"sft.learning_rate": 0.5}).recipe
    assert recipe.deciding_settings(base, "ppo") != recipe.deciding_settings(changed_parent, "ppo")


@pytest.mark.parametrize("value", ["1", "0", "-1", "9", "three", "2.5", "true", "[3]", '""'])
def test_a_key_that_may_be_left_out_says_so_where_its_value_is_wrong(value):
    """As 1 for no ensemble, or -1 for no limit. A key that must be there, or has a default, does not."""
    changes = recipe.parse_overrides([f"rm.ensemble={value}"])
    with pytest.raises(UserError, match=r"rm\.ensemble = .*: input .*; leave the key out for one reward model$"):
        recipe.load(CPU, changes)
    with pytest.raises(UserError, match=r"= -1: input should be greater than 0; the key may be left out$"):
        recipe.load(CPU, {"sft.max_steps": -1})
    for key in ("ppo.steps", "ppo.num_ppo_epochs", "ppo"):
        with pytest.raises(UserError, match=rf"{key} = 0: (?!.*left out|.*leave)"):
            recipe.load(CPU, {key: 0})


def test_what_is_no_key_of_a_recipe_is_not_said_to_be_left_out():
    """A value in a mapping, though another key has its name, and the whole recipe."""
    with pytest.raises(UserError, match=r"data\.rename\.rating = 3: input should be a valid string$"):
        recipe.load(CPU, {"data.rename": {"rating": 3}})  # a column; `data.rating` is another key
    with pytest.raises(UserError, match=r"v1: \[1\]: a section is written KEY=VALUE, or with its keys below it$"):
        strict.validate(recipe.Recipe, [1], CPU, ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("seed=4294967296", "seed = 4294967296: input should be less than 4294967296"),
        ("seed=99999999999999999999999", "seed = 99999999999999999999999"),
        ("hardware.threads=100000", "less than or equal to 1024"),
        ("hardware.count=100000", "less than or equal to 1024"),
        (
            "tokenizer.vocab_size=1",
            "vocab_size: 1 is too small for every byte and the marks of a dialogue; 261 or more",
        ),
        ("pretrain.num_train_epochs=1e300", "less than or equal to 10000"),
        ("pretrain.num_train_epochs=.inf", "num_train_epochs"),
        ("pretrain.num_train_epochs=.nan", "num_train_epochs"),
        ("pretrain.max_length=1", "pretrain.max_length = 1: input should be greater than 1"),
        ("pretrain.max_length=10000000", "less than or equal to 1048576"),
        ("pretrain.per_device_train_batch_size=1000000", "less than or equal to 65536"),
        ("ppo.batch_size=1000000", "less than or equal to 65536"),
        ("pretrain.max_steps=99999999999999999999", "less than or equal to 10000000"),
        ("ppo.steps=99999999999999999999", "less than or equal to 10000000"),
        ("ppo.temperature=1e-300", "greater than or equal to 0.01"),
        ("evaluate.temperature=1e300", "less than or equal to 100"),
        ("sft.learning_rate=1e300", "learning_rate = 1e+300: input should be less than"),
        ("data.toy.pairs=99999999999999", "less than or equal to 10000000"),
        ("model.architecture.num_hidden_layers=1000000000", "less than or equal to 1024"),
        ('description="\\ud800"', "U+D800"),
        ("description=" + "x" * 100_000, "at most 1000 characters"),
        ("ppo.steps=? [a]\n: b", "a key is not text"),
        (".ppo=1", "write it as key=value"),
        ("..=1", "write it as key=value"),
        ("ppo.steps=!!set {1}", "tag !!set"),
    ],
    ids=lambda value: value[:40],
)
def test_an_absurd_value_is_refused_in_one_short_line(monkeypatch, capsys, tmp_path, change, message):
    code, out, err = rlhf(
        monkeypatch, capsys, "run", "pretrain", "--recipe", str(CPU), "--out", str(tmp_path), "--set", change
    )
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert message in err
    assert len(err) <= 2008
    assert not list(tmp_path.iterdir())


def test_the_smallest_trained_tokenizer_is_as_small_as_the_schema_says():
    """One token for each byte, the three special ones and the two turns; merges are what comes on top."""
    assert len(train(["some text"], SMALLEST_TRAINED)) == SMALLEST_TRAINED
    assert len(train(["some text"], SMALLEST_TRAINED + 1)) == SMALLEST_TRAINED + 1


@pytest.mark.parametrize("target", ["nowhere.yaml", "published.yaml"])
def test_published_figures_behind_a_broken_link_are_not_left_out(tmp_path, target):
    directory = tmp_path / "cpu-tiny" / "v1"
    shutil.copytree(CPU, directory)
    (directory / "published.yaml").unlink()
    assert recipe.load(directory).figures == ()
    (directory / "published.yaml").symlink_to(target)
    with pytest.raises(UserError, match=r"published\.yaml"):
        recipe.load(directory)


def test_the_keys_of_further_mistakes_are_named():
    wrong: recipe.Changes = {"seed": -1, "ppo.lam": 7, "ppo.steps": -1, "sft.max_length": 0, "rm.margin": "x"}
    with pytest.raises(UserError) as error:
        recipe.load(CPU, wrong)
    assert "\n" not in str(error.value)
    named = re.search(r"recipe.yaml with --set: (\S+) = .* \(also wrong: (.*) and 1 more\)$", str(error.value))
    assert named
    assert len({named[1], *named[2].split(", ")} & set(wrong)) == 4


@pytest.mark.parametrize("place", ["v1", ".", "../cpu-tiny/v1", "v1/../v1", "./v1/"])
def test_a_recipe_has_its_name_however_its_folder_is_written(monkeypatch, place):
    monkeypatch.chdir(CPU if place == "." else CPU.parent)
    loaded = recipe.load(Path(place))
    assert (loaded.name, loaded.version) == ("cpu-tiny", "v1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.files": ["a.jsonl"]}, "files is set, but source is toy: set source: files, or remove files"),
        ({"data.name": "a/b"}, "data: name is set, but source is toy: set source: hub, or remove name"),
        ({"data.revision": "0" * 40}, "data: revision is set, but source is toy: set source: hub, or remove revision"),
        ({"data.data_dir": "a", "data.split": "b"}, "data_dir is set, but source is toy: .* or remove data_dir, split"),
        ({"model.revision": "0" * 40}, "model: revision is set, but source is pretrain: set source: hub, or remove"),
    ],
)
def test_a_key_of_another_source_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        recipe.load(CPU, changes)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "grpo: 1 reward_funcs and 0 reward_weights: give each its weight"),
        ([0], "grpo: reward_weights: all are 0: give at least one reward another weight"),
    ],
)
def test_weights_that_leave_no_reward_are_refused(weights, message):
    with pytest.raises(UserError, match=message):
        recipe.load(ROOT / "cpu-tiny-groups/v1", {"grpo.reward_weights": weights})


WITHOUT = {"rm": None, "ppo": None, "dpo": None, "merge": None}


def test_a_recipe_has_the_stages_whose_sections_it_has():
    loaded = recipe.load(CPU, WITHOUT).recipe
    assert [*loaded.sections()] == ["pretrain", "sft", "evaluate"]
    assert recipe.parents(loaded, "evaluate") == stages_before(loaded, "evaluate") == ["pretrain", "sft"]
    assert (loaded.policies(), loaded.rollout_stage()) == ([], None)
    assert {key.partition(".")[0] for key in loaded.lengths()} == {"pretrain", "sft", "evaluate"}
    assert "rm" not in recipe.deciding_settings(loaded, "evaluate")
    assert predicted_stages(loaded) == ["sft", "evaluate"]
    assert loaded.options(Sft) is loaded.sft
    with pytest.raises(UserError, match="this needs a recipe with a section ppo"):
        loaded.options(Ppo)


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        ({"rm": None}, "ppo needs a section rm: the reward model scores its responses"),
        ({"ppo": None}, "merge.stage: ppo needs a section ppo"),
        ({"rm": None, "ppo": None, "grpo": GROUP, "merge.stage": "grpo"}, "grpo needs a section rm: the reward model"),
    ],
)
def test_a_section_that_another_needs_is_named(absent, message):
    with pytest.raises(UserError, match=message):
        recipe.load(CPU, absent)


@pytest.mark.parametrize(("stage", "page"), [("rm", "docs/recipes.md"), ("grpo", "docs/groups.md")])
def test_an_absent_stage_is_refused_with_a_few_recipes_that_have_it(stage, page):
    message = no_section(stage, recipe.load(CPU, WITHOUT))
    assert message.startswith(f"{stage}: {CPU} has no such stage; add a section {stage} ({page}), or use --recipe ")
    having = [folder for folder in recipe.available(CPU.parents[1]) if recipe.load(folder).recipe.section(stage)]
    assert len(having) > 3 and message.count(" or /") == 3
    assert (f" or {len(having) - 4} others" in message) == (len(having) > 4)


def test_a_section_that_is_none_is_refused_in_our_words():
    with pytest.raises(UserError, match=r"lora = null: a section is written lora\.KEY=VALUE"):
        recipe.load(CPU, {"lora": None})


@pytest.mark.parametrize(
    ("folder", "content", "way_out"),
    [
        ("a/final", "seed: 0\n", "rename the folder, for example to v1"),
        ("a/v1", "", "holds nothing instead of keys with values; restore the file"),
        ("a/v1", "- 1\n", "holds a list instead of keys with values"),
    ],
)
def test_a_folder_that_is_no_recipe_is_refused_with_the_way_out(tmp_path, folder, content, way_out):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "recipe.yaml").write_text(content)
    with pytest.raises(UserError, match=way_out):
        recipe.load(tmp_path / folder)


def test_a_changed_seed_is_that_of_the_recipe():
    loaded = recipe.load(CPU, seed=3)
    assert loaded.with_changes({"seed": 5}).recipe.seed == 5
    assert loaded.with_changes({"ppo.steps": 5}).recipe.seed == 3
