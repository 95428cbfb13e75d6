"""`rlhf compare`: two runs on the same prompts, by hand; and what may not be compared."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import UserError
from rlhf.evaluation import compare
from rlhf.recipe.stages import PolicyLabel
from rlhf.run.outcomes import Details
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
    (root / "evaluate/details.json").write_text(json.dumps(more.get("details", {})))
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
    assert "true_reward" not in rows


def heldout(*margins: float, prompts: str = "aabbc", pairs: str = "12345") -> dict[str, Any]:
    """Details of an evaluation with these margins of a reward model on held-out pairs."""
    rows = zip(prompts, pairs, margins, strict=True)
    return {"heldout_pairs": [{"prompt": prompt, "pair": pair, "margin": margin} for prompt, pair, margin in rows]}


def test_accuracies_of_two_reward_models_are_paired_by_held_out_pair(tmp_path):
    """B is right where A is wrong on both pairs of prompt a, and half a pair worse on c: residuals by hand."""
    answers = [("p", [says(0)])]
    a = a_run(tmp_path / "a", answers, details=heldout(-1, -1, 1, -1, 2), metrics={"rm/accuracy": 0.4})
    b = a_run(tmp_path / "b", answers, "b" * 64, details=heldout(3, 1, 1, -2, 0), metrics={"rm/accuracy": 0.7})
    accuracy = compared(a, b)["rm/accuracy"]
    assert accuracy["difference"] == pytest.approx(0.3)  # of the differences 1, 1, 0, 0 and −½
    half = Z * math.sqrt(3 / 2 * (1.4**2 + 0.6**2 + 0.8**2) / 25)
    assert accuracy["interval"] == pytest.approx(of_shares(0.3, (half / Z) ** 2, 5))


def test_an_accuracy_has_no_interval_against_itself_nor_on_other_pairs(tmp_path):
    answers = [("p", [says(0)])]
    a = a_run(tmp_path / "a", answers, details=heldout(-1, -1, 1, -1, 2))
    same_model = a_run(tmp_path / "b", answers, details=heldout(3, 1, 1, -2, 0))
    other_pairs = a_run(tmp_path / "c", answers, "c" * 64, details=heldout(3, 1, 1, -2, 0, pairs="12346"))
    older = a_run(tmp_path / "d", answers, "d" * 64)
    for b in (same_model, other_pairs, older):
        accuracy = compared(a, b)["rm/accuracy"]
        assert (accuracy["difference"], accuracy["interval"]) == (0, None), b


def of_shares(difference: float, variance: float, count: int) -> tuple[float, float]:
    """Wilson's interval of (1 + difference) / 2, a share with this variance; the difference is from −1 to 1."""
    p = (1 + difference) / 2
    n = count / (count - 1) * p * (1 - p) / (variance / 4)
    middle, half = (
        (p + Z**2 / 2 / n) / (1 + Z**2 / n),
        Z * math.sqrt(p * (1 - p) / n + (Z / 2 / n) ** 2) / (1 + Z**2 / n),
    )
    return 2 * (middle - half) - 1, 2 * (middle + half) - 1


def checked(right: float) -> dict[str, Any]:
    return {"response": "an answer", "rewards": {"numeric_answer": right}}


def test_rewards_of_functions_are_compared_by_prompt(tmp_path, monkeypatch, capsys):
    """B has three more of eight right and one fewer: a mean of 1/4, and residuals of 3/4, −1/4 and −1 1/4."""
    functions = {"reward_functions": {"numeric_answer": "numeric_answer"}}
    rights = ([0, 0, 0, 1, 1, 0, 1, 0], [1, 1, 1, 0, 1, 0, 1, 0])
    a, b = (
        a_run(tmp_path / name, [(f"p{i}", [checked(float(x))]) for i, x in enumerate(right)], details=functions)
        for name, right in zip("ab", rights, strict=True)
    )
    rows = compared(a, b)
    row = rows["reward_numeric_answer"]
    assert (row["a"], row["b"], row["difference"]) == (3 / 8, 5 / 8, 1 / 4)
    variance = (3 * 0.75**2 + 4 * 0.25**2 + 1.25**2) / 7 / 8
    assert row["interval"] == pytest.approx(of_shares(1 / 4, variance, 8)) and row["verdict"] == "not known yet"
    assert "win_rate_by_reward_numeric_answer" not in rows, "three won and one lost of eight: the same difference"
    assert "score" not in rows
    for root in (a, b):
        shutil.rmtree(root / "rm")
    code, out, _ = rlhf(monkeypatch, capsys, "compare", a, b)
    assert code == 0 and "common unit" not in out, "there are no scores of reward models"

    other = {"reward_functions": {"numeric_answer": "numeric_answer(tolerance=1)"}}
    c = a_run(tmp_path / "c", [(f"p{i}", [checked(1.0)]) for i in range(8)], details=other)
    rows = compared(a, c)
    assert rows["reward_numeric_answer"]["difference"] is None, "another function of that name"
    older = a_run(tmp_path / "d", [(f"p{i}", [{"response": "x"}]) for i in range(8)])
    assert not [name for name in (row["name"] for row in compared(a, older)["rows"]) if "reward" in name]


def test_rewards_that_are_no_shares_have_wins(tmp_path):
    functions = {"reward_functions": {"length": "length(most=3)"}}
    a, b = (
        a_run(
            tmp_path / name,
            [(f"p{i}", [{"response": "x", "rewards": {"length": r}}]) for i, r in enumerate(of)],
            details=functions,
        )
        for name, of in (("a", (0.5, 0.5, 0.5)), ("b", (0.25, 1.0, 0.5)))
    )
    rows = compared(a, b)
    assert rows["reward_length"]["difference"] == pytest.approx(1 / 12)
    assert rows["win_rate_by_reward_length"]["b"] == 0.5


def test_prompts_that_one_side_has_no_verdict_on_are_compared_with_nothing(tmp_path):
    """A judged p0, p1 and p3, B p1, p2 and p3: both judged p1 and p3."""
    given: dict[str, list[dict[str, float]]] = {
        "a": [{"judge": 0.9}, {"judge": 0.5}, {}, {"judge": 0.2}],
        "b": [{}, {"judge": 0.6}, {"judge": 0.1}, {"judge": 0.1}],
    }
    a, b = (
        a_run(
            tmp_path / name,
            [(f"p{i}", [{"response": "x", "rewards": rewards}]) for i, rewards in enumerate(given[name])],
            details={"reward_functions": {"judge": "judge(…)"}},
            metrics=metrics,
        )
        for name, metrics in (
            ("a", {"ppo/score": 0.5, "ppo/reward_judge": 0.5}),  # a share of 0 has no key
            ("b", {"ppo/score": 0.5, "ppo/score_no_verdict": 0.25, "ppo/reward_judge_no_verdict": 0.25}),
        )
    )
    rows = compared(a, b)
    assert [rows[f"{name}_no_verdict"]["difference"] for name in ("score", "reward_judge")] == [0.25, 0.25]
    assert not [row for row in compared(a, a)["rows"] if "verdict" in row["name"]], "all of both are judged"
    assert [rows["reward_judge"][side] for side in "ab"] == pytest.approx([0.35, 0.35])
    assert rows["win_rate_by_reward_judge"]["b"] == 0.5


def test_equal_answers_differ_by_nothing_without_an_interval(tmp_path):
    a, b = (a_run(tmp_path / name, [(f"p{i}", [says(i)]) for i in range(4)]) for name in "ab")
    score = compared(a, b)["score"]
    assert (score["difference"], score["interval"]) == (0, None)


def test_without_a_stage_the_first_trained_policy_of_a_is_compared(tmp_path, monkeypatch, capsys):
    answers = [(f"p{i}", [says(i)]) for i in range(3)]
    a, b = (a_run(tmp_path / name, answers) for name in "ab")
    for root, policies in ((a, ("sft", "dpo", "grpo")), (b, ("grpo",))):
        rows = [{"step": 0, "prompt": p} | dict.fromkeys(policies, answer) for p, (answer,) in answers]
        (root / "evaluate/samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_records(root / "evaluate")
    code, out, err = rlhf(monkeypatch, capsys, "compare", a, b)
    assert code == 0 and "a: grpo" in out and "b: grpo" in out, err
    for run, policy in ((a, "dpo"), (b, "grpo")):  # a policy's folder says which one is meant
        (run / policy).mkdir(exist_ok=True)
        (run / policy / "manifest.json").write_bytes((run / "evaluate/manifest.json").read_bytes())
    by_folders = rlhf(monkeypatch, capsys, "compare", a / "dpo", b / "grpo")
    code, out, _ = rlhf(monkeypatch, capsys, "compare", a, b, "--stage", "dpo", "--stage-b", "grpo")
    assert by_folders[1] == out
    assert code == 0 and "a: dpo" in out
    untrained = a_run(tmp_path / "c", [])
    rows = [{"step": 0, "prompt": "p", "sft": says(0), "base": says(0)}]
    (untrained / "evaluate/samples.jsonl").write_text(json.dumps(rows[0]) + "\n")
    write_records(untrained / "evaluate")
    with pytest.raises(
        UserError, match=r"samples.jsonl: no answer of a trained policy; choose --stage from: sft, base$"
    ):
        compare.load(untrained)


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
    assert "answered different prompts: 4 and 3, 3 of them in common" in err


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


def test_swapped_files_of_scores_are_recognised(tmp_path, monkeypatch, capsys):
    a, b = (a_run(tmp_path / name, [("p", [says(0, text=name)])]) for name in "ab")
    for name, policy in (("a", "ppo"), ("b", "dpo")):
        line = {"step": 0, "prompt": "p", "reward_model": "t" * 16, policy: says(0, text=name)}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    scored = ("--scored", tmp_path / "b.jsonl", "--scored", tmp_path / "a.jsonl")
    code, _, err = rlhf(monkeypatch, capsys, "compare", a, b, *scored)
    assert code == 1 and "b.jsonl:1: no answer of ppo; " in err and err.endswith("or swap the two --scored\n")
    (tmp_path / "b.jsonl").write_text((tmp_path / "b.jsonl").read_text().replace('"dpo"', '"ppo"'))
    code, _, err = rlhf(monkeypatch, capsys, "compare", a, b, *scored)
    assert code == 1 and "not the answers of" in err and err.endswith("or swap the two --scored\n")


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


def test_two_policies_of_one_run_have_the_same_settings():
    """The section of each policy is only on its own side, which is no difference."""
    shared = {"model": {"rank": 8}, "sft": {"epochs": 1}}

    def side(policy: PolicyLabel, **own: object) -> compare.PolicyEvaluation:
        return compare.PolicyEvaluation(policy, policy, {}, None, None, {}, shared | own, Details())

    ppo, dpo = side("ppo", ppo={"lam": 1.0}), side("dpo", dpo={"beta": 0.1})
    assert compare._settings_that_differ(ppo, dpo) == []
    assert compare._settings_that_differ(ppo, side("ppo", ppo={"lam": 0.9})) == ["ppo.lam"]
    assert compare._settings_that_differ(ppo, side("dpo", dpo={}, sft={"epochs": 2})) == ["sft.epochs"]
