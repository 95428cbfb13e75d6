"""A reward model of another family, with a tokenizer of its own: its scores, in a run, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from rlhf.errors import UserError
from rlhf.models.classifier import Classifier
from rlhf.recipe import PinnedRecipe
from rlhf.stages.online.model_reward import ModelReward
from rlhf.stages.online.rewards import find
from tests import models as tiny
from tests.helpers import GROUP, beside, content_of, run_stages, small
from tests.lines import read_intact_lines

ROOT = Path("cpu-tiny/v1")
SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
    "num_labels": 1,
}
MESSAGES = [{"role": "user", "content": "Which word?"}]
ANSWERS = ["", "full", "A lemon is a kind of fruit.", "the opposite of full? " * 3, "fruit"]


def encoder_tokenizer(folder: Path) -> None:
    """A tokenizer without a chat template, which marks pairs of texts."""
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz?."])}
    raw = Tokenizer(models.WordPiece(words, unk_token="[UNK]", continuing_subword_prefix=""))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    made = PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=64, **special)
    made.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    made.save_pretrained(folder)


def checkpoint(folder: Path, kind: str) -> Path:
    """A tiny classifier with random weights: an encoder, or a decoder with the padding token that `kind` names."""
    torch.manual_seed(0)
    model: Any
    if kind == "bert":
        encoder_tokenizer(folder)
        model = BertForSequenceClassification(
            BertConfig(vocab_size=32, max_position_embeddings=64, **SHAPE | {"num_labels": 2})
        )
    else:
        tokenizer = tiny.tokenizer(folder)
        tokenizer.chat_template = tiny.TEMPLATE.replace("<|im_end|>\n", "<|im_end|>")  # a text's last token is EOS
        tokenizer.save_pretrained(folder)
        qwen2 = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=1, **SHAPE)
        model = Qwen2ForSequenceClassification(qwen2)
        model.config.pad_token_id = tokenizer.eos_token_id if kind == "qwen2, padded by EOS" else None
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def alone(folder: Path, messages: list[dict[str, str]], answer: str) -> list[float]:
    """What plain transformers gives one answer."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    if tokenizer.chat_template:
        dialogue = [*messages, {"role": "assistant", "content": answer}]
        given = tokenizer.apply_chat_template(dialogue, return_dict=True, return_tensors="pt")
    else:
        given = tokenizer(messages[0]["content"], answer, return_tensors="pt")
    numbers: list[float] = model(**given).logits[0].tolist()
    return numbers


@pytest.mark.parametrize("kind", ["qwen2", "qwen2, padded by EOS", "bert"])
def test_scores_are_those_that_transformers_gives_each_text_alone(tmp_path, kind):
    folder = checkpoint(tmp_path, kind)
    expected = [alone(folder, MESSAGES, answer) for answer in ANSWERS]
    assert len({round(row[0], 3) for row in expected}) > 3
    model = Classifier(str(folder), None, "cpu")
    texts = [model.encode(MESSAGES, answer) for answer in ANSWERS]
    for batch_size in (1, 3, 8):
        for found, row in zip(model.scores(texts, batch_size), expected, strict=True):
            assert found == pytest.approx(row, abs=1e-5)
    chosen = ModelReward(name=str(folder), label=model.labels - 1, mean=0.5, sd=2.0)
    normal = [(row[-1] - 0.5) / 2 for row in expected]
    assert chosen([MESSAGES] * len(ANSWERS), ANSWERS) == pytest.approx(normal, abs=1e-5)


def test_texts_that_are_too_long_keep_their_end(tmp_path):
    folder = checkpoint(tmp_path, "bert")
    reward = ModelReward(name=str(folder), label=0)
    asked = [{"role": "user", "content": "a " * 100 + "z"}]
    (long, short) = reward([asked, MESSAGES], ["b c", "b c"])
    assert long != short
    kept = Classifier(str(folder), None, "cpu").encode(asked, "b c")
    tokens = AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(kept["input_ids"])
    assert len(tokens) == 64 and tokens[0] == "[CLS]" and tokens[-6:] == ["a", "z", "[SEP]", "b", "c", "[SEP]"]


def rewarded(folder: Path, judge: str = "") -> PinnedRecipe:
    """GRPO of a Llama that a Qwen rewards and a judge, a BERT, looks at."""
    judge = judge or f"reward_model(name='{folder / 'bert'}', label=1)"
    rewards = [f"reward_model(name='{folder / 'qwen2'}')", judge]
    group = GROUP | {"normalize_scores": False, "reward_funcs": rewards, "reward_weights": [1.0, 0.0], "steps": 2}
    return small(grpo=group, rm=None, ppo=None, dpo=None, merge=None)


@pytest.fixture(scope="module")
def run(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The root of a run and its evaluation, and the folder of the reward models."""
    folder = tmp_path_factory.mktemp("rewards")
    for kind in ("qwen2", "bert"):
        checkpoint(folder / kind, kind)
    out = beside(trained, folder / "out", "pretrain", "sft")
    run_stages(rewarded(folder), out, "grpo", "evaluate")
    return out, folder


def test_a_policy_learns_from_one_and_is_judged_by_another(run):
    out, folder = run
    rows = read_intact_lines(out / ROOT / "grpo/metrics.jsonl")
    assert all(row["objective/scores"] == pytest.approx(row["rewards/reward_model"]) for row in rows)
    assert rows[-1]["eval/reward_reward_model_2"] != rows[-1]["eval/reward_reward_model"]
    metrics = content_of(out / ROOT / "evaluate/summary.json")["metrics"]
    answers = read_intact_lines(out / ROOT / "evaluate/samples.jsonl")
    for name, kind, label in (("reward_model", "qwen2", 0), ("reward_model_2", "bert", 1)):
        assert metrics[f"grpo/reward_{name}"] == pytest.approx(
            sum(row["grpo"]["rewards"][name] for row in answers) / len(answers), abs=1e-5
        )
        for row in answers[:3]:
            asked = row["prompt"].removeprefix("\n\nHuman: ").removesuffix("\n\nAssistant:")
            plain = alone(folder / kind, [{"role": "user", "content": asked}], row["grpo"]["response"])
            assert row["grpo"]["rewards"][name] == pytest.approx(plain[label], abs=1e-5)


def test_the_same_run_has_the_same_bytes(run, trained, tmp_path):
    out, folder = run
    again = beside(trained, tmp_path, "pretrain", "sft")
    run_stages(rewarded(folder), again, "grpo")
    for name in ("metrics.jsonl", "adapter/adapter_model.safetensors"):
        assert (again / ROOT / "grpo" / name).read_bytes() == (out / ROOT / "grpo" / name).read_bytes()


def test_checkpoints_that_give_no_reward_are_refused_when_a_run_begins(tmp_path):
    def opened(folder: object, **options: object) -> None:
        written = "".join(f", {key}={value!r}" for key, value in options.items())
        find(f"reward_model(name='{folder}'{written})", "x").begin(None, "cpu")

    bert = checkpoint(tmp_path / "bert", "bert")
    with pytest.raises(UserError, match=r"gives 2 numbers.*label=2"):
        opened(bert, label=2)
    causal = tiny.checkpoint(tmp_path / "causal", "llama")
    with pytest.raises(UserError, match=r"lacks score\.weight"):
        opened(causal)
    (bert / "model.safetensors").write_bytes(b"0" * 64)
    with pytest.raises(UserError, match="bert: cannot be read"):
        opened(bert, label=1)
