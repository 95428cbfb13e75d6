"""The points of docs/guides.md that are marked [R], run again, each in a function named after its number."""

import inspect
import json
import os
import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaTokenizer,
)
from transformers.convert_slow_tokenizer import generate_merges, import_protobuf

TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
ROWS = {"instruction": ["a", "b"], "input": ["c", "d"], "output": ["e", "f"]}
llama_2 = pytest.mark.skipif("RLHF_REAL_DATA" not in os.environ, reason="needs Llama-2's tokenizer (RLHF_REAL_DATA)")


def tiny(**changes: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY, **changes))


@cache
def llama_2_tokenizer() -> Any:
    """Llama-2's tokenizer from its file of pieces; its configuration on the hub adds BOS and no EOS."""
    pieces = import_protobuf().ModelProto()
    pieces.ParseFromString(Path(os.environ["RLHF_REAL_DATA"], "llama2-tokenizer.model").read_bytes())
    vocabulary = {row.piece: number for number, row in enumerate(pieces.pieces)}
    merges = generate_merges(vocabulary, {row.piece: row.score for row in pieces.pieces})
    return LlamaTokenizer(vocab=vocabulary, merges=merges, legacy=False, add_bos_token=True)


def test_1_a_batch_is_a_dict_of_columns():
    with pytest.raises(TypeError, match="string indices must be integers"):
        [f"{ex['instruction']}\n{ex['input']}" for ex in ROWS]  # type: ignore[index]


def test_2_without_a_split_the_columns_are_a_dict(tmp_path):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"instruction": "a"}) + "\n")
    every = datasets.load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"Column to remove \['train'\] not in the dataset"):
        every.map(lambda row: row, batched=True, remove_columns=every.column_names)


@llama_2
def test_3_llama_2_s_tokenizer_cannot_pad():
    with pytest.raises(ValueError, match="Asking to pad"):
        llama_2_tokenizer()(["one text", "two"], padding="max_length", max_length=8)


def test_4_trl_has_no_ppo_trainer():
    with pytest.raises(ImportError, match=r"PPOTrainer|PPOConfig"):
        from trl import PPOConfig, PPOTrainer  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize("key", ["max_prompt_length", "max_completion_length"])
def test_7_dpo_s_keys_have_gone(key, tmp_path):
    from trl import DPOConfig, DPOTrainer

    config: Any = DPOConfig
    with pytest.raises(TypeError, match=key):
        config(output_dir=str(tmp_path), **{key: 256})
    names = inspect.signature(DPOTrainer.__init__).parameters
    assert "tokenizer" not in names and "processing_class" in names
    assert "max_length" in inspect.signature(DPOConfig.__init__).parameters


def test_9_the_loop_trains_no_weight():
    model = nn.Linear(4, 1)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(3):
        pair = []
        for text in torch.randn(2, 5, 4):
            with torch.no_grad():
                scores = [torch.sigmoid(model(x)).item() for x in text]
            pair.append(torch.tensor(scores, requires_grad=True))
        loss = nn.MarginRankingLoss(margin=0.5)(*pair, torch.ones(5))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert 0.2 < loss.item() < 0.8, "near the margin"
    assert all(p.grad is None and torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(("gradient", "finite"), [(1e-4, False), (1e-3, False), (1e-1, True)])
def test_10_adamw_in_float16_divides_by_zero(gradient, finite):
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
    weight.grad = torch.full_like(weight, gradient)
    torch.optim.AdamW([weight], lr=1e-4, foreach=False).step()
    assert bool(torch.isfinite(weight).all()) is finite
    assert finite or bool((weight == -torch.inf).all())


def test_12_with_eos_as_padding_the_head_reads_the_token_before_eos():
    eos = 2
    torch.manual_seed(0)
    settings: Any = TINY | {"num_labels": 1, "pad_token_id": eos, "eos_token_id": eos}
    model = LlamaForSequenceClassification(LlamaConfig(**settings)).eval()
    ids = torch.tensor([[5, 6, 7, eos]])
    with torch.no_grad():
        hidden = model.score(model.model(ids).last_hidden_state)[0, :, 0]
        assert model(ids).logits.item() == pytest.approx(hidden[2].item())
        assert hidden[2].item() != pytest.approx(hidden[3].item())


@llama_2
def test_13_llama_2_s_tokenizer_adds_bos_alone():
    tokenizer = llama_2_tokenizer()
    ids = tokenizer("some text\nin lines").input_ids
    assert ids[0] == tokenizer.bos_token_id and tokenizer.eos_token_id not in ids


def test_14_each_step_gets_the_first_batch_or_a_random_one():
    data: Any = range(16)
    in_order: Any = torch.utils.data.DataLoader(data, batch_size=4)
    assert {tuple(next(iter(in_order)).tolist()) for _ in range(5)} == {(0, 1, 2, 3)}
    torch.manual_seed(0)
    shuffled: Any = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    counts = Counter(x for _ in range(4) for x in next(iter(shuffled)).tolist())
    assert len(counts) < 16 and max(counts.values()) > 1


@llama_2
@pytest.mark.parametrize(("prompt", "lost"), [("One space", 0), ("  Two spaces", 1), ("A mark </s> here", 4)])
def test_20_a_response_cut_by_characters_loses_some(prompt, lost):
    tokenizer, answer = llama_2_tokenizer(), " It is an answer."
    ids = tokenizer(prompt).input_ids + tokenizer(answer, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True)[len(prompt) :] == answer[lost:]


def test_21_the_kernel_stays_and_the_saved_name_does_not_load(tmp_path):
    model = tiny()
    before = model.config._attn_implementation
    model.config.attn_implementation = "flash_attention_2"
    assert model.config._attn_implementation == before
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attn_implementation"] == "flash_attention_2"
    with pytest.raises(ImportError, match="FlashAttention2"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_22_checkpointing_computes_again():
    model, calls = tiny().train(), []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    ids = torch.tensor([[5, 6, 7]])
    with pytest.warns(FutureWarning, match="gradient_checkpointing_enable. is deprecated"):
        model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    assert len(calls) == 2, "once forward, and once more in the backward pass"


def test_23_the_argument_is_dtype_and_the_checkpoint_s_type_is_kept(tmp_path):
    tiny().to(torch.float16).save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.float16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert AutoModelForCausalLM.from_pretrained(tmp_path, torch_dtype=torch.float32).dtype == torch.float32


def test_45_a_margin_of_a_half_is_never_reached_within_0_3_and_0_7():
    loss = nn.MarginRankingLoss(margin=0.5)(torch.tensor([0.7]), torch.tensor([0.3]), torch.ones(1))
    assert loss.item() == pytest.approx(0.1)
    raw = torch.logit(torch.tensor(0.75)) - torch.logit(torch.tensor(0.25))
    assert raw.item() == pytest.approx(2.2, abs=0.01)


def test_63_the_first_kl_is_zero():
    from peft import LoraConfig, get_peft_model

    policy = get_peft_model(tiny(), LoraConfig(target_modules=["q_proj", "v_proj"]))
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        logits = policy(ids).logits
        with policy.disable_adapter():
            assert torch.equal(policy(ids).logits, logits)
