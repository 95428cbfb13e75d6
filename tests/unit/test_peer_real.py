"""The comparison with TRL on a recipe's own model and rows: what both sides get is the same."""

from pathlib import Path
from typing import Any

import pytest

from bench.kinds import StageSteps
from bench.peer import real, supervised, trl_stages
from rlhf import recipe
from rlhf.data.load import divide_rows
from rlhf.data.source import read_source
from rlhf.data.tokenize import DialogueTokenizer, words
from rlhf.errors import UserError
from rlhf.recipe import Dialogues, Grpo, Rm, Sft
from rlhf.run.directory import StageRun

RECIPES = Path(__file__).parents[2] / "recipes"
SUMS, TOY = RECIPES / "cpu-smollm2-sums/v1", RECIPES / "cpu-tiny/v2"


def run_of(folder: Path, stage: Any, out: Path) -> StageRun:
    loaded = recipe.load(folder)
    return StageRun(out, loaded.with_changes(real.few_real_steps(loaded.recipe, 3)), stage)


@pytest.fixture
def tokenizer() -> DialogueTokenizer:
    return DialogueTokenizer(words(2000), "hh")


def test_few_steps_change_no_setting_that_decides_a_step():
    before = recipe.load(SUMS)
    after = before.with_changes(real.few_real_steps(before.recipe, 3)).recipe
    assert after.grpo and before.recipe.grpo and after.grpo.steps == after.grpo.eval_steps == 3
    around = {"steps", "eval_steps", "save_steps", "logging_steps", "max_eval_samples", "adapter"}
    assert after.grpo.model_dump(exclude=around) == before.recipe.grpo.model_dump(exclude=around)
    same = {"model", "data", "lora", "tokenizer", "hardware"}
    assert after.model_dump(include=same) == before.recipe.model_dump(include=same)


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo"])
def test_trl_gets_the_token_ids_on_which_our_stage_trains(stage, tmp_path, tokenizer):
    run = run_of(TOY, stage, tmp_path)
    rows = trl_stages.rows_of(run, tokenizer)
    corpus, _ = divide_rows(read_source(run.loaded.recipe, run.run_directory / "data"), run.loaded.recipe)
    options = run.loaded.recipe.section(stage)
    assert isinstance(options, Dialogues)
    if isinstance(options, Sft):
        first = corpus.demonstrations().train[0]
        ours = tokenizer.encode([(first.prompt, first.response)], options.max_prompt_length, options.max_length)[0][0]
        assert ours and rows[0]["input_ids"] == ours.prompt + ours.response
        assert rows[0]["labels"][len(ours.prompt) :] == ours.response and set(
            rows[0]["labels"][: len(ours.prompt)]
        ) == {-100}
    else:
        pair = corpus.preferences(stage).train[0]
        ours = tokenizer.encode([(pair.prompt, pair.rejected)], options.max_prompt_length, options.max_length)[0][0]
        assert ours
        prompt = [] if isinstance(options, Rm) else rows[0]["prompt_ids"]
        assert prompt + rows[0]["rejected_ids"] == ours.prompt + ours.response
    assert len(rows) <= (options.max_samples or len(rows))


def test_grpo_of_trl_has_the_recipe_s_settings_and_rewards():
    options = recipe.load(SUMS).recipe.options(Grpo)
    theirs = trl_stages.same_settings(options)
    assert theirs["per_device_train_batch_size"] * theirs["gradient_accumulation_steps"] == options.batch_size
    assert {name: theirs[name] for name in trl_stages.SAME} == {n: getattr(options, n) for n in trl_stages.SAME}
    (reward,) = trl_stages.rewards_of(options)
    assert reward(["?", "?"], ["12", "13"], [[1], [2]], answer=["12", "12"], trainer_state=None) == [1.0, 0.0]
    with pytest.raises(UserError, match="num_iterations and num_mini_batches must be 1"):
        trl_stages.same_settings(options.model_copy(update={"num_iterations": 2}))
    with pytest.raises(UserError, match="a reward model is not compared"):
        trl_stages.rewards_of(options.model_copy(update={"reward_funcs": ["model"]}))


def test_prompts_that_trl_would_read_otherwise_are_refused(tmp_path, tokenizer):
    """The tokenizer of the toy world writes a BOS that TRL would not."""
    run = run_of(SUMS, "grpo", tmp_path)
    with pytest.raises(UserError, match="TRL would read other prompts"):
        trl_stages.rows_of(run, tokenizer)


def test_a_peak_on_a_cpu_is_that_of_the_process():
    assert supervised._peak({"phase_peak_bytes": None, "peak_rss_bytes": 7}) == 7
    gpu: StageSteps = {"phase_peak_bytes": {"train": 5, "load": 9}, "peak_rss_bytes": 7}
    assert supervised._peak(gpu) == 5
