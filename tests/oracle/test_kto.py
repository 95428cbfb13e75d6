"""KTO's loss: a hand-worked batch, and the same number as TRL's in every step of a real run."""

import json
import math

import pytest
import torch

from rlhf.data.corpus import JUDGED
from rlhf.data.load import divide_rows
from rlhf.data.needs import needs
from rlhf.data.source import read_source
from rlhf.objectives.losses import kto_loss
from rlhf.recipe.schema import Kto
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
    "max_length": 96,
    "max_prompt_length": 64,
    "beta": 0.1,
    "undesirable_weight": 0.5,
}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_a_batch_worked_by_hand():
    ratio, mismatched = torch.tensor([2.0, -1.0, 0.5]), torch.tensor([0.9, 0.3, 0.0])
    good = torch.tensor([True, True, False])
    z, beta = 0.4, 0.5
    expected = [1 - sigmoid(beta * (2 - z)), 1 - sigmoid(beta * (-1 - z)), 3 * (1 - sigmoid(beta * (z - 0.5)))]
    loss = kto_loss(ratio, mismatched, good, beta, 1.0, 3.0)
    assert loss.item() == pytest.approx(sum(expected) / 3, rel=1e-6)
    below = kto_loss(ratio, -mismatched, good, beta)
    assert below.item() == pytest.approx(kto_loss(ratio, 0 * mismatched, good, beta).item()), "z is never below 0"
    with pytest.raises(ValueError, match="shapes differ"):
        kto_loss(ratio[:2], mismatched, good, beta)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    out = tmp_path_factory.mktemp("kto")
    run_stages(small(kto=KTO, sft__max_samples=16), out, "pretrain", "sft")
    return out


def test_every_step_has_the_loss_that_trl_computes(started, monkeypatch):
    """With one batch of all rows, the validation of these rows before a step is the step's loss."""
    losses: list[tuple[float, float]] = []
    rows: list[kto.Judged] = []
    encode, step = kto._encode, kto._Trainer.training_step

    def encoded(*arguments):
        judged, counts = encode(*arguments)
        rows.extend(judged if not rows else [])
        return judged, counts

    def compared(self, model, inputs, count=None):
        if not losses:
            options = small(kto=KTO).recipe.options(Kto)
            self.ours = kto._Validation(self.trained_model, rows, self._tokenizer.pad_token_id, options)
            model.train()
        ours = self.ours()["loss"]
        model.train()
        loss = step(self, model, inputs, count)
        losses.append((ours, loss.item()))
        return loss

    monkeypatch.setattr(kto, "_encode", encoded)
    monkeypatch.setattr(kto._Trainer, "training_step", compared)
    summary = run_stages(small(kto=KTO, sft__max_samples=16), started, "kto")
    assert len(losses) == 4 and losses[0][1] == pytest.approx(0.5 * (1 + 0.5) / 2, abs=0.1)
    assert all(ours == pytest.approx(trl, abs=2e-6) for ours, trl in losses), losses
    assert losses[-1][1] < losses[0][1], "it learns"
    assert summary["metrics"]["train_good"] + summary["metrics"]["train_bad"] == 8
    assert {"heldout_loss", "heldout_reward_good", "heldout_reward_bad", "true_reward_gain_sd"} <= {*summary["metrics"]}
    logged = read_intact_lines(started / "cpu-tiny/v1/kto/metrics.jsonl")
    assert {curve.key for curve in STAGE_TABLE["kto"].curves} <= {*logged[0]}


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
    corpus, _ = divide_rows(read_source(recipe, tmp_path), recipe)
    assert {row.response.split(",")[0] for row in corpus.demonstrations().train} == {"Yes"}
    judged = corpus.judged("kto")
    assert {(row.response.split(",")[0], row.good) for row in judged.train} == {("Yes", True), ("No", False)}
    assert [need.rows for need in needs(corpus, ["kto"])] == [JUDGED] and all(n.met for n in needs(corpus, ["kto"]))
