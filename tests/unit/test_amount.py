"""What is said about few pairs, and when."""

import pytest

from rlhf.data import amount


@pytest.mark.parametrize(
    ("pairs", "said"),
    [(0, "fewer than 50"), (49, "fewer than 50"), (50, "fewer than 100"), (99, "fewer than 100"), (100, "few:")],
)
def test_few_pairs_are_called_few_by_the_guide_s_limits(pairs, said):
    assert amount.advice(pairs).startswith(said)


def test_a_thousand_pairs_are_enough_and_nothing_is_said(capsys):
    assert amount.advice(999) and not amount.advice(1000)
    amount.note("rm", 1000)
    assert capsys.readouterr().err == ""
    amount.note("dpo", 60)
    assert capsys.readouterr().err.startswith("dpo: 60 training pairs are fewer than 100: the H100 guide calls RLHF ")
