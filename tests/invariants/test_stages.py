"""What each stage really optimises, where it starts, and which side of the split it looks at.

Stages run as they are. Only `Trainer.train` is replaced, where a test wants the trainer that a stage has built and not
its result.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, LlamaModel, Trainer

from rlhf.data import tokenize
from rlhf.data.batch import Rollout
from rlhf.data.pairs import encode_pairs
from rlhf.data.rows import Example, Message, PreferencePair
from rlhf.data.split import is_heldout
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.errors import UserError
from rlhf.evaluation import policies as evaluation
from rlhf.models.loading import load_base, load_tokenizer
from rlhf.models.shared_base import SharedBase
from rlhf.process import distributed
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.schema import Dpo
from rlhf.rollout.engine import sample
from rlhf.run.directory import StageRun
from rlhf.stages import kto
from rlhf.stages.online import scores, session
from rlhf.stages.online.train_state import TrainState
from rlhf.stages.supervised.policy import log_ratios
from tests.helpers import beside, content_of, grouped, noted, run_stages, small, toy_pairs, undefined_metrics
from tests.lines import read_intact_lines

ROOT = Path("cpu-tiny/v1")
ASSISTANT = "\n\nAssistant:"


class Built(Exception):
    """Ends a stage at the moment when it would begin to train."""


def built(stage: str, loaded: PinnedRecipe, out: Path) -> Any:
    """The trainer as a stage has made it, not yet run; Any, as each stage has a kind of its own."""
    trainers: list[Any] = []

    def stop(trainer: Trainer, *_: Any, **__: Any) -> None:
        trainers.append(trainer)
        raise Built

    with pytest.MonkeyPatch.context() as patch, suppress(Built):
        patch.setattr(Trainer, "train", stop)
        run_stages(loaded, out, stage)
    (trainer,) = trainers
    trainer.model.eval()  # no dropout in the comparisons
    return trainer


def first_batch(trainer: Trainer) -> dict[str, Any]:
    torch.manual_seed(0)
    return next(iter(trainer.get_train_dataloader()))


def plain_sft(root: Path) -> PeftModel:
    """The SFT policy without any code of ours."""
    base = AutoModelForCausalLM.from_pretrained(root / ROOT / "pretrain/model")
    return PeftModel.from_pretrained(base, root / ROOT / "sft/adapter").eval()


def adapter(root: Path, stage: str) -> dict[str, Tensor]:
    return load_file(root / ROOT / stage / "adapter/adapter_model.safetensors")


def last_answer(ids: list[int], tokenizer: DialogueTokenizer) -> int:
    """Where the response starts: behind the last "Assistant:", which is one token."""
    turn = tokenizer.hf.convert_tokens_to_ids(ASSISTANT)
    assert isinstance(turn, int)
    return len(ids) - ids[::-1].index(turn)


@pytest.fixture(scope="module")
def tokenizer(trained) -> DialogueTokenizer:
    return load_tokenizer(StageRun(trained, small(), "ppo").base)


# -- SFT ---------------------------------------------------------------------------------------------------------------


def test_sft_learns_the_response_with_its_eos_and_nothing_of_the_prompt(trained, tokenizer, tmp_path):
    trainer = built("sft", small(), beside(trained, tmp_path, "pretrain"))
    batch = first_batch(trainer)
    rows = [row[row != tokenizer.pad_id].tolist() for row in batch["input_ids"]]
    assert len({len(ids) for ids in rows}) > 1
    starts = [last_answer(ids, tokenizer) for ids in rows]
    for ids, start, labels in zip(rows, starts, batch["labels"].tolist(), strict=True):
        assert 3 < start < len(ids)
        assert ids[-1] == tokenizer.eos_id
        assert labels[:start] == [-100] * start
        assert labels[start : len(ids)] == ids[start:]
        assert set(labels[len(ids) :]) <= {-100}

    losses = []
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, batch).item()
        for ids, start in zip(rows, starts, strict=True):
            logp = trainer.model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
            losses += [-logp[t - 1, ids[t]].item() for t in range(start, len(ids))]
    assert loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)


# -- padding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo"])
def test_without_the_mask_of_right_padding_losses_and_gradients_are_the_same(trained, tmp_path, stage):
    """On a GPU the decoder gets no mask for it. Eager attention gives the same bits, a fused kernel nearly."""
    parents = ("pretrain",) if stage == "sft" else ("pretrain", "sft")
    trainer = built(stage, small(), beside(trained, tmp_path, *parents))
    decoder = trainer.model.get_decoder()
    masks: list[Any] = []
    forward = decoder.forward
    decoder.forward = lambda *ids, **given: noted(masks, given["attention_mask"], forward(*ids, **given))

    def outcome() -> list[Tensor]:
        batch = first_batch(trainer)
        assert batch["attention_mask"].min() == 0  # some row is shorter
        assert (batch["attention_mask"].diff() <= 0).all()  # on the right: before a token it could not be hidden
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        computed = [loss.detach(), *(p.grad for p in trainer.model.parameters() if p.grad is not None)]
        trainer.model.zero_grad()
        return computed

    for attention in ("eager", "sdpa"):
        trainer.model.get_base_model().set_attn_implementation(attention)
        trainer.hides_padding = False
        masked = outcome()
        assert all(mask is not None for mask in masks)
        masks.clear()
        trainer.hides_padding = True
        hidden = outcome()
        decoder(input_ids=torch.ones(1, 2, dtype=torch.long), attention_mask=torch.tensor([[0, 1]]))
        assert masks.pop() is not None  # a pass outside of the loss keeps its mask
        assert masks and len(masked) > 4
        for a, b in zip(masked, hidden, strict=True):
            assert torch.equal(a, b) if attention == "eager" else torch.allclose(a, b, rtol=1e-4, atol=1e-7)
        assert all(mask is None for mask in masks)
        masks.clear()


# -- reward model ------------------------------------------------------------------------------------------------------


def test_the_reward_model_starts_as_sft_under_a_trainable_head(trained, tmp_path):
    trainer = built("rm", small(), beside(trained, tmp_path, "pretrain", "sft"))
    ids = torch.randint(10, 300, (2, 12), generator=torch.Generator().manual_seed(0))
    sft: Any = plain_sft(trained)
    with torch.no_grad():
        fresh = trainer.model.base_model.model.model(input_ids=ids).last_hidden_state
        theirs = sft.base_model.model.model(input_ids=ids).last_hidden_state
        with sft.disable_adapter():
            bare = sft.base_model.model.model(input_ids=ids).last_hidden_state
    assert (fresh - theirs).abs().max() < 1e-5
    assert (bare - theirs).abs().max() > 1e-2

    trainable = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    heads = [p for name, p in trainable.items() if ".score." in name]
    assert [tuple(p.shape) for p in heads] == [(1, fresh.shape[-1])]
    assert all("lora_" in name or ".score." in name for name in trainable)
    assert sum("lora_" in name for name in trainable) == len(adapter(trained, "sft"))
    optimised = {id(p) for group in trainer.create_optimizer().param_groups for p in group["params"]}
    assert optimised == {id(p) for p in trainable.values()}

    saved = adapter(trained, "rm")
    assert not torch.equal(saved["base_model.model.score.weight"], heads[0])
    for name, weight in adapter(trained, "sft").items():
        assert not torch.equal(saved[name], weight), name


def scored(trainer: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Scores of the chosen and the rejected half of a batch, a row at a time and without padding."""
    rows = [row[: int(m.sum())] for row, m in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    model = trainer.model.base_model.model
    with torch.no_grad():
        scores = [model.score(model.model(input_ids=row[None]).last_hidden_state[0, -1]) for row in rows]
    chosen, rejected = torch.cat(scores).double().chunk(2)
    return chosen, rejected


@pytest.mark.parametrize("center", [0.0, 0.5])
@pytest.mark.parametrize("margin", [0.0, 0.7])
def test_bradley_terry_with_its_margin_and_centring(trained, tmp_path, margin, center):
    loaded = small(rm__margin=margin, rm__center_rewards_coefficient=center)
    trainer = built("rm", loaded, beside(trained, tmp_path, "pretrain", "sft"))
    with torch.no_grad():  # the fresh head's scores are small: centring would hardly show
        trainer.model.base_model.model.score.modules_to_save["default"].weight *= 20
    batch = first_batch(trainer)
    chosen, rejected = scored(trainer, batch)
    expected = -logsigmoid(chosen - rejected - margin).mean() + center * ((chosen + rejected) ** 2).mean()
    assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(expected.item(), rel=1e-4)


def test_the_margin_ranking_loss_is_the_hinge_and_trains(trained, tmp_path, monkeypatch):
    """Two real steps; then a batch with pairs on both sides of the hinge."""
    trainers: list[Any] = []
    train = Trainer.train

    def recorded(trainer: Trainer, *args: Any, **options: Any) -> Any:
        trainers.append(trainer)
        return train(trainer, *args, **options)

    monkeypatch.setattr(Trainer, "train", recorded)
    margin = 0.3
    loaded = small(rm__loss_type="margin_ranking", rm__margin=margin, rm__max_steps=2)
    summary = run_stages(loaded, beside(trained, tmp_path, "pretrain", "sft"), "rm")
    assert undefined_metrics(summary) == set()
    start, moved = adapter(trained, "sft"), adapter(tmp_path, "rm")
    assert not any(torch.equal(moved[name], weight) for name, weight in start.items())

    (trainer,) = trainers
    trainer.model.eval()
    batch = first_batch(trainer)
    chosen, rejected = scored(trainer, batch)
    with torch.no_grad():  # afterwards the mean difference is the margin
        trainer.model.base_model.model.score.modules_to_save["default"].weight *= margin / (chosen - rejected).mean()
    chosen, rejected = scored(trainer, batch)
    hinge = [max(0.0, margin - d) for d in (chosen - rejected).tolist()]
    assert 0 < sum(h == 0 for h in hinge) < len(hinge)
    loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    assert loss.item() == pytest.approx(sum(hinge) / len(hinge), rel=1e-4)
    assert outputs.logits.squeeze(-1).tolist() == pytest.approx(torch.cat([chosen, rejected]).tolist(), abs=1e-4)
    assert trainer.compute_loss(trainer.model, batch).item() == loss.item()


# -- DPO ---------------------------------------------------------------------------------------------------------------


def test_the_reference_of_dpo_is_sft_and_its_policy_starts_there(trained, tokenizer, tmp_path):
    trainer = built("dpo", small(), beside(trained, tmp_path, "pretrain", "sft"))
    batch = first_batch(trainer)
    reference = torch.cat(trainer.compute_ref_log_probs(trainer.model, batch))
    sft = plain_sft(trained)

    def summed() -> Tensor:
        sums = []
        for padded, real in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            ids = padded[: int(real.sum())].tolist()
            with torch.no_grad():
                logp = sft(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
            sums.append(sum(logp[t - 1, ids[t]] for t in range(last_answer(ids, tokenizer), len(ids))))
        return torch.stack(sums)

    expected = summed()
    with sft.disable_adapter():
        bare = summed()
    assert reference.tolist() == pytest.approx(expected.tolist(), abs=1e-3)
    assert (bare - expected).abs().mean() > 0.01
    # At the start policy and reference are one, so that every logit of the preference is 0.
    assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(torch.tensor(2.0).log().item(), abs=1e-5)
    assert {name for name, p in trainer.model.named_parameters() if p.requires_grad} == {
        name for name, _ in trainer.model.named_parameters() if ".default." in name and "lora_" in name
    }


@pytest.mark.parametrize("stage", ["rm", "dpo"])
def test_of_a_pair_the_chosen_answer_is_the_one_that_is_learned(trained, tokenizer, tmp_path, stage):
    rows = built(stage, small(), beside(trained, tmp_path, "pretrain", "sft"))
    sides = [(row["chosen"], row["rejected"]) for row in read_intact_lines(toy_pairs(trained))]
    found = [
        tuple(
            tokenizer.hf.decode([*row.get("prompt_ids", []), *row[f"{side}_ids"]], skip_special_tokens=True)
            for side in ("chosen", "rejected")
        )
        for row in rows.train_dataset
    ]
    assert len({*found} & {*sides}) > len(found) / 2 > 20
    assert not {*found} & {side[::-1] for side in sides}


def test_an_answer_s_log_ratio_is_that_to_the_reference(trained, tokenizer):
    """As long as the policy has learned nothing, it is 0."""
    base = load_base(StageRun(trained, small(), "dpo").base, torch.device("cpu"))
    sft_adapter = trained / ROOT / "sft/adapter"
    rows = [tokenize.Encoded([5, 6, 7], [8, 9, tokenizer.eos_id]), tokenize.Encoded([5, 6], [30, 31, 32, 33])]
    shared = SharedBase(base, {"policy": sft_adapter, "reference": sft_adapter})
    assert log_ratios(shared, tokenizer, rows, 1).tolist() == pytest.approx([0, 0], abs=1e-5)


def moved(trainer: Any) -> Any:
    """The trainer with what it trains away from its start, where policy and reference are one."""
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    return trainer


def answer_logprobs(model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Sums of log-probabilities (B,) of the responses of a batch and their tokens, a row at a time without padding."""
    sums, lengths = [], batch["completion_mask"].sum(1)
    for padded, real, n in zip(batch["input_ids"], batch["attention_mask"], lengths.tolist(), strict=True):
        ids = padded[: int(real.sum())].tolist()
        with torch.no_grad():
            logp = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        sums.append(sum(logp[t - 1, ids[t]] for t in range(len(ids) - n, len(ids))))
    return torch.stack(sums), lengths


def smoothed(gap: Tensor, share: float) -> Tensor:
    return (share * logsigmoid(-gap) - (1 - share) * logsigmoid(gap)) / (1 - 2 * share)


# By log-ratios to the reference, summed and by token, of chosen and rejected responses, and beta.
DPO_LOSSES: dict[str, Callable[..., Tensor]] = {
    "sigmoid": lambda c, r, mean_c, mean_r, beta: -logsigmoid(beta * (c - r)),
    "smoothed": lambda c, r, mean_c, mean_r, beta: smoothed(beta * (c - r), 0.2),
    "ipo": lambda c, r, mean_c, mean_r, beta: (mean_c - mean_r - 1 / (2 * beta)) ** 2,
    "sigmoid_norm": lambda c, r, mean_c, mean_r, beta: -logsigmoid(beta * (mean_c - mean_r)),
}


@pytest.mark.parametrize("sft_weight", [0.0, 0.3])
@pytest.mark.parametrize("name", DPO_LOSSES)
def test_the_losses_of_dpo(trained, tmp_path, name, sft_weight):
    changes = {"label_smoothing": 0.2} if name == "smoothed" else {"loss_type": name}
    loaded = small(dpo__sft_weight=sft_weight, **{f"dpo__{key}": value for key, value in changes.items()})
    trainer = built("dpo", loaded, beside(trained, tmp_path, "pretrain", "sft"))
    batch = first_batch(trainer)
    before = torch.cat(trainer.compute_ref_log_probs(trainer.model, batch)).double()
    sums, lengths = answer_logprobs(moved(trainer).model, batch)
    ratios = sums - before
    beta = loaded.recipe.options(Dpo).beta
    expected = DPO_LOSSES[name](*ratios.chunk(2), *(ratios / lengths).chunk(2), beta).mean()
    expected = expected - sft_weight * sums.chunk(2)[0].sum() / lengths.chunk(2)[0].sum()
    assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("stage", ["rm", "dpo"])
def test_a_validation_is_of_all_its_pairs_alike(trained, tmp_path, stage):
    """The loss is the mean over pairs, also where the last batch is not full."""
    changes = {"eval_steps": 2, "max_eval_samples": 11, "margin" if stage == "rm" else "beta": 0.4}
    loaded = small(**{f"{stage}__{key}": value for key, value in changes.items()})
    trainer = moved(built(stage, loaded, beside(trained, tmp_path, "pretrain", "sft")))
    batches = list(trainer.get_eval_dataloader())
    assert [len(batch["input_ids"]) for batch in batches] == [16, 6]
    gaps: list[Tensor] = []
    for batch in batches:
        if stage == "rm":
            chosen, rejected = scored(trainer, batch)
            gaps.append(chosen - rejected - 0.4)
        else:
            before = torch.cat(trainer.compute_ref_log_probs(trainer.model, batch)).double()
            chosen, rejected = (answer_logprobs(trainer.model, batch)[0] - before).chunk(2)
            gaps.append(0.4 * (chosen - rejected))
    trainer.model.train()
    state = torch.get_rng_state()
    found = trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(-logsigmoid(torch.cat(gaps)).mean().item(), rel=1e-4)
    assert trainer.model.training and torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("accumulated", [1, 2])
def test_several_processes_validate_in_the_batches_of_one(trained, tmp_path, monkeypatch, accumulated):
    """Whether they share the rows of a micro-batch, or the micro-batches of a step."""
    loaded = small(dpo__eval_steps=2, dpo__max_eval_samples=11, dpo__gradient_accumulation_steps=accumulated)
    share = Dpo.per_device
    monkeypatch.setattr(Dpo, "per_device", lambda options, _: share(options, 2))
    trainer = built("dpo", loaded, beside(trained, tmp_path, "pretrain", "sft"))
    sizes: list[int] = []

    def step(_: Any, batch: dict[str, Tensor], *__: Any) -> tuple[Tensor]:
        sizes.append(len(batch["input_ids"]))
        return (torch.ones(()),)

    monkeypatch.setattr(trainer, "prediction_step", step)
    monkeypatch.setattr(distributed, "world", lambda: 2)
    monkeypatch.setattr(distributed, "all_sum", lambda *_: None)  # there is no second process
    trainer.evaluation_loop(None)
    assert sizes == [16, 6]


def test_label_smoothing_is_for_the_sigmoid_loss():
    with pytest.raises(UserError, match="label_smoothing needs loss_type: sigmoid, not ipo"):
        small(dpo__label_smoothing=0.1, dpo__loss_type="ipo")


def test_dpo_leaves_another_policy_than_sft(trained, tmp_path):
    loaded = small(dpo__max_steps=2, evaluate__max_samples=2)
    run_stages(loaded, beside(trained, tmp_path, "pretrain", "sft"), "dpo")
    start, moved = adapter(trained, "sft"), adapter(tmp_path, "dpo")
    assert start.keys() == moved.keys()
    assert not any(torch.equal(moved[name], weight) for name, weight in start.items())


# -- truncation --------------------------------------------------------------------------------------------------------


def pair(prompt: str, chosen: str, rejected: str) -> PreferencePair:
    return PreferencePair((Message("user", prompt),), chosen, rejected, "here:1")


def test_cut_pairs_are_counted_and_a_pair_without_a_response_is_dropped(tokenizer):
    words = "one two three four five six seven eight nine ten eleven twelve"
    pairs = [pair("Hello", "Yes.", words), pair("Hello " + words, "Yes.", words), pair("Hi", "No.", "Yes.")]
    lengths = [len(tokenizer.encode([(p.prompt, "x")], 999, 999)[0][0].prompt) for p in pairs]
    assert lengths[1] > lengths[0] + 8

    def encoded(prompt: int, whole: int) -> tuple[Any, dict[str, int]]:
        options: Any = SimpleNamespace(max_prompt_length=prompt, max_length=whole)
        return encode_pairs(tokenizer, pairs, options)[:2]

    kept, counts = encoded(999, 999)
    assert len(kept) == 3
    assert not any(counts.values())
    assert all(side.response[-1] == tokenizer.eos_id for both in kept for side in both)

    limit = lengths[1] - 2  # the second pair's prompt fills the whole room
    kept, counts = encoded(limit, limit)
    assert len(kept) == 2
    room: Any = SimpleNamespace(max_prompt_length=limit, max_length=limit)
    assert encode_pairs(tokenizer, pairs, room)[2] == pairs[::2]
    assert counts["pairs_dropped"] == 1
    assert counts["prompts_cut"] == 1

    limit = lengths[0] + 4  # the long answers lose their end, and EOS with it
    kept, counts = encoded(lengths[0], limit)
    assert len(kept) == 3
    assert not counts["pairs_dropped"]
    assert counts["responses_cut"] >= 2
    for (chosen, rejected), original in zip(kept, pairs, strict=True):
        assert chosen.prompt == rejected.prompt
        for side in (chosen, rejected):
            assert 1 <= len(side.response) <= limit - len(side.prompt)
        whole = tokenizer.encode([(original.prompt, original.rejected)], 999, 999)[0][0]
        assert rejected.response == whole.response[: len(rejected.response)]
        assert rejected.prompt[0] == whole.prompt[0]
        assert rejected.prompt[1:] == whole.prompt[len(whole.prompt) - len(rejected.prompt) + 1 :]
    assert kept[1][1].response[-1] != tokenizer.eos_id


SAME = "one two three four five six seven eight"


@pytest.mark.parametrize("kind", ["rm", "dpo", "kto"])
def test_what_is_equal_after_cutting_is_left_out_and_counted(tokenizer, kind):
    """Both sides would be the same tokens: gradients of rounding noise, from which AdamW makes whole steps."""
    pairs = [pair("Hello", f"{SAME} nine.", f"{SAME} ten."), pair("Hello", "Yes.", "No.")]
    start = len(tokenizer.encode([(pairs[0].prompt, "x")], 999, 999)[0][0].prompt)
    room: Any = SimpleNamespace(max_prompt_length=start, max_length=start + 6)

    def encoded(rows: list[PreferencePair]) -> tuple[Any, dict[str, int]]:
        if kind != "kto":
            return encode_pairs(tokenizer, rows, room)[:2]
        sides = [(row, text, good) for row in rows for text, good in ((row.chosen, True), (row.rejected, False))]
        return kto._encode(
            tokenizer, [Example(row.prompt, text, "here:1", good=good) for row, text, good in sides], room
        )

    kept, counts = encoded(pairs)
    assert len(kept) == (2 if kind == "kto" else 1)
    assert counts["answers_equal" if kind == "kto" else "pairs_equal"] == (2 if kind == "kto" else 1)
    with pytest.raises(UserError, match=r"max_length.*equal"):
        encoded(pairs[:1])


def test_an_answer_that_people_judged_both_ways_is_kept(tokenizer):
    rows = [Example((Message("user", "Hello"),), "Yes.", "here:1", good=good) for good in (True, False, True)]
    room: Any = SimpleNamespace(max_prompt_length=99, max_length=99)
    assert len(kto._encode(tokenizer, rows, room)[0]) == 3


@pytest.mark.parametrize("stage", ["rm", "dpo"])
def test_a_stage_trains_on_rows_within_its_limits_and_records_the_cuts(trained, tokenizer, tmp_path, stage):
    loaded = small(**{f"{stage}__max_length": 30, f"{stage}__max_prompt_length": 24})
    trainer = built(stage, loaded, beside(trained, tmp_path, "pretrain", "sft"))
    names = ("chosen_ids", "rejected_ids")
    rows = list(trainer.train_dataset)
    lengths = [len(row.get("prompt_ids", [])) + len(row[name]) for row in rows for name in names]
    assert len(rows) == 64
    assert max(lengths) == 30
    cuts = content_of(tmp_path / ROOT / stage / "manifest.json")["cuts"]["train"]
    assert cuts["responses_cut"] == sum(row[name][-1] != tokenizer.eos_id for row in rows for name in names) > 0
    assert cuts["prompts_cut"] > 0
    assert cuts["pairs_dropped"] == 0


def test_dpo_cuts_completions_to_their_own_limit(trained, tmp_path):
    loaded = small(dpo__max_completion_length=6)
    trainer = built("dpo", loaded, beside(trained, tmp_path, "pretrain", "sft"))
    responses = [row[name] for row in trainer.train_dataset for name in ("chosen_ids", "rejected_ids")]
    assert max(len(ids) for ids in responses) == 6
    cuts = content_of(tmp_path / ROOT / "dpo" / "manifest.json")["cuts"]["train"]
    eos = trainer.processing_class.eos_token_id
    assert cuts["responses_cut"] == sum(ids[-1] != eos for ids in responses) + 2 * cuts["pairs_equal"] > 0
    assert cuts["prompts_cut"] == 0 < cuts["pairs_equal"]


# -- the optimizer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo"])
def test_adamw_of_trls_stages_is_that_of_the_recipe(trained, tmp_path, stage):
    asked = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-3, "weight_decay": 0.02}
    loaded = small(**{f"{stage}__{key}": value for key, value in asked.items()})
    trainer = built(stage, loaded, beside(trained, tmp_path, "pretrain", *(["sft"] if stage != "sft" else [])))
    trainer.create_optimizer()
    for group in trainer.optimizer.param_groups:
        assert (group["betas"], group["eps"]) == ((0.8, 0.9), 1e-3)
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups if group["params"]} == {0.02}


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo"])
def test_rates_and_clipping_of_trls_stages_are_those_of_the_recipe(trained, tmp_path, stage):
    asked = {"learning_rate": 0.5, "lr_scheduler_type": "linear", "warmup_ratio": 0.5, "max_grad_norm": 0.25}
    loaded = small(**{f"{stage}__{key}": value for key, value in asked.items()})
    trainer = built(stage, loaded, beside(trained, tmp_path, "pretrain", *(["sft"] if stage != "sft" else [])))
    trainer.create_optimizer_and_scheduler(8)
    rates = []
    for _ in range(8):
        rates += trainer.lr_scheduler.get_last_lr()[:1]
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert rates == pytest.approx([0, 0.125, 0.25, 0.375, 0.5, 0.375, 0.25, 0.125])
    assert trainer.args.max_grad_norm == 0.25


def test_gaps_of_the_reward_model_are_in_percentage_points(trained):
    metrics = content_of(trained / ROOT / "rm/summary.json")["metrics"]
    best = metrics["best_possible_accuracy"]
    assert metrics["accuracy_gap_points"] == pytest.approx(100 * (best - metrics["accuracy"]))
    assert 0 < abs(metrics["accuracy_gap_points"]) < 100


@pytest.mark.parametrize("stage", ["ppo", "rloo", "grpo"])
def test_each_step_of_an_online_stage_is_taken_at_the_rate_that_it_logs(trained, tmp_path, monkeypatch, stage):
    """It falls in a line to 0, one step after the last; without warm-up the first step is one below the full rate."""
    keys = {"steps": 3, "learning_rate": 0.004, "lr_scheduler_type": "linear", "warmup_steps": 0}
    keys |= {"save_steps": 3, "eval_steps": 3}
    loaded = (
        grouped(stage, keys)
        if stage in ("rloo", "grpo")
        else small(**{f"ppo__{key}": value for key, value in keys.items()})
    )
    out = beside(trained, tmp_path, "pretrain", "sft", "rm")
    taken: list[float] = []
    step_optimizer = TrainState.step_optimizer

    def noting_rate(state: TrainState[Any]) -> dict[str, float]:
        taken.append(state.optimizer.param_groups[0]["lr"])
        return step_optimizer(state)

    monkeypatch.setattr(TrainState, "step_optimizer", noting_rate)
    run_stages(loaded, out, stage)
    logged = [row["lr"] for row in read_intact_lines(out / ROOT / stage / "metrics.jsonl")]
    assert logged == pytest.approx([0.003, 0.002, 0.001])
    assert sorted(set(taken), reverse=True) == pytest.approx(logged)


# -- which side of the split -------------------------------------------------------------------------------------------


class Spied:
    """A chain whose trainers do nothing: what a model still reads there is evaluation. PPO's one step is real."""

    STAGES = ("pretrain", "sft", "rm", "ppo", "dpo", "evaluate")

    def __init__(self, out: Path):
        self.out = out
        self.loaded = small(ppo__steps=1, ppo__missing_eos_penalty=0.0)
        self.tokenizer_texts: list[str] = []
        self.trains: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        self.evaluates: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        self.divergences: list[tuple[float, int]] = []  # of PPO: nats, and over how many tokens
        self.norms: list[scores.ScoreNorm] = []
        with pytest.MonkeyPatch.context() as patch:
            self._listen(patch)
            for stage in self.STAGES:
                self.stage = stage
                run_stages(self.loaded, out, self.stage)
        self.tokenizer = load_tokenizer(StageRun(out, self.loaded, "sft").base)

    def _listen(self, patch: pytest.MonkeyPatch) -> None:
        forward, exact_kl = LlamaModel.forward, evaluation.exact_kl
        measure_score_norm, new_tokenizer = scores.measure_score_norm, tokenize.train

        def train(trainer: Any, *_: Any, **__: Any) -> None:
            for row in trainer.train_dataset:
                sides = [row["input_ids"]] if "input_ids" in row else [row["chosen_ids"], row["rejected_ids"]]
                self.trains[self.stage] |= {(*row.get("prompt_ids", ()), *ids) for ids in sides}

        def read(model: LlamaModel, input_ids: Tensor | None = None, **options: Any) -> Any:
            if self.stage != "ppo" and input_ids is not None and input_ids.shape[1] > 1:
                self.evaluates[self.stage] |= {tuple(row) for row in input_ids.tolist()}
            return forward(model, input_ids=input_ids, **options)

        def sample_into(seen: dict[str, set[tuple[int, ...]]]) -> Callable[..., Rollout]:
            def sampled(model: Any, prompts: Any, *args: Any, **options: Any) -> Rollout:
                seen[self.stage] |= {tuple(ids) for ids in prompts}
                return sample(model, prompts, *args, **options)

            return sampled

        def diverged(*args: Any, **options: Any) -> float:
            total = exact_kl(*args, **options)
            (rollout,) = (value for value in (*args, *options.values()) if isinstance(value, Rollout))
            if self.stage == "ppo":
                self.divergences.append((total, int(rollout.response_length.sum())))
            return total

        def normed(*args: Any, **options: Any) -> scores.ScoreNorm:
            self.norms.append(measure_score_norm(*args, **options))
            return self.norms[-1]

        def tokenizer_of(texts: Any, *args: Any, **options: Any) -> Any:
            self.tokenizer_texts = list(texts)
            return new_tokenizer(self.tokenizer_texts, *args, **options)

        patch.setattr(Trainer, "train", train)
        for module in (session, evaluation):  # it reads a rollout once more
            patch.setattr(module, "check_first", lambda *_: None)
        patch.setattr(LlamaModel, "forward", read)
        patch.setattr(session, "sample", sample_into(self.trains))
        patch.setattr(evaluation, "sample", sample_into(self.evaluates))
        patch.setattr(evaluation, "exact_kl", diverged)
        patch.setattr(session, "measure_score_norm", normed)
        patch.setattr(tokenize, "train", tokenizer_of)

    def sides(self, rows: Iterable[tuple[int, ...]]) -> list[bool]:
        """Whether the split holds out each dialogue; later pieces of a long text, without BOS, say nothing."""
        real = [[i for i in row if i != self.tokenizer.pad_id] for row in rows]
        texts = [self.tokenizer.hf.decode(ids[1:]) for ids in real if ids[0] == self.tokenizer.hf.bos_token_id]
        return [self.side(str(text)) for text in texts]

    def side(self, text: str) -> bool:
        first = re.match(r"\n\nHuman:(.*?)\n\nAssistant:", text, re.DOTALL)
        assert first, text
        recipe = self.loaded.recipe
        return is_heldout(" ".join(first[1].split()), recipe.seed, recipe.data.heldout_fraction)


@pytest.fixture(scope="module")
def spied(tmp_path_factory) -> Spied:
    return Spied(tmp_path_factory.mktemp("spied"))


def test_nothing_is_trained_on_a_heldout_conversation(spied):
    assert set(spied.trains) == {"pretrain", "sft", "rm", "ppo", "dpo"}
    for stage, rows in spied.trains.items():
        sides = spied.sides(rows)
        assert len(sides) >= 8, stage
        assert not any(sides), stage
    assert len(spied.tokenizer_texts) > 100
    assert not any(map(spied.side, spied.tokenizer_texts))


def test_nothing_is_evaluated_on_a_training_conversation(spied):
    assert set(spied.evaluates) == set(Spied.STAGES)
    for stage, rows in spied.evaluates.items():
        sides = spied.sides(rows)
        assert len(sides) >= 8, stage
        assert all(sides), stage


def test_the_reported_divergence_is_per_response_token(spied):
    nats, tokens = map(sum, zip(*spied.divergences, strict=True))
    assert nats > 0
    metrics = content_of(spied.out / ROOT / "ppo/summary.json")["metrics"]
    assert metrics["kl_per_token"] == pytest.approx(nats / tokens, rel=1e-6)


def test_ppo_is_rewarded_with_scores_in_units_of_sft(spied):
    ((mean, sd),) = spied.norms
    assert (mean, sd) != (0.0, 1.0)
    (logged,) = read_intact_lines(spied.out / ROOT / "ppo/metrics.jsonl")
    shaped = (logged["objective/scores"] - mean) / sd
    assert logged["objective/scores_shaped"] == pytest.approx(shaped, abs=1e-5)
    reward = shaped + logged["objective/non_score_reward"]
    assert logged["objective/rlhf_reward"] == pytest.approx(reward, abs=1e-5)
