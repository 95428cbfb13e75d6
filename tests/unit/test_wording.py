"""How keys of metrics are shown: records keep the keys."""

import pytest

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
