"""`rlhf compare`: two runs on the same prompts, by hand; and what may not be compared."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rlhf.cli import compare as command
from rlhf.evaluation import compare
from rlhf.process.task import Task
from tests.helpers import beside, content_of, rlhf, run_stages, small
from tests.records import write_records

Z = 1.959963984540054


def a_run(root: Path, answers: list[tuple[str, list[dict[str, Any]]]], reward_model: str = "a" * 64, **more) -> Path:
    """A run directory as far as a comparison reads it; `answers`: of the policy `ppo` to each prompt."""
    (root / "evaluate").mkdir(parents=True)
    (root / "rm").mkdir()
    rows = [{"step": 0, "prompt": prompt, "ppo": answer} for prompt, of in answers for answer in of]
    (root / "evaluate/samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = {"ppo/kl_per_token": 0.1, "ppo/perplexity": 3.0} | more.get("metrics", {})
    settings = {"model": {"quantization": "none"}, "tokenizer": {"name": "t"}} | more.get("settings", {})
    manifest = {"settings": settings, "reward_functions": more.get("functions", {})}
    write_records(root / "evaluate", manifest, {"metrics": metrics})
    weights = {"adapter/adapter_model.safetensors": reward_model}
    write_records(root / "rm", summary={"result_sha256": weights})
    return root


def says(score: float, truth: float | None = None, text: str = "an answer") -> dict[str, Any]:
    return {"response": text, "score": score} | ({} if truth is None else {"true_reward": truth})


def compared(a: Path, b: Path) -> dict[str, Any]:
    found = compare.compare_runs(*(compare.Side(compare.load(run, "ppo")) for run in (a, b)))._asdict()
    rows = [row._asdict() for row in found["rows"]]
    return found | {"rows": rows} | {row["name"]: row for row in rows}


def test_the_difference_of_two_runs_has_the_interval_worked_by_hand(tmp_path):
    """B gains 1, 2, 0 and 5 on four prompts: mean 2, sd √(14/3)."""
    a = a_run(tmp_path / "a", [(f"p{i}", [says(s)]) for i, s in enumerate([0.0, 1.0, 2.0, -1.0])])
    b = a_run(tmp_path / "b", [(f"p{i}", [says(s)]) for i, s in enumerate([1.0, 3.0, 2.0, 4.0])])
    rows = compared(a, b)
    score = rows["score"]
    half = Z * math.sqrt(14 / 3) / 2
    assert (score["a"], score["b"], score["difference"]) == (0.5, 2.5, 2.0)
    assert score["interval"] == pytest.approx((2 - half, 2 + half))
    assert "true_reward" not in rows


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


def test_rewards_of_functions_are_compared_by_prompt(tmp_path):
    """B has three more of eight right and one fewer: a mean of 1/4, and residuals of 3/4, −1/4 and −1 1/4."""
    functions = {"numeric_answer": "numeric_answer"}
    rights = ([0, 0, 0, 1, 1, 0, 1, 0], [1, 1, 1, 0, 1, 0, 1, 0])
    a, b = (
        a_run(tmp_path / name, [(f"p{i}", [checked(float(x))]) for i, x in enumerate(right)], functions=functions)
        for name, right in zip("ab", rights, strict=True)
    )
    rows = compared(a, b)
    row = rows["reward_numeric_answer"]
    assert (row["a"], row["b"], row["difference"]) == (3 / 8, 5 / 8, 1 / 4)
    variance = (3 * 0.75**2 + 4 * 0.25**2 + 1.25**2) / 7 / 8
    assert row["interval"] == pytest.approx(of_shares(1 / 4, variance, 8)) and row["verdict"] == "not known yet"
    assert "score" not in rows
    other = {"numeric_answer": "numeric_answer(tolerance=1)"}
    c = a_run(tmp_path / "c", [(f"p{i}", [checked(1.0)]) for i in range(8)], functions=other)
    rows = compared(a, c)
    assert rows["reward_numeric_answer"]["difference"] is None, "another function of that name"
    older = a_run(tmp_path / "d", [(f"p{i}", [{"response": "x"}]) for i in range(8)])
    assert not [name for name in (row["name"] for row in compared(a, older)["rows"]) if "reward" in name]


def test_several_answers_to_a_prompt_count_once(tmp_path):
    """Copies of the answers change nothing; and numbers of answers may differ between the runs."""
    one = [(f"p{i}", [says(float(i % 3))]) for i in range(6)]
    other = [(f"p{i}", [says(float(i % 2))]) for i in range(6)]
    single = compared(a_run(tmp_path / "a", one), a_run(tmp_path / "b", other))
    many = compared(
        a_run(tmp_path / "c", [(p, of * 3) for p, of in one]), a_run(tmp_path / "d", [(p, of * 2) for p, of in other])
    )
    assert single["rows"] == many["rows"] and single["prompts"] == many["prompts"] == 6


def test_prompts_that_only_one_side_answered_are_left_out_and_counted(tmp_path, monkeypatch, capsys):
    a = a_run(tmp_path / "a", [(f"p{i}", [says(0, float(i))]) for i in range(4)])
    b = a_run(tmp_path / "b", [(f"p{i}", [says(0, float(i + 1))]) for i in range(1, 6)])
    found = compared(a, b)
    assert (found["prompts"], found["other_prompts"], found["true_reward"]["difference"]) == (3, 3, 1.0)
    c = a_run(tmp_path / "c", [("q", [says(0)])])
    code, out, err = rlhf(monkeypatch, capsys, "compare", a, c)
    assert code == 1 and out == "" and f"{a}: ppo" in err and "none of 4 and 1" in err


def test_scores_of_two_reward_models_have_no_difference(tmp_path):
    answers = [(f"p{i}", [says(float(i), text=f"answer {i}")]) for i in range(5)]
    a = a_run(tmp_path / "a", answers)
    nf4 = {"settings": {"model": {"quantization": "nf4"}}, "metrics": {"ppo/kl_per_token": 0.3}}
    b = a_run(tmp_path / "b", answers, reward_model="b" * 64, **nf4)
    for root, beta in ((a, 0.1), (b, 0.2)):
        write_records(root / "ppo", {"settings": {"ppo": {"kl_coef": beta, "lam": 1.0}}})
    found = compared(a, b)
    assert found["score"]["difference"] is None
    assert (found["kl_per_token"]["a"], found["kl_per_token"]["b"]) == (0.1, 0.3)
    assert found["settings"] == {"model.quantization": ("none", "nf4"), "ppo.kl_coef": (0.1, 0.2)}


def seeds(folder: Path, coefficient: float, gains: list[float]) -> list[Path]:
    """Runs of one recipe with seeds 0, 1, …; each held out prompts of its own, and one that all have."""
    runs = []
    for seed, gain in enumerate(gains):
        prompts = ["p", *(f"p{seed}{i}" for i in range(4))]
        answers = [(prompt, [says(0, index + gain)]) for index, prompt in enumerate(prompts)]
        run = a_run(folder / f"seed-{seed}", answers)
        settings = {"seed": seed, "ppo": {"kl_coef": coefficient}}
        write_records(run / "evaluate", {"settings": settings, "seed": seed}, {"metrics": {"ppo/kl_per_token": gain}})
        runs.append(run)
    return runs


def test_seeds_of_one_recipe_are_one_side_and_each_is_named(tmp_path, monkeypatch, capsys):
    a, b = seeds(tmp_path / "a", 0.1, [0.0, 0.0]), seeds(tmp_path / "b", 0.2, [1.0, 3.0])
    sides = compare.sides_of([compare.load(run, "ppo") for run in (a[0], b[0], a[1], b[1])])
    assert [[run.seed for run in side.runs] for side in sides] == [[0, 1], [0, 1]]
    found = compare.compare_runs(*sides)
    (truth,) = (row for row in found.rows if row.name == "true_reward")
    assert truth.by_seed == (1.0, 3.0) and found.prompts == 9
    assert truth.difference == pytest.approx((4 * 1 + 4 * 3 + 2) / 9), "the prompt of both seeds counts once"
    code, out, err = rlhf(monkeypatch, capsys, "compare", *a, *b)
    assert code == 0 and "B is better than A" in " ".join(out.split()) and "+1, +3" in out, err
    page = (b[-1] / "comparison.html").read_text()
    assert "ppo.kl_coef" in page and "B is better than A" in page and not (a[0] / "report.html").exists()
    alone = compare.sides_of([compare.load(run, "ppo") for run in a])
    assert len(alone) == 2, "seeds of one recipe by themselves are compared with each other"


def test_what_was_not_evaluated_is_evaluated_and_nothing_is_trained(trained, tmp_path, monkeypatch, capsys):
    """DPO alone: neither a reward model nor PPO is trained for it, and the run's recipe has both."""
    out = beside(trained, tmp_path / "runs", "pretrain", "sft")
    run_stages(small(dpo__max_steps=1), out, "dpo")
    run = out / "cpu-tiny/v1"
    assert compare.policies_to_evaluate(run, "dpo") == ["dpo"] == compare.policies_to_evaluate(run, None)
    monkeypatch.setattr(command, "run_child", run_task)
    code, shown, err = rlhf(monkeypatch, capsys, "compare", run / "sft", run / "dpo")
    assert code == 0 and "true reward" in shown, err
    assert sorted(folder.name for folder in run.iterdir() if (folder / "summary.json").is_file()) == sorted(
        ["pretrain", "sft", "dpo", "evaluate"]
    )
    assert compare.policies_to_evaluate(run, "dpo") is None
    metrics = content_of(run / "evaluate/summary.json")["metrics"]
    assert "dpo/true_reward" in metrics and "dpo/score" not in metrics
    assert str(run / "comparison.html") in shown.replace("\n", "")


def run_task(task: Task) -> int:
    run_stages(task.load(), Path(task.out), task.stage, only=task.only)
    return 0
