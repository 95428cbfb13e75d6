"""SFT, reward model and DPO with the lean trunk in TRL's trainers: the same steps, but for rounding."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from rlhf.data.batch import Rollout
from rlhf.errors import UserError
from rlhf.models.adapters import attach_adapter
from rlhf.models.lean.trunk import LeanTrunk
from rlhf.models.loading import load_base
from rlhf.rollout.trunk_decoding import TrunkDecoding
from rlhf.run.directory import StageRun
from rlhf.run.reader import read_lines
from rlhf.run.records import MetricsLine
from rlhf.stages.supervised.forward import IGNORED, LabelStatistics
from tests import kernels
from tests.helpers import beside, run_stages, small

ROOT = Path("cpu-tiny/v1")
PARENTS = {"sft": ["pretrain"], "rm": ["pretrain", "sft"], "dpo": ["pretrain", "sft", "rm"]}
STEPS = 3


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    """How often the lean trunk computes each role, and how often it decodes."""
    calls: Counter[str] = Counter()
    hidden, responses, run = LeanTrunk.hidden, LeanTrunk.response_hidden, TrunkDecoding.run
    pairs = LeanTrunk.pair_hidden

    def counted(self: LeanTrunk, role: str, *arguments: Any) -> torch.Tensor:
        calls[role] += 1
        return hidden(self, role, *arguments)

    def counted_responses(self: LeanTrunk, role: str, rollout: Rollout) -> torch.Tensor:
        calls[role] += self.packs or rollout.prompt_numbers is not None  # otherwise `hidden` is called
        return responses(self, role, rollout)

    def counted_pairs(self: LeanTrunk, role: str, *arguments: Any) -> torch.Tensor:
        calls[role] += 1
        return pairs(self, role, *arguments)

    def counted_run(self: TrunkDecoding, *arguments: Any) -> list[torch.Tensor]:
        calls["decoding"] += 1
        return run(self, *arguments)

    monkeypatch.setattr(LeanTrunk, "hidden", counted)
    monkeypatch.setattr(LeanTrunk, "response_hidden", counted_responses)
    monkeypatch.setattr(LeanTrunk, "pair_hidden", counted_pairs)
    monkeypatch.setattr(TrunkDecoding, "run", counted_run)
    return calls


@pytest.mark.parametrize(
    ("stage", "accumulated", "recomputed", "more"),
    [
        ("sft", 1, True, {}),
        ("sft", 2, False, {}),
        ("rm", 1, False, {}),
        ("dpo", 2, True, {}),
        ("dpo", 1, False, {"dpo__loss_type": "sigmoid_norm", "dpo__sft_weight": 0.3}),
        ("dpo", 1, False, {"dpo__loss_type": "ipo"}),
        ("dpo", 1, False, {"dpo__label_smoothing": 0.2}),
        ("sft", 1, True, {"joined": "as on a card"}),
        ("dpo", 1, False, {"joined": "as on a card"}),
        ("rm", 1, True, {"joined": "as on a card"}),
        ("sft", 2, False, {"joined": "here"}),
        ("dpo", 1, True, {"joined": "here"}),
        ("rm", 2, False, {"joined": "here"}),
    ],
)
def test_the_lean_trunk_changes_rounding_only(
    trained, tmp_path, calls, stage, accumulated, recomputed, more, monkeypatch
):
    """`joined`: rows without padding."""
    more = dict(more)
    joined = more.pop("joined", "")
    if joined == "as on a card":
        kernels.join_rows(monkeypatch)
    results: dict[str, dict[str, torch.Tensor]] = {}
    logged: dict[str, list[Mapping[str, float | None]]] = {}
    for trunk in ("library", "lean"):
        beside(trained, tmp_path / trunk, *PARENTS[stage])
        changes: dict[str, Any] = {f"{stage}__max_steps": STEPS, f"{stage}__save_steps": STEPS, **more}
        changes |= {f"{stage}__logging_steps": 1, "hardware__trunk": trunk}
        changes["hardware__joined_rows"] = joined == "here" and trunk == "lean"
        changes |= {f"{stage}__gradient_accumulation_steps": accumulated, f"{stage}__per_device_train_batch_size": 4}
        changes[f"{stage}__gradient_checkpointing"] = recomputed
        run_stages(small(**changes), tmp_path / trunk, stage)
        folder = tmp_path / trunk / ROOT / stage
        results[trunk] = weights(folder)
        rows = read_lines(folder / "metrics.jsonl", MetricsLine)
        logged[trunk] = [row.values for row in rows if "loss" in row.values]
        assert bool(calls) == (trunk == "lean")
    assert calls.keys() >= ({"default", "ref"} if stage == "dpo" else {"default"})
    assert calls["default"] == STEPS * accumulated
    assert len(logged["lean"]) == len(logged["library"]) == STEPS
    for values, expected in zip(logged["lean"], logged["library"], strict=True):
        assert values == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert stage == "rm" or logged["lean"][0].keys() >= {"entropy", "mean_token_accuracy"}
    moved = apart = 0.0
    start = weights(tmp_path / "lean" / ROOT / PARENTS[stage][1]) if stage != "sft" else {}
    for name, library in results["library"].items():
        before = start.get(name, torch.zeros_like(library) if "lora_B" in name else library)
        moved += float((library - before).square().sum())
        apart += float((results["lean"][name] - library).square().sum())
    assert 0 < apart**0.5 < 1e-3 * moved**0.5


@pytest.mark.parametrize("trunk", ["library", "lean"])
def test_what_sft_logs_of_a_step_is_a_mean_over_its_tokens_however_it_is_divided(trained, tmp_path, trunk):
    logged = {}
    for rows in (4, 3, 1):  # 12 rows in a step
        out = tmp_path / str(rows)
        beside(trained, out, "pretrain")
        changes: dict[str, Any] = {"max_steps": 4, "save_steps": 4, "logging_steps": 2, "eval_steps": None}
        changes |= {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 12 // rows}
        run_stages(small(**{f"sft__{key}": value for key, value in changes.items()}, hardware__trunk=trunk), out, "sft")
        lines = read_lines(out / ROOT / "sft/metrics.jsonl", MetricsLine)
        logged[rows] = [row.values for row in lines if "loss" in row.values]
    assert logged[4][0].keys() >= {"loss", "entropy", "mean_token_accuracy"}
    for rows in (3, 1):
        for values, expected in zip(logged[rows], logged[4], strict=True):
            assert values == pytest.approx(expected, rel=1e-4)


class Asked(NamedTuple):
    trunk: LeanTrunk
    ids: torch.Tensor
    labels: torch.Tensor


@pytest.fixture(scope="module")
def asked(trained) -> Asked:
    """Rows of different lengths, in which rows n and n + 2 have the same prompt."""
    loaded = small(hardware__trunk="lean")
    run = StageRun(trained, loaded, "dpo")
    model = attach_adapter(load_base(run.base, torch.device("cpu")), run.folder("sft") / "adapter", trainable=True)
    draw = torch.Generator().manual_seed(0)
    prompts, responses = (5, 8, 5, 8), (4, 1, 6, 3)
    ids = torch.randint(5, 60, (4, 16), generator=draw)
    ids[2:, :5], ids[3, :8] = ids[:2, :5], ids[1, :8]
    labels = torch.full_like(ids, IGNORED)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        labels[row, prompt : prompt + response] = ids[row, prompt : prompt + response]
        ids[row, prompt + response :] = 0
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    return Asked(LeanTrunk(base), ids, labels)


@pytest.mark.parametrize("pairs", [False, True])
def test_statistics_of_labels_are_those_of_the_logits(asked, pairs):
    trunk, ids, labels = asked
    found = LabelStatistics(trunk, pairs)(input_ids=ids, labels=labels, fused_lm_head=True)
    logits = trunk.base(input_ids=ids, use_cache=False).logits[:, :-1]
    scored = labels[:, 1:] != IGNORED
    expected = logits.log_softmax(-1)
    expected_logp = expected.gather(-1, ids[:, 1:, None]).squeeze(-1)
    values = {
        "log_probs": expected_logp,
        "entropy": -(expected.exp() * expected).sum(-1),
        "mean_logits": logits.mean(-1),
        "is_top1": logits.argmax(-1) == ids[:, 1:],
    }
    assert found.label_mask is not None and torch.equal(found.label_mask, scored)
    for name, value in values.items():
        torch.testing.assert_close(found[name], value.masked_fill(~scored, 0), atol=2e-6, rtol=1e-5)


def test_rows_without_labels_give_a_gradient_of_zero(asked):
    trunk, ids, _ = asked
    found = LabelStatistics(trunk, pairs=False)(input_ids=ids, labels=torch.full_like(ids, IGNORED), fused_lm_head=True)
    assert found.log_probs is not None and not found.log_probs.any() and found.log_probs.shape == (4, 15)
    found.log_probs.sum().backward()


def test_metrics_are_not_rounded_under_autocast(asked):
    trunk, ids, labels = asked
    exact = LabelStatistics(trunk, pairs=False)(input_ids=ids, labels=labels, fused_lm_head=True).mean_logits
    with torch.autocast("cpu", torch.bfloat16):
        found = LabelStatistics(trunk, pairs=False)(input_ids=ids, labels=labels, fused_lm_head=True).mean_logits
    torch.testing.assert_close(found, exact, atol=1e-6, rtol=1e-5)


def test_pairs_with_other_prompts_and_calls_for_logits_are_refused(asked):
    trunk, ids, labels = asked
    forward, shorter = LabelStatistics(trunk, pairs=False), labels.clone()
    shorter[0, 5] = IGNORED
    with pytest.raises(ValueError, match="the prompts of a pair differ in length"):
        LabelStatistics(trunk, pairs=True)(input_ids=ids, labels=shorter, fused_lm_head=True)
    with pytest.raises(ValueError, match="no logits"):
        forward(input_ids=ids)


def test_a_model_that_it_does_not_support_is_refused(trained, tmp_path, monkeypatch):
    beside(trained, tmp_path, "pretrain")
    monkeypatch.setattr("rlhf.models.lean.trunk.LEAN_TYPES", ("qwen2",))
    with pytest.raises(UserError, match=r"hardware\.trunk: lean.*llama"):
        run_stages(small(hardware__trunk="lean"), tmp_path, "sft")


def test_evaluation_gives_the_same_figures(trained, tmp_path, calls):
    figures = {}
    for trunk in ("library", "lean"):
        beside(trained, tmp_path / trunk, "pretrain", "sft", "rm", "ppo", "dpo")
        figures[trunk] = run_stages(small(hardware__trunk=trunk), tmp_path / trunk, "evaluate")["metrics"]
        assert bool(calls["decoding"]) == bool(calls["reference"]) == (trunk == "lean")
    assert figures["lean"].keys() == figures["library"].keys() and len(figures["lean"]) > 20
    for name, value in figures["library"].items():
        assert figures["lean"][name] == pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True), name
