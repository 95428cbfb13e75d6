"""Three reward models on one base: the first is the plain one, each learns from an order of its own, all score."""

import itertools
import json
import shutil
from pathlib import Path
from statistics import fmean, linear_regression, pstdev, stdev
from typing import Any

import pytest
import torch

from rlhf.data.batch import collate
from rlhf.data.rows import Message
from rlhf.errors import UserError
from rlhf.evaluation.score import RewardModel, finished_stages
from rlhf.evaluation.score_items import Item
from rlhf.models.weights import reward_weights
from rlhf.recipe import PinnedRecipe
from rlhf.run.directory import StageRun
from rlhf.run.finished import read_summary, reward_model_digest
from rlhf.stages.online.role_passes import reward_scores
from tests.helpers import GROUP, Crash, beside, content_of, crash, run_stages, small
from tests.lines import read_intact_lines

ROOT = Path("cpu-tiny/v1")
MEMBERS = ("", "member-2", "member-3")
OF_ONE = ("adapter/adapter_model.safetensors", "metrics.jsonl")


def with_three(**changes: Any) -> PinnedRecipe:
    """The CPU recipe at test size with three reward models, the least of which is PPO's score."""
    few = {"ppo__steps": 2, "evaluate__num_samples": 2, "merge__stage": "rm", "dpo": None}
    return small(**{"rm__ensemble": 3, "ppo__combine_scores": "min"} | few | changes)


@pytest.fixture(scope="module")
def done(trained, tmp_path_factory) -> Path:
    """The root of a finished chain, whose parents of the reward models are those of a plain one."""
    out = beside(trained, tmp_path_factory.mktemp("ensemble"), "pretrain", "sft")
    run_stages(with_three(), out, "rm", "ppo", "evaluate", "merge")
    return out


def test_the_first_is_the_plain_reward_model_and_the_others_differ(done, trained):
    rm, plain = done / ROOT / "rm", trained / ROOT / "rm"
    for name in OF_ONE:
        assert (rm / name).read_bytes() == (plain / name).read_bytes(), name
    figures, alone = (content_of(folder / "summary.json")["metrics"] for folder in (rm, plain))
    for name in ("accuracy", "score_mean", "score_sd"):
        assert figures[f"member_1_{name}"] == alone[name]
    assert figures["disagreement"] > 0
    logged = [read_intact_lines(rm / member / "metrics.jsonl") for member in MEMBERS]
    assert len({json.dumps(rows) for rows in logged}) == 3 and len({len(rows) for rows in logged}) == 1
    heads = [reward_weights(rm / member, 32)[1] for member in MEMBERS]
    assert min((a - b).norm().item() for a, b in itertools.pairwise(heads)) > 0.1
    one, other = read_summary(rm), read_summary(plain)
    assert one and other and reward_model_digest(one) != reward_model_digest(other)
    assert {f"{m}/adapter/adapter_model.safetensors".lstrip("/") for m in MEMBERS} <= one.result_sha256.keys()


def test_an_evaluation_has_the_mean_and_each_member(done):
    figures, metrics = (content_of(done / ROOT / stage / "summary.json")["metrics"] for stage in ("rm", "evaluate"))
    assert metrics["rm/accuracy"] == figures["accuracy"]
    assert [metrics[f"rm/member_{n}_accuracy"] for n in (1, 2, 3)] == [
        figures[f"member_{n}_accuracy"] for n in (1, 2, 3)
    ]
    rows = read_intact_lines(done / ROOT / "evaluate/samples.jsonl")
    for of_member in zip(*(row["sft"]["member_scores"] for row in rows), strict=True):
        assert (fmean(of_member), stdev(of_member)) == pytest.approx((0, 1), abs=1e-3)
    answers = [row[policy] for row in rows for policy in ("base", "sft", "ppo")]
    means, scores = [fmean(answer["member_scores"]) for answer in answers], [answer["score"] for answer in answers]
    slope, intercept = linear_regression(means, scores)
    assert scores == pytest.approx([intercept + slope * mean for mean in means], abs=1e-5)
    assert len(answers[0]["member_scores"]) == 3 and slope > 0
    apart = fmean(pstdev(row["ppo"]["member_scores"]) for row in rows)
    assert metrics["ppo/disagreement"] == pytest.approx(apart, rel=1e-4)


def test_ppo_learns_from_the_least_of_the_scores_that_are_standardised_on_its_start(done):
    rows = read_intact_lines(done / ROOT / "ppo/metrics.jsonl")
    assert rows and all(row["objective/disagreement"] > 0 for row in rows)
    state: Any = torch.load(done / ROOT / "ppo/checkpoints/step-000002/state.pt")
    shared = RewardModel(finished_stages(with_three(), done)).shared
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(5, 300, (9,), generator=generator).tolist() for _ in range(4)]
    rollout = collate([text[:4] for text in texts], [text[4:] for text in texts], 0, 1)
    raw = [shared.scores(rollout, role).tolist() for role in shared.reward_roles]
    assert shared.ensemble is not None and len(raw) == 3
    shared.ensemble = shared.ensemble._replace(means=state["members"][0], sds=state["members"][1], combine="min")
    found, apart = reward_scores(shared, rollout, 2)
    standard = [[(s - m) / sd for s in of] for of, m, sd in zip(raw, *state["members"], strict=True)]
    by_hand = list(zip(*standard, strict=True))
    centre, unit = map(fmean, state["members"])
    assert found.tolist() == pytest.approx([centre + unit * min(scores) for scores in by_hand], abs=1e-5)
    assert apart is not None and apart.tolist() == pytest.approx([pstdev(scores) for scores in by_hand], rel=1e-4)


def test_score_reads_the_mean_of_all_and_merge_writes_the_first(done):
    model = RewardModel(finished_stages(with_three(), done))
    (scored,), _ = model.score([Item("here", (Message("user", "Hello?"),), {"response": "Yes."}, {})])
    figures = content_of(done / ROOT / "rm/summary.json")["metrics"]
    means, sds = ([figures[f"member_{n}_score_{name}"] for n in (1, 2, 3)] for name in ("mean", "sd"))
    shared, tokenizer = model.shared, model.tokenizer
    (row,), _ = tokenizer.encode([([Message("user", "Hello?")], "Yes.")], 64, 64)
    assert row is not None
    rollout = collate([row.prompt], [row.response], tokenizer.pad_id, tokenizer.eos_id)
    standard = [
        (shared.scores(rollout, r).item() - m) / sd for r, m, sd in zip(shared.reward_roles, means, sds, strict=True)
    ]
    assert scored.scores["response"] == pytest.approx(fmean(means) + fmean(sds) * fmean(standard), abs=1e-5)
    config = content_of(done / ROOT / "merge/model/config.json")
    assert (config["score_mean"], config["score_sd"]) == (figures["member_1_score_mean"], figures["member_1_score_sd"])


@pytest.mark.parametrize("stopped", ["", "member-2"])
def test_resuming_after_a_crash_in_any_member_gives_the_same_bytes(done, tmp_path, monkeypatch, stopped):
    out = beside(done, tmp_path, "pretrain", "sft")
    seal = StageRun.seal_checkpoint

    def sealed_then_dead(self: StageRun, step: int, folder: Path) -> None:
        seal(self, step, folder)
        if step == 4 and self.path == out / ROOT / "rm" / stopped:
            raise Crash

    monkeypatch.setattr(StageRun, "seal_checkpoint", sealed_then_dead)
    with pytest.raises(Crash):
        run_stages(with_three(), out, "rm")
    monkeypatch.undo()
    run_stages(with_three(), out, "rm", resume=True)
    for member, name in itertools.product(MEMBERS, OF_ONE):
        again, once = (root / ROOT / "rm" / member / name for root in (out, done))
        assert again.read_bytes() == once.read_bytes(), (member, name)
    figures = [content_of(root / ROOT / "rm/summary.json")["metrics"] for root in (out, done)]
    assert figures[0] == figures[1]


def test_a_resumed_policy_has_the_scales_that_it_began_with(done, tmp_path, monkeypatch):
    out = beside(done, tmp_path, "pretrain", "sft", "rm")
    crash(monkeypatch, 1)
    with pytest.raises(Crash):
        run_stages(with_three(), out, "ppo")
    monkeypatch.undo()
    run_stages(with_three(), out, "ppo", resume=True)
    assert (out / ROOT / "ppo/metrics.jsonl").read_bytes() == (done / ROOT / "ppo/metrics.jsonl").read_bytes()


def test_groups_are_scored_by_the_ensemble_too(done, tmp_path):
    out = beside(done, tmp_path, "pretrain", "sft", "rm")
    grpo = GROUP | {"steps": 1, "combine_scores": "mean_minus_var", "variance_coef": 0.5, "resample_groups": 1}
    run_stages(with_three(ppo=None, grpo=grpo), out, "grpo")
    (row,) = read_intact_lines(out / ROOT / "grpo/metrics.jsonl")
    assert row["objective/disagreement"] > 0


def test_a_changed_member_is_another_reward_model(done, tmp_path):
    out = beside(done, tmp_path, "pretrain", "sft")
    shutil.copytree(done / ROOT / "rm", out / ROOT / "rm")
    file = out / ROOT / "rm/member-3/adapter/adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match=r"member-3/adapter/adapter_model.safetensors has changed since rm was done"):
        run_stages(with_three(), out, "ppo")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rm__ensemble": 1}, "greater than or equal to 2"),
        ({"rm__ensemble": 9}, "less than or equal to 8"),
        ({"rm__ensemble": None}, "ppo.combine_scores needs rm.ensemble"),
        ({"ppo__reward_funcs": ["length(most=1)"], "ppo__normalize_scores": False}, "model among ppo.reward_funcs"),
        ({"ppo__variance_coef": 0.5}, "variance_coef needs combine_scores: mean_minus_var"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(changes, said):
    with pytest.raises(UserError, match=said):
        with_three(**changes)


def test_a_second_reward_model_is_one():
    second = small().recipe.model_dump(mode="json")["rm"] | {"ensemble": 2}
    with pytest.raises(UserError, match=r"second_rm\.ensemble: .*set rm\.ensemble"):
        small(second_rm=second, data__second_rm_fraction=0.5)
