"""Recipes without SFT: policies start at the base itself, which is their reference and what they are compared with."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf import recipe
from rlhf.errors import UserError
from rlhf.evaluation import compare
from rlhf.evaluation.score import RewardModel, finished_stages
from rlhf.models.loading import load_base
from rlhf.plan.rehearsal.short_runs import ShortRun
from rlhf.rating.pairs import pair_answers
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.chain import comparable, stages_before
from rlhf.report import page
from rlhf.rollout import speaker as chat
from rlhf.run.directory import StageRun
from rlhf.stages.corpus import stage_input
from rlhf.stages.online.session import begin
from tests.helpers import GROUP, RECIPE, SMALL, TWO_STEPS, Crash, beside, content_of, crash, run_stages, small
from tests.lines import read_intact_lines

ROOT = Path("cpu-tiny/v1")
ADAPTER = "adapter/adapter_model.safetensors"
CHECKED: dict[str, Any] = {"reward_funcs": ["length(most=3)"], "normalize_scores": False}


def from_base(**changes: Any) -> PinnedRecipe:
    """The CPU recipe at test size without SFT, with PPO and GRPO on a function alone."""
    on_function = {f"ppo__{key}": value for key, value in CHECKED.items()}
    return small(**TWO_STEPS | {"sft": None, "grpo": GROUP | CHECKED} | on_function | changes)


@pytest.fixture(scope="module")
def done(trained, tmp_path_factory) -> Path:
    """The root of a finished chain: PPO and GRPO on a function, DPO, and the evaluation."""
    out = beside(trained, tmp_path_factory.mktemp("base"), "pretrain")
    run_stages(from_base(rm=None, merge__stage="grpo"), out, "ppo", "grpo", "dpo", "evaluate", "merge")
    return out


def test_every_policy_is_compared_with_the_base(done):
    metrics = content_of(done / ROOT / "evaluate/summary.json")["metrics"]
    for policy in ("ppo", "grpo", "dpo"):
        assert f"{policy}/true_reward_gain_sd" in metrics and metrics[f"{policy}/kl_per_token"] > 0
        assert f"{policy}/perplexity" in metrics
    for policy in ("ppo", "grpo"):
        gain = metrics[f"{policy}/reward_length"] - metrics["base/reward_length"]
        assert metrics[f"{policy}/reward_length_gain"] == pytest.approx(gain)
        own = content_of(done / ROOT / policy / "summary.json")["metrics"]
        assert {"win_rate_vs_base", "score_base", "reward_length_base", "response_length_base"} <= own.keys()
    assert not [name for name in metrics if "sft" in name]
    assert {*content_of(done / ROOT / "evaluate/manifest.json")["parents"]} == {"pretrain", "ppo", "grpo", "dpo"}
    assert read_intact_lines(done / ROOT / "evaluate/samples.jsonl")[0].keys() >= {"base", "ppo", "grpo", "dpo"}


def test_report_comparison_ratings_and_chat_name_the_base(done, tmp_path):
    page.write(done / ROOT, tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert "(the base)" in html and "SFT" not in html
    compared = compare.compare_runs(compare.load(done / ROOT, "base"), compare.load(done / ROOT, "grpo"))
    assert "reward_length" in [row.name for row in compared.rows]
    pairs = pair_answers(done / ROOT)
    assert (pairs.a, pairs.b) == ("base", "ppo")
    run = StageRun(done, from_base(rm=None), "evaluate")
    assert chat.trained_stage(run, chat.first_policy(run.loaded.recipe)) == done / ROOT / "ppo"


def test_a_merged_model_is_base_and_adapter(done):
    metrics = content_of(done / ROOT / "merge/summary.json")["metrics"]
    assert metrics["adapter_effect"] > 0 and metrics["kl_of_merging"] < 1e-6


@pytest.mark.parametrize("trunk", ["library", "lean"])
def test_policy_and_reference_say_what_the_base_says(trained, tmp_path, trunk):
    out = beside(trained, tmp_path, "pretrain")
    run = ShortRun(out, from_base(rm=None, hardware__trunk=trunk), "ppo")  # which writes no manifest
    run.path.mkdir(parents=True)
    shared = begin(run, torch.device("cpu"), run.loaded.recipe.online()["ppo"], *stage_input(run)).shared
    ids = torch.randint(10, 300, (3, 9), generator=torch.Generator().manual_seed(0))
    base = load_base(run.base, torch.device("cpu"))
    with torch.no_grad():
        expected = base.get_decoder()(input_ids=ids).last_hidden_state
        for role in ("policy", "reference", "base"):
            with shared.role(role):
                assert torch.allclose(shared.hidden(ids), expected, atol=1e-5), role
    assert [*shared.peft.peft_config] == ["policy"], "the reference has no adapter"
    assert all(weight.requires_grad for weight in shared.roles.parameters("policy"))


@pytest.mark.parametrize("stage", ["ppo", "grpo"])
def test_after_a_crash_it_ends_with_the_same_bytes(done, trained, tmp_path, monkeypatch, stage):
    loaded = from_base(rm=None, merge__stage="grpo")
    out = beside(trained, tmp_path, "pretrain")
    crash(monkeypatch, 2)
    with pytest.raises(Crash):
        run_stages(loaded, out, stage)
    monkeypatch.undo()
    run_stages(loaded, out, stage, resume=True)
    for name in (ADAPTER, "metrics.jsonl", "samples.jsonl", "checkpoints/best.json"):
        assert (out / ROOT / stage / name).read_bytes() == (done / ROOT / stage / name).read_bytes(), name


def test_a_reward_model_may_start_at_the_base_too(trained, tmp_path):
    """It scores for PPO, beside a function, in the evaluation and in `rlhf score`."""
    both = {"ppo__reward_funcs": ["model", "length(most=3)"], "ppo__reward_weights": [0.5, 2.0]}
    loaded = from_base(**both, ppo__steps=2, ppo__normalize_scores=True, grpo=None, dpo=None, merge=None)
    out = beside(trained, tmp_path, "pretrain")
    metrics = run_stages(loaded, out, "rm", "ppo", "evaluate")["metrics"]
    assert {"ppo/score_gain_sd", "ppo/win_rate_vs_base", "ppo/reward_length_gain", "rm/accuracy"} <= metrics.keys()
    row = read_intact_lines(out / ROOT / "ppo/metrics.jsonl")[0]
    assert {"rewards/length", "objective/no_verdict"} <= row.keys() and row["objective/no_verdict"] == 0
    assert "reward" in RewardModel(finished_stages(loaded, out)).shared.score_heads


def test_a_recipe_that_trains_no_policy_is_refused():
    with pytest.raises(UserError, match=r"without sft needs one of ppo, rloo, grpo, dpo"):
        recipe.load(RECIPE, SMALL | dict.fromkeys(("sft", "rm", "ppo", "dpo", "merge")))


def test_stages_before_are_those_that_are_there():
    loaded = from_base().recipe
    assert (
        recipe.parents(loaded, "ppo") == recipe.parents(loaded, "dpo") == recipe.parents(loaded, "grpo") == ["pretrain"]
    )
    assert recipe.parents(loaded, "rm") == ["pretrain"]
    assert stages_before(loaded, "evaluate") == ["pretrain", "rm", "ppo"]
    assert loaded.start == "base" and small().recipe.start == "sft"


def test_a_target_over_sft_is_not_that_of_a_run_from_the_base():
    """Nothing is judged by figures of another start, but for pretraining, which comes before."""
    (figure, *_) = (figure for figure in recipe.load(RECIPE).figures if figure.stage == "ppo")
    loaded = recipe.load(RECIPE)
    assert comparable(figure, loaded.recipe, [])
    assert not comparable(figure, loaded.with_changes({"sft": None}).recipe, ["sft"])
