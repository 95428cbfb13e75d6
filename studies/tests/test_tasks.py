"""The probe of reasoning-gym's tasks: its page shows its newest record, and a base is counted by both rules."""

import json

import pytest

from rlhf.stages.online.reward_functions import find
from studies.paths import TASKS
from studies.tasks import __main__ as tasks


def test_the_page_has_the_table_of_the_newest_record():
    newest = max((TASKS / "results").glob("*.json"))
    page = (TASKS / "README.md").read_text()
    assert tasks.table(json.loads(newest.read_text())) in page and newest.name in page


@pytest.mark.parametrize(("answer", "last"), [("The sum is 12.", 1), ("12 = 5 + 7", 0), ("-12", 2 / 3), ("", 0)])
def test_the_last_word_or_number_is_scored(answer, last):
    pytest.importorskip("reasoning_gym")
    entry = json.dumps({"reasoning_gym": "chain_sum", "config": {}, "answer": "12", "metadata": {}})
    reward = find(f"reasoning_gym(extract={tasks.LAST!r})", "here")
    assert reward(["5 + 7 ="], [answer], [entry]) == [last]  # the verifier finds 12 in -12
