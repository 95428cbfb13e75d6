"""A second reward model: it learns from rows that no other stage sees, measures every policy, and trains none."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.data.split import conversation_key
from rlhf.recipe import PinnedRecipe
from rlhf.run.directory import StageRun
from rlhf.stages.corpus import load_corpus
from tests.helpers import TWO_STEPS, beside, content_of, run_stages, small
from tests.lines import read_intact_lines

ROOT = Path("cpu-tiny/v1")
STAGES = ("pretrain", "sft", "rm", "second_rm", "ppo", "dpo", "evaluate")


def with_second(**changes: Any) -> PinnedRecipe:
    """The CPU recipe at test size with a second reward model, which has the settings of the first."""
    second = small(**TWO_STEPS).recipe.model_dump(mode="json")["rm"]
    options = TWO_STEPS | {"second_rm": second, "data__second_rm_fraction": 0.5, "ppo__steps": 2}
    return small(**options | changes)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a finished chain."""
    out = tmp_path_factory.mktemp("second")
    run_stages(with_second(), out, *STAGES)
    return out


def test_the_second_model_learns_from_conversations_of_its_own(done):
    loaded = with_second()
    corpus = load_corpus(_Quiet(done, loaded, "second_rm"))
    first, second = corpus.preferences("rm"), corpus.preferences("second_rm")
    keys = [{conversation_key(pair.prompt) for pair in rows} for rows in (first.train, second.train, first.test)]
    assert all(keys) and not keys[0] & keys[1] and not keys[1] & keys[2]
    assert first.test == second.test and corpus.preferences("dpo") == first
    assert 0.3 < len(second.train) / len(first.train + second.train) < 0.7
    prompts = {conversation_key(prompt) for prompt in corpus.prompts("ppo").train}
    demonstrated = {conversation_key(row.prompt) for row in corpus.demonstrations().train}
    assert not (prompts | demonstrated) & keys[1]
    whole = load_corpus(_Quiet(done, small(), "rm")).preferences("rm")
    assert {*whole.train} == {*first.train, *second.train} and whole.test == first.test


def test_the_two_models_differ_and_both_judge_every_policy(done):
    metrics = content_of(done / ROOT / "evaluate/summary.json")["metrics"]
    for policy in ("ppo", "dpo"):
        gain, gap = metrics[f"{policy}/second_score_gain_sd"], metrics[f"{policy}/second_gap_sd"]
        assert gap == pytest.approx(metrics[f"{policy}/score_gain_sd"] - gain)
        assert metrics[f"{policy}/second_score_gain_sd_low"] < gain < metrics[f"{policy}/second_score_gain_sd_high"]
    first, second = (content_of(done / ROOT / stage / "summary.json")["metrics"] for stage in ("rm", "second_rm"))
    assert 0 <= second["accuracy_low"] <= second["accuracy"] <= 1 and second["margin"] != first["margin"]
    answers = read_intact_lines(done / ROOT / "evaluate/samples.jsonl")[0]
    assert answers["ppo"]["second_score"] != answers["ppo"]["score"]


def test_policies_learn_as_without_it(done, tmp_path):
    rows = [row for row in read_intact_lines(done / ROOT / "ppo/metrics.jsonl") if "eval/score" in row]
    assert rows and all(math.isfinite(row["eval/second_score_gain_sd"]) for row in rows)
    weights = [torch.load(folder / "state.pt") for folder in _checkpoints(done, "ppo")]
    # A second model with other weights changes what is measured, and nothing that is learned.
    other = beside(done, tmp_path, "pretrain", "sft", "rm")
    run_stages(with_second(second_rm__learning_rate=0.05), other, "second_rm", "ppo")
    again = [torch.load(folder / "state.pt") for folder in _checkpoints(other, "ppo")]
    assert len(weights) == len(again) > 0
    for a, b in zip(weights, again, strict=True):
        assert torch.equal(_flat(a), _flat(b))
    ours, theirs = (content_of(out / ROOT / "ppo/summary.json")["metrics"] for out in (done, other))
    assert ours["score"] == theirs["score"] and ours["second_score"] != theirs["second_score"]


class _Quiet(StageRun):
    """A run that writes nothing into its manifest."""

    def describe(self, **facts: Any) -> None:
        """Forget the facts."""


def _checkpoints(out: Path, stage: str) -> list[Path]:
    return sorted(path for path in (out / ROOT / stage / "checkpoints").iterdir() if path.is_dir())


def _flat(state: Any) -> torch.Tensor:
    """Every number of a state as one row."""
    if isinstance(state, torch.Tensor):
        return state.flatten().double()
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return torch.cat([torch.empty(0, dtype=torch.float64), *(_flat(value) for value in values)])
