"""What the evaluation says beyond a win rate: variety, length, the gap to the truth, and the reward model's worth."""

import math
import random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from rlhf.data.corpus import Corpus, Split
from rlhf.data.rows import Example, Message, PreferencePair, Row
from rlhf.evaluation.policies import (
    PolicySamples,
    further_metrics,
    gains_over_start,
)
from rlhf.evaluation.references import Overlap
from rlhf.evaluation.reward_model import reward_model_figures

SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}

VARIETY = {"distinct_1", "distinct_2", "empty_rate", "equal_rate"}


def measured(scores: list[float], lengths: list[int], truths: list[float] | None = None, **more) -> PolicySamples:
    return PolicySamples(
        texts=more.get("texts", ["a b"] * len(scores)),
        lengths=torch.tensor(lengths),
        ended=torch.ones(len(scores), dtype=torch.bool),
        kl=0.0,
        judged={"score": torch.tensor(scores)} | ({} if truths is None else {"true_reward": torch.tensor(truths)}),
    )


def test_a_policy_that_only_writes_more_loses_its_win_rate():
    """The score is the length, but for noise: 9 of 10 comparisons are won, by length alone."""
    rng = random.Random(0)
    lengths = [rng.randint(5, 40) for _ in range(400)]
    more = [length + rng.randint(-8, 22) for length in lengths]
    before = measured([x + rng.gauss(0, 1) for x in lengths], lengths)
    after = measured([x + rng.gauss(0, 1) for x in more], more)
    metrics = further_metrics(before, after, {}, "sft")
    plain = (after.judged["score"] > before.judged["score"]).float().mean().item()
    assert plain > 0.65
    assert metrics["lc_win_rate_vs_sft"] < plain - 0.15
    assert metrics["lc_win_rate_vs_sft_low"] < 0.5 < metrics["lc_win_rate_vs_sft_high"]


def test_a_policy_that_only_ties_has_no_win_rate_at_equal_length():
    """An interval without width around 0.5 would be certainty from no evidence."""
    before, after = measured([1.0, 2.0, 3.0], [3, 4, 5]), measured([1.0, 2.0, 3.0], [5, 3, 9])
    assert further_metrics(before, after, {}, "sft").keys() - VARIETY == {"ties_vs_sft"}


def test_gap_between_proxy_and_truth_ties_and_variety():
    before = measured([0.0, 2.0], [3, 3], [0.0, 2.0], texts=["a b c", "a b c"])
    after = measured([0.0, 6.0], [3, 3], [0.0, 0.0], texts=["a a a a", "b"])
    metrics = further_metrics(before, after, gains_over_start(before, after, "sft"), "sft")
    sd = math.sqrt(2)
    assert metrics["proxy_truth_gap_sd"] == pytest.approx(2 / sd - (-1 / sd))
    assert metrics["ties_vs_sft"] == 0.5
    assert (metrics["distinct_1"], metrics["distinct_2"]) == (2 / 5, 1 / 3)
    assert further_metrics(before, before, {}, "sft").keys() == VARIETY


def test_empty_and_equal_answers_are_counted():
    """Blank and zero-width answers say nothing; equal ones are equal to each other, whatever the prompt."""
    texts = ["7", "", "7", "\u200b \n", "8", "7"]
    policy = measured([0.0] * 6, [1] * 6, texts=texts)
    metrics = further_metrics(policy, policy, {}, "sft")
    assert metrics["empty_rate"] == 2 / 6 and metrics["equal_rate"] == 3 / 6


def test_a_reward_model_judged_by_hand():
    chosen, rejected = [3.0, -1.0, 0.0, 0.5], [0.0, 2.0, 0.0, 0.0]
    margins = [a - b for a, b in zip(chosen, rejected, strict=True)]
    figures = reward_model_figures(margins, [4, -2, 1, -1], ["a", "b", "c", "d"])
    assert figures["accuracy_low"] < figures["accuracy"] == 2.5 / 4 < figures["accuracy_high"]
    assert figures["margin"] == pytest.approx(0.125)
    assert (figures["accuracy_chosen_longer"], figures["accuracy_chosen_shorter"]) == (0.75, 0.5)


def test_a_length_bias_shows():
    rng = random.Random(1)
    length_differences = [rng.randint(-20, 20) for _ in range(500)]
    margins = [0.1 * d + rng.gauss(0, 0.5) for d in length_differences]
    figures = reward_model_figures(margins, length_differences, range(500))
    assert figures["margin_length_correlation"] > 0.8
    assert figures["accuracy_chosen_longer"] > 0.8 > 0.2 > figures["accuracy_chosen_shorter"]


# -- against reference answers ----------------------------------------------------------------------------------------


def prompt(text: str) -> tuple[Message, ...]:
    return (Message("user", text),)


CPU = torch.device("cpu")


def test_references_are_the_first_of_the_prompt():
    pairs = [PreferencePair(prompt("p"), "yes", "no", "1"), PreferencePair(prompt("p"), "later", "x", "2")]
    examples = [Example(prompt("q"), "right", "3"), Example(prompt("p"), "unused", "4")]
    asked = [prompt("q"), prompt("p"), prompt("r")]
    overlap = Overlap(Corpus(Split([], [*examples, *pairs])), asked, 2, None, CPU)
    metrics = overlap.metrics(["right", "right", "yes", "yes", "later", "x"])
    assert metrics["rouge_l"] == 1 and metrics["rouge_l_rejected"] == 0
    assert overlap.metrics(["x", "x", "no", "no", "", ""])["rouge_l_rejected"] == 1


def test_bleu_and_rouge_by_hand():
    rows: list[Row] = [
        PreferencePair(prompt("p"), "the cat sat here", "a dog", "1"),
        Example(prompt("q"), "one two three four", "2"),
    ]
    overlap = Overlap(Corpus(Split([], rows)), [prompt("p"), prompt("r"), prompt("q")], 1, None, CPU)
    metrics = overlap.metrics(["the cat sat here", "ignored", "one three"])
    assert metrics["rouge_l"] == pytest.approx((1 + 2 * (1 * 0.5) / 1.5) / 2)
    assert metrics["rouge_l_rejected"] == 0
    assert set(metrics) == {"bleu", "rouge_l", "bleu_rejected", "rouge_l_rejected"}
    assert overlap.metrics(["the cat sat here", "", "one two three four"])["bleu"] == pytest.approx(100)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(50))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = [("[CLS]", 2), ("[SEP]", 3)]
    raw.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    tokens = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=raw, **tokens).save_pretrained(folder)
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(known), max_position_embeddings=32, **SHAPE)).save_pretrained(folder)
    return folder


def test_bertscore_against_its_formula(encoder):
    answer, reference = "w1 w2 w3", "w3 w4 w1 w9 w7"
    pair = PreferencePair(prompt("p"), reference, answer, "1")
    overlap = Overlap(Corpus(Split([], [pair])), [prompt("p")], 1, str(encoder), CPU)
    metrics = overlap.metrics([answer])
    assert metrics["bertscore_rejected"] == pytest.approx(1, abs=1e-5)
    model = BertModel.from_pretrained(encoder).eval()

    def embed(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            hidden: torch.Tensor = model(torch.tensor([[2, *ids, 3]])).last_hidden_state[0, 1:-1]
        normed: torch.Tensor = hidden / hidden.norm(dim=-1, keepdim=True)
        return normed

    a, b = embed([5, 6, 7]), embed([7, 8, 5, 13, 11])
    best_a = sum(max((x @ y).item() for y in b) for x in a) / 3
    best_b = sum(max((x @ y).item() for x in a) for y in b) / 5
    assert metrics["bertscore"] == pytest.approx(2 * best_a * best_b / (best_a + best_b), abs=1e-5)
    assert overlap.metrics([""])["bertscore"] == 0
