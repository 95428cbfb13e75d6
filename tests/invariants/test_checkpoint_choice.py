"""Checkpoints of SFT, reward model and DPO are compared on validation rows, without changing what is trained."""

import math
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf.data.pairs import encode_pairs
from rlhf.evaluation import policies
from rlhf.evaluation.policies import measure
from rlhf.rollout.engine import sample
from rlhf.run.directory import StageRun
from rlhf.stages.best import best_step
from rlhf.stages.corpus import load_corpus
from rlhf.stages.online import session
from rlhf.stages.online.session import score_within
from rlhf.stages.supervised import pairs as training_pairs
from rlhf.stages.supervised import policy
from rlhf.stages.supervised import training as trainer
from tests.helpers import Crash, beside, content_of, crash, noted, run_stages, small
from tests.lines import read_intact_lines

ROOT = "cpu-tiny/v1"
PARENTS = {"sft": ("pretrain",), "rm": ("pretrain", "sft"), "dpo": ("pretrain", "sft")}
ADAPTER = "adapter/adapter_model.safetensors"


def evaluated(stage, **changes):
    return small(**{f"{stage}__eval_steps": 2}, **changes)


def rows_of(folder):
    """Logged rows of the training, and of the evaluation."""
    rows = read_intact_lines(folder / "metrics.jsonl")
    return [row for row in rows if "eval/loss" not in row], [row for row in rows if "eval/loss" in row]


def test_dpo_reports_the_policy_beside_sft_from_a_random_stream_of_its_own(trained, tmp_path, monkeypatch):
    roles: list[str] = []
    seeds: list[int] = []
    monkeypatch.setattr(policy, "measure", lambda *a, **o: noted(roles, a[1], measure(*a, **o)))
    monkeypatch.setattr(policies, "sample", lambda *a, **o: noted(seeds, torch.initial_seed(), sample(*a, **o)))
    loaded = small()
    run_stages(loaded, beside(trained, tmp_path, "pretrain", "sft"), "dpo")
    assert roles == ["reference", "policy"]
    assert len(seeds) == 2 and seeds[0] == seeds[1] != loaded.recipe.seed


@pytest.fixture(scope="module", params=PARENTS)
def done(request, trained, tmp_path_factory):
    """A stage's name and its folders: trained without evaluation, and with one every two steps."""
    stage = request.param
    plain, with_evaluation = (
        beside(trained, tmp_path_factory.mktemp(f"{stage}-{name}"), *PARENTS[stage]) for name in ("plain", "evaluated")
    )
    run_stages(small(), plain, stage)
    run_stages(evaluated(stage), with_evaluation, stage)
    return stage, plain / ROOT / stage, with_evaluation / ROOT / stage


def test_evaluation_changes_nothing_that_is_trained(done):
    _, plain, with_evaluation = done
    assert (with_evaluation / ADAPTER).read_bytes() == (plain / ADAPTER).read_bytes()
    training, evaluation = rows_of(with_evaluation)
    assert training == read_intact_lines(plain / "metrics.jsonl")
    assert [row["step"] for row in evaluation] == [2, 4, 6, 8]


def test_what_is_logged_at_the_last_step_is_what_the_stage_reports(done):
    stage, _, folder = done
    reported = content_of(folder / "summary.json")["metrics"]
    last = rows_of(folder)[1][-1]
    same = {
        "sft": {"perplexity": "perplexity"},
        "rm": {"accuracy": "accuracy", "margin": "margin"},
        "dpo": {"rewards/accuracies": "preference_accuracy"},
    }[stage]
    for logged, key in same.items():
        assert last[f"eval/{logged}"] == pytest.approx(reported[key], rel=1e-5), key
    if stage == "sft":
        assert last["eval/loss"] == pytest.approx(math.log(last["eval/perplexity"]), rel=1e-6)


def test_the_best_checkpoint_has_the_lowest_loss(done):
    _, _, folder = done
    losses = {row["step"]: row["eval/loss"] for row in rows_of(folder)[1]}
    best = content_of(folder / "summary.json")["metrics"]["best_step"]
    assert best == min((4, 8), key=lambda step: losses[step])


def test_the_result_is_the_best_checkpoint_where_the_recipe_says_so(done, trained, tmp_path, monkeypatch):
    stage, plain, _ = done
    out = beside(trained, tmp_path, *PARENTS[stage])
    monkeypatch.setattr(trainer, "best_step", lambda *given: best_step(*given) and 4)  # the last may well be the best
    summary = run_stages(evaluated(stage, **{f"{stage}__adapter": "best"}), out, stage)
    assert summary["metrics"]["chosen_among_checkpoints"] == 2, "by the rows of its figures"
    folder = out / ROOT / stage
    result, chosen = (load_file(folder / file) for file in (ADAPTER, f"checkpoints/step-000004/{ADAPTER[8:]}"))
    assert result.keys() == chosen.keys()
    assert all(result[name].equal(chosen[name]) for name in result)
    assert (folder / ADAPTER).read_bytes() != (plain / ADAPTER).read_bytes()


def test_after_a_crash_the_evaluation_goes_on_with_the_same_bytes(done, trained, tmp_path, monkeypatch):
    stage, _, folder = done
    out = beside(trained, tmp_path, *PARENTS[stage])
    crash(monkeypatch, 4)
    with pytest.raises(Crash):
        run_stages(evaluated(stage), out, stage)
    monkeypatch.undo()
    run_stages(evaluated(stage), out, stage, resume=True)
    for name in (ADAPTER, "metrics.jsonl"):
        assert (out / ROOT / stage / name).read_bytes() == (folder / name).read_bytes(), name


# -- validation rows apart from test rows ----------------------------------------------------------------------------


def apart(**changes):
    return small(data__heldout_fraction=0.3, data__validation_fraction=0.15, data__toy__pairs=600, **changes)


@pytest.fixture(scope="module")
def split_chain(tmp_path_factory):
    out = tmp_path_factory.mktemp("apart")
    run_stages(apart(), out, "pretrain", "sft")
    return out


def test_validation_rows_choose_and_test_rows_are_reported(split_chain, tmp_path, monkeypatch):
    """What the reward model scores while it trains are validation pairs; what it reports are test pairs."""
    out = beside(split_chain, tmp_path, "pretrain", "sft")
    loaded = apart(rm__eval_steps=4)
    seen: list[Any] = []
    monkeypatch.setattr(
        training_pairs,
        "encode_pairs",
        lambda tokenizer, pairs, options: noted(seen, pairs, encode_pairs(tokenizer, pairs, options)),
    )
    summary = run_stages(loaded, out, "rm")
    run = StageRun(out, loaded, "rm")
    monkeypatch.setattr(run, "describe", lambda **_: None)
    pairs = load_corpus(run).pairs
    training, test, validation = seen
    assert training == pairs.train[:64] and test == pairs.test[:16] and validation == pairs.validation[:16]
    assert not {p.prompt for p in test} & {p.prompt for p in pairs.validation}
    last = rows_of(out / ROOT / "rm")[1][-1]
    assert last["eval/margin"] != pytest.approx(summary["metrics"]["margin"], rel=1e-3)


def test_ppo_chooses_by_validation_prompts_and_reports_test_prompts(split_chain, tmp_path, monkeypatch):
    out = beside(split_chain, tmp_path, "pretrain", "sft")
    loaded = apart(ppo__steps=2, ppo__eval_steps=1)
    run_stages(loaded, out, "rm")
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        session,
        "measure",
        lambda *args, **options: noted(asked, (args[1], tuple(args[3])), measure(*args, **options)),
    )
    run_stages(loaded, out, "ppo")
    run = StageRun(out, loaded, "ppo")
    monkeypatch.setattr(run, "describe", lambda **_: None)
    prompts = load_corpus(run).prompts("ppo")
    validation, test = tuple(prompts.validation[:8]), tuple(prompts.test[:8])
    assert asked == [
        ("reference", validation),
        *[("policy", validation)] * 2,
        ("reference", test),
        ("policy", test),
    ]
    assert not {*prompts.validation} & {*prompts.test}
    shutil.rmtree(out)


@pytest.mark.parametrize(
    ("limit", "rows", "best"),
    [
        (None, {2: (1.0, None), 4: (3.0, 9.0), 6: (3.0, 0.1)}, 4),  # the first of equals
        (0.5, {2: (1.0, 0.5), 4: (3.0, 0.51)}, 2),  # the limit itself is within it
        (0.5, {2: (1.0, None), 4: (-3.0, 0.2)}, 4),  # an unknown KL is not within a limit
        (None, {2: (None, 0.1)}, None),
        (0.5, {2: (1.0, 0.6)}, None),
        (None, {}, None),
    ],
)
def test_the_best_checkpoint_has_the_highest_score_within_the_kl_limit(limit, rows, best, tmp_path):
    run = StageRun(tmp_path, small(), "ppo")
    for step, (score, kl) in rows.items():
        run.checkpoints.of(step).mkdir(parents=True)
        numbers = {"eval/score": score, "eval/kl_per_token": kl}
        run.logs.metrics(step, {name: math.nan if number is None else number for name, number in numbers.items()})
    assert best_step(run, lambda logged: score_within(logged, limit)) == best
