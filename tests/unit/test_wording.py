"""How keys of metrics are shown: records keep the keys."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.terminal import wording

PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
KNOWN = {"vs", "kl", "n", "sft", "l"}  # the last one of ROUGE-L


@pytest.mark.parametrize(("value", "shown"), [(-0.0, "0"), (0.0, "0"), (-0.25, "-0.25"), (-1234.5, "-1,234")])
def test_nothing_is_less_than_nothing(value, shown):
    assert wording.number(value) == shown


def test_no_metric_is_shown_as_an_abbreviation_that_nobody_explains():
    """A word without a vowel is one, as `lc` and `sd` are, and so is one with a digit in it, as `p5`."""
    section = PAGE.split("\n## Policies, on held-out prompts")[1].split("\n## Verdicts")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    keys = {key for row in rows for key in re.findall(r"`([a-z][\w.]*)`", row)} - {"win_rate_vs_sft_ci95"}
    assert len(keys) > 80
    for key in keys:
        shown = wording.metric(key)
        assert "_" not in shown or re.match(r"(reward|.*unrelated) ", shown), key
        words = {word.lower() for word in re.findall(r"\w+", re.sub("NAME|TASK|[0-9.]+ ", "", shown))} - KNOWN
        assert not [w for w in words if re.fullmatch(r"[^aeiouyσ]+|.*[a-z]\d.*", w) and not w.isdigit()], key


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("lc_win_rate_vs_base", "win rate at equal length vs base"),
        ("second_score_gain_sd", "second score gain, standard deviations"),
        ("score_sd", "standard deviation of scores"),
        ("sdk_kld", "sdk kld"),  # a phrase is whole words of the key
        ("reward_my_rewards.longer_gain", "reward my_rewards:longer, gain"),
        ("reward_numeric_answer_pass_at_8", "reward numeric_answer, pass at 8"),
        ("reward_kl_sd", "reward kl_sd"),  # the name is the user's
        ("reward_good", "reward good"),
        ("change_of_unrelated_chain_sum", "change of unrelated chain_sum"),
    ],
)
def test_names_of_the_users_stay_and_phrases_are_words(key, shown):
    assert wording.metric(key) == shown


def test_texts_are_shown_from_where_they_differ():
    system = "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\n"
    end = "<|im_end|>\n<|im_start|>assistant\n"
    asked = [f"{system}What is {i} + {i}? {end}" for i in (2, 30)]
    assert wording.varying(asked) == ["…2 + 2?…", "…30 + 30?…"]
    assert wording.varying(["Why not?", "Who?"]) == ["Why not?", "Who?"], "letters in common are no words"
    assert wording.varying(["same", "same"]) == ["same", "same"] and wording.varying(["alone"]) == ["alone"]


@given(st.lists(st.text(alphabet="ab \n", max_size=12), min_size=2, max_size=5))
def test_what_differs_is_kept(texts):
    shown = wording.varying(texts)
    for text, part in zip(texts, shown, strict=True):
        assert part.strip("…") in text
    for i, text in enumerate(texts):
        assert all(text.split() == other.split() for other, part in zip(texts, shown, strict=True) if part == shown[i])
