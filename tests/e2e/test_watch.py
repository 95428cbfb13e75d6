"""Every check of rlhf/observe/watch.py, each triggered by a real run in which the failure was planted."""

import inspect
import json
import random
from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import UserError
from rlhf.models.shared_base import SharedBase
from rlhf.observe import checks, watch
from rlhf.observe.history import History
from rlhf.recipe.learning_rates import adapter_rate
from rlhf.rollout.engine import sample
from rlhf.stages.online import session
from tests.helpers import beside, content_of, grouped, run_stages, small
from tests.lines import read_intact_lines

ROWS = {"logging_steps": 1, "save_steps": 60, "num_train_epochs": 100}


def findings(out: Path, stage: str) -> dict[str, dict[str, Any]]:
    rows = read_intact_lines(out / "cpu-tiny/v1" / stage / "findings.jsonl")
    by_check = {row["check"]: row for row in rows}
    assert len(by_check) == len(rows), "each is said once"
    return by_check


def supervised(trained: Path, out: Path, stage: str, *parents: str, **options) -> dict[str, dict[str, Any]]:
    """A stage of many short steps after finished parents; what was found in it."""
    changes = {f"{stage}__{key}": value for key, value in (ROWS | options).items()}
    run_stages(small(**changes), beside(trained, out, "pretrain", *parents), stage)
    return findings(out, stage)


def own_pairs(out: Path, rows: list[tuple[str, str, str]]) -> dict[str, object]:
    """The changes by which a recipe trains on these (prompt, chosen, rejected)."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "pairs.jsonl"
    keys = ("prompt", "chosen", "rejected")
    file.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    return {"data__source": "files", "data__files": [str(file)], "data__toy": None}


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(["red", "blue", "tea", "moon", "salt", "rain", "bird", "stone"]) for _ in range(count))


def test_weights_that_overflow(trained, tmp_path, capsys):
    reported = supervised(trained, tmp_path, "sft", learning_rate=0.5, weight_decay=1e30, max_steps=12)
    assert reported["nan"]["remedies"] == {"sft.learning_rate": 0.25}
    printed = capsys.readouterr().err
    assert "is not a number [nan]" in printed and "Try sft.learning_rate=0.25" in printed
    assert "nan" in content_of(tmp_path / "cpu-tiny/v1/sft/summary.json")["findings"]


def test_a_learning_rate_that_is_too_high(tmp_path):
    changes = {f"pretrain__{key}": value for key, value in (ROWS | {"learning_rate": 1.0, "max_steps": 20}).items()}
    run_stages(small(**changes), tmp_path, "pretrain")
    assert "rising_loss" in findings(tmp_path, "pretrain")


def test_a_learning_rate_that_is_too_low(trained, tmp_path):
    reported = supervised(trained, tmp_path, "sft", learning_rate=1e-12, max_steps=40)
    assert set(reported) == {"flat_loss"}
    assert reported["flat_loss"]["remedies"]["sft.learning_rate"] == adapter_rate("sft", 32, chat=False)


def test_labels_that_are_noise(trained, tmp_path):
    """Which of two answers is the chosen one was drawn by a coin."""
    rng = random.Random(0)
    rows = [(words(rng, 4), words(rng, 5), words(rng, 5)) for _ in range(200)]
    changes = own_pairs(tmp_path / "data", rows)
    run = {f"rm__{k}": v for k, v in (ROWS | {"max_steps": 40, "max_samples": 200, "learning_rate": 1e-4}).items()}
    run |= {"sft__max_steps": 1, "pretrain__max_steps": 2}
    (out := tmp_path / "run").mkdir()
    loaded = from_base(trained, out, **changes, **run)
    run_stages(loaded, out, "sft", "rm")
    assert "chance" in findings(out, "rm")


def from_base(trained: Path, out: Path, **changes):
    """A recipe that starts from the small base as if it were a published one, so that other data can follow."""
    base = str(trained / "cpu-tiny/v1/pretrain/model")
    source = {"source": "local", "name": base}
    whole: dict[str, Any] = {f"model__{k}": v for k, v in source.items()} | {
        f"tokenizer__{k}": v for k, v in source.items()
    }
    whole |= {"pretrain": None, "model__architecture": None, "tokenizer__vocab_size": None}
    changes = {key: value for key, value in changes.items() if not key.startswith("pretrain__")}
    return small(**whole | changes)


def test_pairs_that_are_nearly_the_same(trained, tmp_path, capsys):
    rows = [("say it", "red blue tea", "red blue tea " + "salt" * (i % 2)) for i in range(4)]
    rows = [(f"say it {i // 2}", chosen, rejected + "!") for i, (_, chosen, rejected) in enumerate(rows * 20)]
    changes = own_pairs(tmp_path / "data", rows)
    run = {f"rm__{k}": v for k, v in (ROWS | {"max_steps": 8, "learning_rate": 1e-9}).items()}
    loaded = from_base(trained, tmp_path, **changes, **run, sft__max_steps=1)
    run_stages(loaded, tmp_path, "sft", "rm")
    assert "same_scores" in findings(tmp_path, "rm")
    assert "training pairs are fewer than 100: the H100 guide calls RLHF worth it" in capsys.readouterr().err


def test_a_reward_model_that_knows_its_pairs_by_heart(trained, tmp_path):
    options = {"max_samples": 8, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    reported = supervised(trained, tmp_path, "rm", "sft", learning_rate=0.03, max_steps=60, **options)
    assert "overconfident" in reported


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base that has learned enough words to have something to forget, and to end its answers."""
    out = tmp_path_factory.mktemp("taught")
    run_stages(small(**TAUGHT), out, "pretrain", "sft", "rm")
    return out


TAUGHT = {"pretrain__max_steps": 400, "pretrain__num_train_epochs": 100, "pretrain__learning_rate": 3e-3}
TAUGHT |= {"data__toy__documents": 600, "sft__max_steps": 60, "sft__num_train_epochs": 100, "sft__learning_rate": 3e-3}

PPO = {
    "ppo__steps": 20,
    "ppo__logging_steps": 1,
    "ppo__eval_steps": 5,
    "ppo__save_steps": 20,
    "ppo__kl_coef": 0.0,
    "ppo__warmup_steps": 0,
    "ppo__normalize_scores": False,
    "ppo__missing_eos_penalty": None,
}
TEN = {"ppo__steps": 10, "ppo__save_steps": 10}


@pytest.mark.slow
def test_a_reward_that_can_be_had_by_repetition(taught, tmp_path, monkeypatch):
    """The score is the share of eight tokens. The policy says little else soon, far from the reference."""

    def share(self, rollout, role="reward"):
        return ((rollout.tokens // 8 == 9) & rollout.mask).sum(-1) / rollout.mask.sum(-1) * 5

    monkeypatch.setattr(SharedBase, "scores", share)
    more = {"ppo__steps": 64, "ppo__save_steps": 64, "ppo__response_length": 24}
    more |= {f"ppo__{key}": 32 for key in ("batch_size", "per_device_train_batch_size", "rollout_batch_size")}
    loaded = small(**TAUGHT | PPO | more, ppo__learning_rate=0.01, ppo__value_learning_rate=0.003)
    run_stages(loaded, beside(taught, tmp_path, "pretrain", "sft", "rm"), "ppo")
    reported = findings(tmp_path, "ppo")
    assert {"high_kl", "entropy_collapse", "repetition", "fewer_ends"} <= set(reported), reported
    assert reported["high_kl"]["remedies"]["ppo.kl_coef"] == 0.05


def test_a_reward_for_length(taught, tmp_path, monkeypatch):
    monkeypatch.setattr(SharedBase, "scores", lambda self, rollout, role="reward": rollout.response_length / 10)
    more = {"ppo__steps": 20, "ppo__save_steps": 20, "ppo__response_length": 48}
    more |= {f"ppo__{key}": 16 for key in ("batch_size", "per_device_train_batch_size", "rollout_batch_size")}
    loaded = small(**TAUGHT | PPO | more, ppo__learning_rate=0.01, ppo__value_learning_rate=0.003)
    run_stages(loaded, beside(taught, tmp_path, "pretrain", "sft", "rm"), "ppo")
    reported = findings(tmp_path, "ppo")
    assert {"longer", "fewer_ends"} <= set(reported), reported
    assert reported["longer"]["cause"] == "Length pays with the reward model, and the policy has found out"


def test_a_reward_that_does_not_rise(taught, tmp_path):
    """The learning rate is far too low: nothing is learned in 24 steps."""
    more = {"ppo__steps": 24, "ppo__save_steps": 24, "ppo__eval_steps": 24}
    loaded = small(**TAUGHT | PPO | more, ppo__learning_rate=1e-9, ppo__value_learning_rate=1e-9)
    run_stages(loaded, beside(taught, tmp_path, "pretrain", "sft", "rm"), "ppo")
    reported = findings(tmp_path, "ppo")
    assert reported["flat_reward"]["remedies"] == {"ppo.learning_rate": adapter_rate("ppo", 32, chat=False)}
    assert reported["flat_reward"]["step"] >= checks.MANY


@pytest.mark.parametrize(
    ("gain", "steps", "seen"),
    [
        (0.0, 40, True),  # noise alone
        (0.02, 40, False),  # a rise of 0.8 over the run
        (-0.02, 40, True),  # a fall
        (0.0, 400, False),  # too early in a long run: a quarter of it must have passed
        (0.0, 160, True),
    ],
)
def test_a_flat_reward_is_told_from_a_rising_one(gain, steps, seen):
    """Forty rows of a score with a noise of 0.1; none of ten healthy or ten flat runs is taken for the other."""
    verdicts = set()
    for seed in range(10):
        rng = random.Random(seed)
        history = History(small(ppo__logging_steps=1).recipe, "ppo", total_steps=steps)
        for i in range(40):
            history.add({"objective/scores": gain * i + rng.gauss(0, 0.1)})
        verdicts.add(checks.find_flat_reward(history) is not None)
    assert verdicts == {seen}


def test_updates_that_are_too_large(taught, tmp_path, capsys):
    """And a stage that is told to stop on them does, and says how to go on."""
    more = {"ppo__steps": 8, "ppo__save_steps": 8, "ppo__learning_rate": 0.01, "ppo__num_ppo_epochs": 6}
    loaded = small(**TAUGHT | PPO | more)
    out = beside(taught, tmp_path, "pretrain", "sft", "rm")
    stopped = r"ppo: stopped on (clipping|large_updates); start again with another setting, as in .*/ppo/findings.jsonl"
    with pytest.raises(UserError, match=stopped):
        run_stages(loaded, out, "ppo", stop_on=["clipping", "large_updates"])
    assert not (tmp_path / "cpu-tiny/v1/ppo/summary.json").exists()
    run_stages(loaded, out, "ppo")
    assert {"clipping", "large_updates"} <= set(findings(tmp_path, "ppo"))


def test_responses_from_another_policy_than_the_one_that_is_scored(trained, tmp_path, monkeypatch):
    made: list[SharedBase] = []
    build = SharedBase.__init__

    def remember(self, *arguments, **options):
        build(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(SharedBase, "__init__", remember)

    def of_the_reference(*arguments, **options):
        made[-1].roles.activate("reference")
        return sample(*arguments, **options)

    monkeypatch.setattr(session, "sample", of_the_reference)
    loaded = small(**PPO | TEN, ppo__learning_rate=0.01)
    run_stages(loaded, beside(trained, tmp_path, "pretrain", "sft", "rm"), "ppo")
    reported = findings(tmp_path, "ppo")
    assert {"negative_kl", "sampling_mismatch"} <= set(reported)


def test_a_critic_that_cannot_follow(taught, tmp_path, monkeypatch):
    """The scores double from one scoring to the next."""
    score, asked = SharedBase.scores, []

    def growing(self, rollout, role="reward"):
        asked.append(1)
        return score(self, rollout) + 2.0 ** len(asked) / 100 * (rollout.response_length % 3)

    monkeypatch.setattr(SharedBase, "scores", growing)
    run_stages(small(**TAUGHT | PPO | TEN), beside(taught, tmp_path, "pretrain", "sft", "rm"), "ppo")
    finding = findings(tmp_path, "ppo")["value_explosion"]
    assert list(finding["remedies"]) == ["ppo.value_learning_rate"]


def test_groups_that_teach_nothing(trained, tmp_path):
    """A reward that no response earns."""
    group = {"reward_funcs": ["regex(pattern='nobody says this')"], "normalize_scores": False, "steps": 6}
    group |= {"missing_eos_penalty": None, "save_steps": 6, "eval_steps": 6}
    run_stages(grouped("grpo", group), beside(trained, tmp_path, "pretrain", "sft"), "grpo")
    finding = findings(tmp_path, "grpo")["no_signal"]
    assert list(finding["remedies"]) == ["grpo.num_generations", "grpo.resample_groups"]


def test_a_healthy_run_is_told_nothing(trained, tmp_path):
    """A chain of four to twelve steps a stage."""
    out = beside(trained, tmp_path, "pretrain", "sft", "rm")
    run_stages(small(), out, "ppo", "dpo")
    for stage in ("pretrain", "sft", "rm", "ppo", "dpo"):
        assert content_of(out / "cpu-tiny/v1" / stage / "summary.json")["findings"] == [], stage


PLANTED = {  # check: the test in which its failure is planted
    "nan": test_weights_that_overflow,
    "rising_loss": test_a_learning_rate_that_is_too_high,
    "flat_loss": test_a_learning_rate_that_is_too_low,
    "chance": test_labels_that_are_noise,
    "same_scores": test_pairs_that_are_nearly_the_same,
    "overconfident": test_a_reward_model_that_knows_its_pairs_by_heart,
    "high_kl": test_a_reward_that_can_be_had_by_repetition,
    "entropy_collapse": test_a_reward_that_can_be_had_by_repetition,
    "repetition": test_a_reward_that_can_be_had_by_repetition,
    "fewer_ends": test_a_reward_for_length,
    "longer": test_a_reward_for_length,
    "flat_reward": test_a_reward_that_does_not_rise,
    "clipping": test_updates_that_are_too_large,
    "large_updates": test_updates_that_are_too_large,
    "negative_kl": test_responses_from_another_policy_than_the_one_that_is_scored,
    "sampling_mismatch": test_responses_from_another_policy_than_the_one_that_is_scored,
    "value_explosion": test_a_critic_that_cannot_follow,
    "no_signal": test_groups_that_teach_nothing,
}


def test_a_failure_is_planted_for_every_check():
    assert set(PLANTED) == set(watch.CHECK_NAMES)
    for check, test in PLANTED.items():
        assert f'"{check}"' in inspect.getsource(test), f"{test.__name__} asserts nothing about {check}"
