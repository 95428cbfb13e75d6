"""How keys of metrics are shown: records keep the keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.terminal import wording


@pytest.mark.parametrize(("value", "shown"), [(-0.0, "0"), (0.0, "0"), (-0.25, "-0.25"), (-1234.5, "-1,234")])
def test_nothing_is_less_than_nothing(value, shown):
    assert wording.number(value) == shown


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
