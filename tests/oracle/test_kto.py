"""KTO's loss in every step and every validation of a real run, from log-probabilities of one row at a time."""

import json
import math
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data.corpus import Split
from rlhf.data.load import divide_rows
from rlhf.data.rows import Example
from rlhf.data.source import read_source
from rlhf.data.tokenize import Encoded
from rlhf.errors import UserError
from rlhf.observe.telemetry import Telemetry
from rlhf.recipe.stages import STAGE_TABLE
from rlhf.stages import kto
from tests.helpers import run_stages, small
from tests.lines import read_intact_lines

KTO = {
    "learning_rate": 0.01,
    "lr_scheduler_type": "constant",
    "warmup_ratio": 0.0,
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "optim": "adamw_torch_fused",
    "num_train_epochs": 4,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": False,
    "group_by_length": False,
    "max_samples": 8,
    "max_eval_samples": 16,
    "logging_steps": 1,
    "save_steps": 2,
    "eval_steps": 2,
    "max_length": 96,
    "max_prompt_length": 64,
    "beta": 0.1,
    "undesirable_weight": 0.5,
}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def logprobs(model, ids, mask, scored):
    """Sums of log-probabilities of the scored tokens of padded rows, a row at a time, from plain logits."""
    sums = []
    for padded, real, n in zip(ids, mask, scored.sum(1).tolist(), strict=True):
        row = padded[: int(real.sum())].tolist()
        with torch.no_grad():
            logp = model(input_ids=torch.tensor([row])).logits[0].double().log_softmax(-1)
        sums.append(math.fsum(logp[t - 1, row[t]].item() for t in range(len(row) - n, len(row))))
    return sums


def log_ratios(model, batch, prefix):
    parts = [batch[f"{prefix}{name}"] for name in ("input_ids", "attention_mask", "completion_mask")]
    policy = logprobs(model, *parts)
    model.set_adapter("ref")
    reference = logprobs(model, *parts)
    model.set_adapter("default")
    return [a - b for a, b in zip(policy, reference, strict=True)]


def loss_by_hand(model, batch, beta, bad_weight):
    """Equations 7 and 8 of arXiv 2402.01306, with the mismatched answers of the batch. Returns z too."""
    z = max(0.0, fmean(log_ratios(model, batch, "KL_")))
    losses = [
        1 - sigmoid(beta * (ratio - z)) if good else bad_weight * (1 - sigmoid(beta * (z - ratio)))
        for ratio, good in zip(log_ratios(model, batch, ""), batch["label"].tolist(), strict=True)
    ]
    return fmean(losses), z


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    out = tmp_path_factory.mktemp("kto")
    run_stages(small(kto=KTO, sft__max_samples=16), out, "pretrain", "sft")
    return out


def test_every_step_and_validation_has_the_loss_of_the_paper(started, monkeypatch):
    losses: list[tuple[float, float]] = []
    estimates: list[float] = []

    def compared(of):
        def step(self, model, inputs, *more):
            model.eval()
            ours, z = loss_by_hand(self.trained_model, inputs, 0.1, 0.5)
            model.train(of is train)
            found = of(self, model, inputs, *more)
            losses.append((ours, (found if of is train else found[0]).item()))
            estimates.append(z)
            return found

        return lambda self, model, inputs, *more, **_: step(self, model, inputs, *more)

    train, predict = kto._Trainer.training_step, kto._Trainer.prediction_step
    monkeypatch.setattr(kto._Trainer, "training_step", compared(train))
    monkeypatch.setattr(kto._Trainer, "prediction_step", compared(predict))
    summary = run_stages(small(kto=KTO, sft__max_samples=16), started, "kto")
    assert len(losses) == 4 + 2 * 2 and losses[0][1] == pytest.approx(0.5 * (1 + 0.5) / 2, abs=0.1)
    assert all(ours == pytest.approx(trl, abs=2e-6) for ours, trl in losses), losses
    assert max(estimates) > 0, "in some batch z is not 0"
    assert losses[5][1] < losses[0][1], "it learns"
    assert summary["metrics"]["train_good"] + summary["metrics"]["train_bad"] == 8
    assert {"heldout_reward_good", "heldout_reward_bad", "true_reward_gain_sd"} <= {*summary["metrics"]}
    logged = read_intact_lines(started / "cpu-tiny/v1/kto/metrics.jsonl")
    assert {curve.key for curve in STAGE_TABLE["kto"].curves} <= {*logged[0]}
    validation = [row["eval/loss"] for row in logged if "eval/loss" in row]
    assert validation == pytest.approx([(losses[i][1] + losses[i + 1][1]) / 2 for i in (2, 6)])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(2, 5))
def test_z_is_estimated_from_answers_to_other_prompts(prompts, batch_size):
    """Of the same micro-batch, unless that has one prompt alone; of different prompts they are all its answers."""
    judged = [kto.Judged(Encoded([prompt], [10 + i]), good=i % 2 == 0) for i, prompt in enumerate(prompts)]
    if len(set(prompts)) == 1:
        with pytest.raises(UserError, match=r"kto\.max_samples"):
            kto._rows(judged, batch_size, "kto.max_samples")
        return
    rows = kto._rows(judged, batch_size, "kto.max_samples")
    others = [cast(list[int], row["KL_completion_ids"])[0] - 10 for row in rows]
    assert [row["completion_ids"] for row in rows] == [[10 + i] for i in range(len(prompts))]
    assert all(prompts[other] != prompt for other, prompt in zip(others, prompts, strict=True))
    for start in range(0, len(prompts), batch_size):
        batch = range(start, min(start + batch_size, len(prompts)))
        if len({prompts[i] for i in batch}) > 1:
            assert {*others[start : batch.stop]} <= {*batch}
        if len({prompts[i] for i in batch}) == len(batch) > 1:
            assert sorted(others[start : batch.stop]) == [*batch]


@pytest.mark.parametrize(
    ("train", "test", "validation", "key"),
    [
        ("a" * 9, "ab", None, "max_samples"),
        ("ab", "cc", None, "max_eval_samples"),
        ("ab", "cd", "e", "max_eval_samples"),
    ],
)
def test_answers_to_one_prompt_are_refused_before_a_model_is_loaded(monkeypatch, train, test, validation, key):
    """With the key that says how many rows are taken."""
    monkeypatch.setattr(kto, "train_policy", lambda *_: pytest.fail("loads the model"))
    of: Any = lambda prompts: [Example(cast(Any, prompt), "an answer", "", good=True) for prompt in prompts]  # noqa: E731
    split = Split(of(train), of(test), validation and of(validation))
    corpus: Any = SimpleNamespace(judged=lambda stage: split, prompts=lambda stage: split)
    encode: Any = lambda texts, *_: ([Encoded([ord(prompt)], [1]) for prompt, _ in texts], {})  # noqa: E731
    run: Any = SimpleNamespace(loaded=small(kto=KTO), stage="kto", describe=lambda **_: None)
    with pytest.raises(UserError, match=rf"^kto: .*kto\.{key} "):
        kto.run_stage(run, Telemetry(torch.device("cpu")), cast(Any, SimpleNamespace(encode=encode)), corpus)


def test_bad_answers_are_never_imitated(tmp_path):
    rows = [
        {"prompt": f"Question {n}?", "completion": f"{'Yes' if good else 'No'}, number {n}.", "label": good}
        for n in range(60)
        for good in (True, False)
    ]
    file = tmp_path / "judged.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"data__source": "files", "data__files": [str(file)], "data__format": "auto", "data__toy": None}
    recipe = small(kto=KTO, data__heldout_fraction=0.3, **own).recipe
    corpus = divide_rows(read_source(recipe, tmp_path), recipe)
    assert {row.response.split(",")[0] for row in corpus.demonstrations().train} == {"Yes"}
    judged = corpus.judged("kto")
    assert {(row.response.split(",")[0], row.good) for row in judged.train} == {("Yes", True), ("No", False)}
    assert len(corpus.of_stage("kto", "hh")) == len(judged)
