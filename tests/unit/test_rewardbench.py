"""RewardBench: rows of both versions, and figures worked out by hand."""

import json
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from rlhf import stats
from rlhf.data.rows import Message
from rlhf.errors import UserError
from rlhf.evaluation import rewardbench
from rlhf.evaluation.rewardbench import Entry, figures, outcome, read
from rlhf.evaluation.score import ScoredItem
from rlhf.evaluation.score_items import Item


def scored(
    subset: str, right: Sequence[float | None], wrong: Sequence[float], key: Any = "", lengths=(5, 3)
) -> ScoredItem:
    """An item of a benchmark with its scores; right answers are 5 characters long and wrong ones 3."""
    scores = {f"chosen {n}": score for n, score in enumerate(right)} | {f"rejected {n}": s for n, s in enumerate(wrong)}
    answers = {name: "x" * (3 if name.startswith("rejected") else 5) for name in scores}
    prompt = f"{subset} {key} {right} {wrong}"
    return ScoredItem(Item("a:1", prompt, answers, {"subset": subset, "id": str(key)}), prompt, scores)


def by_name(items):
    return {figure.name: figure for group in figures(items) for figure in group}


@pytest.mark.parametrize(
    ("right", "wrong", "share"),
    [([2], [1, 0, 1], 1), ([1], [2, 0, 0], 0), ([2], [2, 1, 2], 1 / 3), ([0], [0], 0.5), ([-1], [-2], 1)],
)
def test_the_right_answer_must_score_highest_and_ties_share(right, wrong, share):
    assert outcome(Entry("s", "", "p", right, wrong)) == pytest.approx(share)


def test_sections_are_means_over_prompts_and_mathematics_weighs_as_much_as_code():
    items = [scored("alpacaeval-hard", [n], [0]) for n in (1, 1, 1, -1)] + [scored("mt-bench-med", [1], [0])]
    items += [scored("math-prm", [1], [0])]
    items += [scored(f"hep-{name}", [n], [0]) for name, n in (("go", 1), ("js", -1), ("rust", -1), ("cpp", -1))]
    found = by_name(items)
    assert found["Chat"].accuracy.value == pytest.approx(4 / 5) and found["Chat"].prompts == 5
    assert found["Reasoning"].accuracy.value == pytest.approx((1 + 1 / 4) / 2)
    assert found["all"].accuracy.value == pytest.approx((4 / 5 + 5 / 8) / 2)
    assert {figure.by_length.value for figure in found.values()} == {1.0}, "the right answers are the longer ones"
    assert found["math-prm"].accuracy == pytest.approx(stats.wilson(1, 1))
    assert list(found) == [*dict.fromkeys(item.item.row["subset"] for item in items), "Chat", "Reasoning", "all"]


def test_version_two_is_the_mean_of_its_subsets():
    items = [scored("Focus", [n], [0, 0.5, -1]) for n in (1, 0)] + [scored("Math", [2], [2, 1, 0])]
    found = by_name(items)
    assert [*found] == ["Focus", "Math", "all"] and found["all"].accuracy.value == pytest.approx(0.5)


def test_the_score_of_ties_is_that_of_the_published_formula():
    """Written out with sums over prompts, for random scores."""
    draw = random.Random(1)
    sides = [([draw.gauss(4, 1) for _ in range(n)], [draw.gauss(0, 1) for _ in range(3)]) for n in [1, 4] * 20]
    items = [scored("Ties", *side, key=f"{('ref', 'tied')[n % 2]}:{n // 2}") for n, side in enumerate(sides)]
    lead = [min(right) - max(wrong) for right, wrong in sides]
    spread = [max(right) - min(right) for right, _ in sides]
    ref, tied, between, pairs = lead[::2], lead[1::2], spread[1::2], range(20)
    expected = 0.3 * sum(x > 0 for x in ref) + 0.3 * sum(x > 0 for x in tied)
    expected += 0.2 * sum(tied[i] > between[i] for i in pairs)
    expected += 0.2 * sum(min(ref[i], tied[i]) > between[i] for i in pairs)
    expected += 0.01 * sum(math.tanh(min(ref[i], tied[i]) / between[i] - 1) for i in pairs)
    found = by_name(items)["Ties"]
    assert found.accuracy.value == pytest.approx(expected / 20)
    assert found.accuracy.low < found.accuracy.value < found.accuracy.high
    assert found.by_length.value == pytest.approx(1.01), "all right answers are as long, and longer than the wrong ones"


def test_prompts_that_were_cut_whole_do_not_count_and_some_must_remain():
    assert by_name([scored("Math", [1], [0]), scored("Math", [None], [0])])["Math"].prompts == 1
    with pytest.raises(UserError, match=r"no prompt of the benchmark fits into rm\.max_length"):
        figures([scored("Math", [None], [0])])


@pytest.mark.parametrize(("key", "reason"), [("7", "neither ref:N nor tied:N"), ("ref:7", "prompt 7 is not there as")])
def test_a_prompt_of_ties_without_its_partner_is_named(key, reason):
    with pytest.raises(UserError, match=reason):
        figures([scored("Ties", [1], [0], key=key)])


def test_rows_of_both_versions_are_read(tmp_path):
    one = {"prompt": "Human: Q?", "chosen": "a", "rejected": "b", "subset": "hep-go", "id": 3, "chosen_model": "x"}
    two = {"prompt": "Q?", "chosen": ["a"], "rejected": ["b", "c", "d"], "subset": "Math", "id": "5"}
    (tmp_path / "a.jsonl").write_text(json.dumps(one) + "\n" + json.dumps(two | {"num_correct": 1}) + "\n")
    first, second = read([tmp_path / "a.jsonl"])
    assert first.prompt == (Message("user", "Human: Q?"),), "no transcripts stand in it"
    assert first.answers == {"chosen 1": "a", "rejected 1": "b"} and first.row == {"subset": "hep-go", "id": "3"}
    assert [*second.answers] == ["chosen 1", "rejected 1", "rejected 2", "rejected 3"]
    for wrong, reason in (
        ({"subset": None} | {"prompt": "Q?"}, "a row of RewardBench has them"),
        (two | {"chosen": []}, "lists of at least one text"),
        (two | {"rejected": [1]}, "must be texts"),
    ):
        (tmp_path / "b.jsonl").write_text(json.dumps(wrong) + "\n")
        with pytest.raises(UserError, match=rf"b\.jsonl:1: .*{reason}"):
            read([tmp_path / "b.jsonl"])


def test_the_interval_of_a_mean_follows_from_those_of_its_parts():
    parts = [stats.Estimate(0.5, 0.2, 0.6), stats.Estimate(1.0, 0.6, 1.0)]
    assert stats.weighted_mean(parts, [0.5, 0.5]) == pytest.approx((0.75, 0.5, 0.8))
    assert rewardbench.SECTIONS.keys() == {"Chat", "Chat Hard", "Safety", "Reasoning"}
