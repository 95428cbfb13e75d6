"""`rlhf compare`: two runs on the same prompts, by hand; and what may not be compared."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rlhf.commands import compare
from rlhf.errors import UserError
from tests.helpers import rlhf
from tests.records import write_records

Z = 1.959963984540054


def a_run(root: Path, answers: list[tuple[str, list[dict[str, Any]]]], reward_model: str = "a" * 64, **more) -> Path:
    """A run directory as far as a comparison reads it; `answers`: of the policy `ppo` to each prompt."""
    (root / "evaluate").mkdir(parents=True)
    (root / "rm").mkdir()
    rows = [{"step": 0, "prompt": prompt, "ppo": answer} for prompt, of in answers for answer in of]
    (root / "evaluate/samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = {"ppo/kl_per_token": 0.1, "ppo/perplexity": 3.0, "rm/accuracy": 0.7} | more.get("metrics", {})
    settings = {"model": {"quantization": "none"}, "tokenizer": {"name": "t"}} | more.get("settings", {})
    empty = {"edges": [0, 1], "counts": [0]}
    bins = [{"confidence": 0.7, "accuracy": 0.7, "pairs": pairs} for pairs in (300, 100)]
    figures = {"calibration": bins, "margins": empty, "sigmoid_scores": empty}
    (root / "evaluate/details.json").write_text(json.dumps({"reward_model": figures}))
    write_records(root / "evaluate", {"settings": settings}, {"metrics": metrics})
    weights = {"adapter/adapter_model.safetensors": reward_model}
    write_records(root / "rm", summary={"result_sha256": weights})
    return root


def says(score: float, truth: float | None = None, text: str = "an answer") -> dict[str, Any]:
    return {"response": text, "score": score} | ({} if truth is None else {"true_reward": truth})


def compared(a: Path, b: Path) -> dict[str, Any]:
    comparison_json = compare.compare_runs(compare.load(a, "ppo"), compare.load(b, "ppo")).as_json()
    return comparison_json | {row["name"]: row for row in comparison_json["rows"]}


def test_the_difference_of_two_runs_has_the_interval_and_the_wins_worked_by_hand(tmp_path):
    """B gains 1, 2, 0 and 5 on four prompts: mean 2, sd √(14/3); it wins three and ties one."""
    a = a_run(tmp_path / "a", [(f"p{i}", [says(s)]) for i, s in enumerate([0.0, 1.0, 2.0, -1.0])])
    b = a_run(tmp_path / "b", [(f"p{i}", [says(s)]) for i, s in enumerate([1.0, 3.0, 2.0, 4.0])])
    rows = compared(a, b)
    score = rows["score"]
    half = Z * math.sqrt(14 / 3) / 2
    assert (score["a"], score["b"], score["difference"]) == (0.5, 2.5, 2.0)
    assert score["interval"] == pytest.approx((2 - half, 2 + half))
    wins = rows["win_rate_by_score"]
    assert (wins["a"], wins["b"]) == (0.125, 0.875)
    p, n = 0.875, 4  # Wilson's interval of a share, as of twice the share less one
    middle = (p + Z**2 / (2 * n)) / (1 + Z**2 / n)
    around = Z * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n * n)) / (1 + Z**2 / n)
    assert wins["interval"] == pytest.approx((2 * (middle - around) - 1, 2 * (middle + around) - 1))
    accuracy = rows["rm/accuracy"]
    assert accuracy["interval"][1] == pytest.approx(Z * math.sqrt(2 * 0.7 * 0.3 / 400))
    assert "true_reward" not in rows


def test_pairing_takes_away_what_the_prompts_have_in_common(tmp_path):
    """Prompts differ by 100, the runs by 1 ± 0.1: the interval knows the difference far better than either mean."""
    a = a_run(tmp_path / "a", [(f"p{i}", [says(0, 100.0 * i)]) for i in range(20)])
    b = a_run(tmp_path / "b", [(f"p{19 - i}", [says(0, 100.0 * (19 - i) + 1 + (-1) ** i / 10)]) for i in range(20)])
    low, high = compared(a, b)["true_reward"]["interval"]
    assert 0.9 < low < 1 < high < 1.1


def test_several_answers_to_a_prompt_count_once(tmp_path):
    """Copies of the answers change nothing; and numbers of answers may differ between the runs."""
    one = [(f"p{i}", [says(float(i % 3))]) for i in range(6)]
    other = [(f"p{i}", [says(float(i % 2))]) for i in range(6)]
    single = compared(a_run(tmp_path / "a", one), a_run(tmp_path / "b", other))
    many = compared(
        a_run(tmp_path / "c", [(p, of * 3) for p, of in one]), a_run(tmp_path / "d", [(p, of * 2) for p, of in other])
    )
    assert single["rows"] == many["rows"] and single["prompts"] == many["prompts"] == 6


def test_other_prompts_are_refused_in_one_line(tmp_path, monkeypatch, capsys):
    a = a_run(tmp_path / "a", [(f"p{i}", [says(0)]) for i in range(4)])
    b = a_run(tmp_path / "b", [(f"p{i}", [says(0)]) for i in range(1, 4)])
    code, out, err = rlhf(monkeypatch, capsys, "compare", a, b)
    assert code == 1 and out == "" and len(err.splitlines()) == 1
    assert "answered other prompts: 4 and 3, 3 of them in common" in err


def test_scores_of_two_reward_models_have_no_difference(tmp_path, monkeypatch, capsys):
    answers = [(f"p{i}", [says(float(i), text=f"answer {i}")]) for i in range(5)]
    a = a_run(tmp_path / "a", answers)
    nf4 = {"settings": {"model": {"quantization": "nf4"}}, "metrics": {"ppo/kl_per_token": 0.3}}
    b = a_run(tmp_path / "b", answers, reward_model="b" * 64, **nf4)
    for root, beta in ((a, 0.1), (b, 0.2)):
        write_records(root / "ppo", {"settings": {"ppo": {"kl_coef": beta, "lam": 1.0}}})
    table = compared(a, b)
    assert table["score"]["difference"] is None and "win_rate_by_score" not in table
    assert table["kl_per_token"]["difference"] == pytest.approx(0.2)
    code, out, _ = rlhf(monkeypatch, capsys, "compare", a, b)
    assert code == 0 and "settings that differ: model.quantization, ppo.kl_coef\n" in out
    assert "then give the two files with --scored" in " ".join(out.split())

    for name, shift in (("a", 0.0), ("b", 1.0)):  # as `rlhf score` writes them, with one reward model
        rows = [
            {"step": 0, "prompt": p, "reward_model": "t" * 16, "ppo": says(s["score"] + shift, text=s["response"])}
            for p, (s,) in answers
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scored = ("--scored", tmp_path / "a.jsonl", "--scored", tmp_path / "b.jsonl")
    code, out, err = rlhf(monkeypatch, capsys, "compare", a, b, *scored, "--json")
    assert code == 0, err
    by_name = {row["name"]: row for row in json.loads(out)["rows"]}
    assert by_name["score"]["difference"] == 1.0 and by_name["win_rate_by_score"]["b"] == 1.0
    assert rlhf(monkeypatch, capsys, "compare", a, b, *scored[:2])[0] == 2


def test_perplexity_of_another_tokenizer_has_no_difference(tmp_path):
    a = a_run(tmp_path / "a", [("p", [says(0)])])
    b = a_run(tmp_path / "b", [("p", [says(0)])], settings={"tokenizer": {"name": "u"}})
    assert compared(a, b)["perplexity"]["difference"] is None


def test_what_is_not_there_is_named(tmp_path):
    a = a_run(tmp_path / "a", [("p", [says(0)])])
    with pytest.raises(
        UserError, match=r"nowhere/evaluate: no finished evaluation; first `rlhf run evaluate --with-parents` with"
    ):
        compare.load(tmp_path / "nowhere", "ppo")
    with pytest.raises(UserError, match=r"samples.jsonl:1: no answer of dpo; choose --stage from: ppo"):
        compare.load(a, "dpo")
    (tmp_path / "other.jsonl").write_text(json.dumps({"prompt": "p", "ppo": says(0, text="another")}) + "\n")
    with pytest.raises(UserError, match=r"other.jsonl: not the answers of .*; `rlhf score` that file again"):
        compare.load(a, "ppo", tmp_path / "other.jsonl")
    with pytest.raises(UserError, match="not written by `rlhf score`"):
        compare.load(a, "ppo", a / "evaluate/samples.jsonl")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"step": 0, "prompt": "p1", "ppo": {"resp', r"scores.jsonl:2: cannot be read"),
        ('{"step": 0, "ppo": {"response": "an answer"}}', r"scores.jsonl:2: key 'prompt' is missing"),
        ('{"step": 0, "prompt": "p1", "ppo": {"response": 3}}', r"scores.jsonl:2: ppo\..*damaged"),
    ],
)
def test_a_damaged_line_of_scores_is_named(tmp_path, line, said):
    """Otherwise the whole file would be taken for the scores of other answers."""
    a = a_run(tmp_path / "a", [(f"p{i}", [says(i)]) for i in range(3)])
    rows = [json.dumps({"step": 0, "prompt": f"p{i}", "reward_model": "t" * 16, "ppo": says(i)}) for i in range(3)]
    (tmp_path / "scores.jsonl").write_text(f"{rows[0]}\n{line}\n{rows[2]}\n")
    with pytest.raises(UserError, match=said):
        compare.load(a, "ppo", tmp_path / "scores.jsonl")
