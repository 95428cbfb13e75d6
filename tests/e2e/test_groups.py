"""RLOO and GRPO from the command line to the merged model: resume, rewards from functions, and who knows of them."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf.cli.chat import greeting
from rlhf.errors import UserError
from rlhf.evaluation import compare
from rlhf.rating.pairs import pair_answers
from rlhf.recipe import as_yaml
from rlhf.report import page
from rlhf.report.records import load
from rlhf.rollout import speaker as chat
from rlhf.run.directory import StageRun
from tests.helpers import GROUP, RECIPE, SMALL, Crash, beside, content_of, crash, grouped, rlhf, run_stages
from tests.lines import read_intact_lines

ROOT = Path("cpu-tiny/v1")
PARENTS = ("pretrain", "sft", "rm")
ADAPTER = "adapter/adapter_model.safetensors"
SAME = (ADAPTER, "metrics.jsonl", "samples.jsonl", "checkpoints/best.json")


def section(stage: str) -> dict[str, object]:
    """RLOO learns from the reward model alone, GRPO from a function too."""
    return {"reward_funcs": ["model", "length(most=3)"]} if stage == "grpo" else {}


@pytest.fixture(scope="module", params=["rloo", "grpo"])
def done(request, trained, tmp_path_factory) -> tuple[str, Path]:
    """A stage and the root of its finished run."""
    out = beside(trained, tmp_path_factory.mktemp(request.param), *PARENTS)
    run_stages(grouped(request.param, section(request.param)), out, request.param)
    return request.param, out


def test_what_a_run_leaves(done):
    stage, out = done
    folder = out / ROOT / stage
    rows = read_intact_lines(folder / "metrics.jsonl")
    assert len(rows) == 4 and all(row["groups/no_signal"] == 0 for row in rows)
    assert {"rewards/model", "groups/reward_sd", "objective/kl_per_token", "policy/entropy_avg"} <= rows[0].keys()
    assert not any(name.startswith("val/e") or "value" in name for name in rows[0])
    assert ("loss/kl_avg" in rows[0]) == (stage == "grpo")
    summary = content_of(folder / "summary.json")
    assert summary["metrics"]["kl_per_token"] > 0 and summary["metrics"]["best_step"] in (1, 2, 3, 4)
    assert sorted(p.name for p in (folder / "checkpoints").glob("step-*"))[-1] == "step-000004"


def test_a_recipe_without_a_reward_model_runs_from_sft_to_the_report(trained, tmp_path):
    """It has SFT, GRPO with a function's rewards, and the evaluation."""
    checked = {"reward_funcs": ["length(most=3)"], "normalize_scores": False}
    loaded = grouped("grpo", checked, rm=None, ppo=None, dpo=None, merge=None)
    out = beside(trained, tmp_path, "pretrain", "sft")
    metrics = run_stages(loaded, out, "grpo", "evaluate")["metrics"]
    assert {"sft/reward_length", "grpo/reward_length_gain", "grpo/kl_per_token"} <= metrics.keys()
    assert not [name for name in metrics if name.startswith("rm/")]
    folder = out / ROOT / "evaluate"
    assert content_of(folder / "details.json") == {"scores": None, "reward_functions": {"length": "length(most=3)"}}
    rows = read_intact_lines(folder / "samples.jsonl")
    assert len(rows) == 8
    for policy in ("base", "sft", "grpo"):
        given = [row[policy]["rewards"]["length"] for row in rows]
        assert sum(given) / 8 == pytest.approx(metrics[f"{policy}/reward_length"])
        assert rows[0][policy].keys() == {"response", "true_reward", "rewards"}
    assert metrics["grpo/reward_length_low"] <= metrics["grpo/reward_length"] <= metrics["grpo/reward_length_high"]
    compared = compare.compare_runs(compare.load(out / ROOT, "sft"), compare.load(out / ROOT))
    (gain,) = (row for row in compared.rows if row.name == "reward_length")
    assert gain.difference == pytest.approx(metrics["grpo/reward_length_gain"])
    assert {*content_of(folder / "manifest.json")["parents"]} == {"pretrain", "sft", "grpo"}
    assert "GRPO" in page.page(load(out / ROOT))


def test_normalised_scores_are_clipped(trained, tmp_path):
    out = beside(trained, tmp_path, *PARENTS)
    clipped = {"steps": 1, "score_clip": 1e-3, "missing_eos_penalty": 0.0}
    run_stages(grouped("grpo", clipped), out, "grpo")
    (row,) = read_intact_lines(out / ROOT / "grpo" / "metrics.jsonl")
    assert row["groups/reward_sd"] <= 2e-3 < abs(row["rewards/model"])


@pytest.fixture
def interrupted(done, trained, tmp_path, monkeypatch) -> Path:
    """The root of a run of the same stage that crashed after the checkpoint of its second step."""
    stage, _ = done
    out = beside(trained, tmp_path, *PARENTS)
    crash(monkeypatch, 2)
    with pytest.raises(Crash):
        run_stages(grouped(stage, section(stage)), out, stage)
    monkeypatch.undo()
    return out


def test_after_a_crash_it_ends_with_the_same_bytes(done, interrupted):
    (stage, whole), out = done, interrupted
    run_stages(grouped(stage, section(stage)), out, stage, resume=True)
    for name in SAME:
        assert (out / ROOT / stage / name).read_bytes() == (whole / ROOT / stage / name).read_bytes(), name


def test_an_interrupted_run_is_not_begun_anew_by_accident(done, interrupted):
    (stage, _), out = done, interrupted
    folder = out / ROOT / stage
    kept = content_of(folder / "manifest.json")
    with pytest.raises(UserError, match=rf"{stage} has a checkpoint of step \d: --resume .*, --restart "):
        run_stages(grouped(stage, section(stage)), out, stage)
    assert content_of(folder / "manifest.json") == kept, "the run is as it was"
    run_stages(grouped(stage, section(stage)), out, stage, resume=False)
    assert content_of(folder.with_name(f"{stage}.before-1") / "manifest.json") == kept


@pytest.mark.slow
def test_killed_without_warning_it_ends_with_the_same_bytes(trained, tmp_path):
    """SIGKILL between two steps of a longer run."""
    longer = GROUP | {"steps": 10, "eval_steps": 5}
    whole, cut = (beside(trained, tmp_path / name, *PARENTS) for name in ("whole", "cut"))
    run_stages(grouped("grpo", longer), whole, "grpo")
    flags = [part for key, value in SMALL.items() for part in ("--set", f"{key}={as_yaml(value)}")]
    flags += ["--set", f"grpo={json.dumps(longer)}"]
    line = [sys.executable, "-m", "rlhf.cli", "run", "grpo", "--recipe", str(RECIPE), "--out", str(cut), *flags]
    started = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(read_intact_lines(cut / ROOT / "grpo/metrics.jsonl")) < 4:
        assert started.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert not (cut / ROOT / "grpo/summary.json").exists()
    assert subprocess.run([*line, "--resume"], capture_output=True).returncode == 0
    assert content_of(cut / ROOT / "grpo/manifest.json")["resumed_from"] is not None
    for name in SAME:
        assert (cut / ROOT / "grpo" / name).read_bytes() == (whole / ROOT / "grpo" / name).read_bytes(), name


def test_evaluation_chat_comparison_report_and_merge_know_the_stage(done, tmp_path):
    stage, whole = done
    out = beside(whole, tmp_path, *PARENTS, stage)
    loaded = grouped(stage, section(stage), merge__stage=stage)
    summary = run_stages(loaded, out, "evaluate")
    assert (
        ("grpo/reward_length" in summary["metrics"]) == ("sft/reward_length" in summary["metrics"]) == (stage == "grpo")
    )
    assert {f"{stage}/score", f"{stage}/kl_per_token", f"{stage}/true_reward_gain_sd"} <= summary["metrics"].keys()
    assert compare.load(out / ROOT).policy == stage
    answers = read_intact_lines(out / ROOT / "evaluate" / "samples.jsonl")
    assert all(("rewards" in row[stage]) == (stage == "grpo") for row in answers)
    details = content_of(out / ROOT / "evaluate" / "details.json")
    pairs = details["heldout_pairs"]
    assert sum((pair["margin"] > 0) + (pair["margin"] == 0) / 2 for pair in pairs) / len(pairs) == pytest.approx(
        summary["metrics"]["rm/accuracy"]
    )
    assert len({pair["pair"] for pair in pairs}) == len(pairs)
    assert pair_answers(out / ROOT).b == stage
    assert "groups without signal" in page.page(load(out / ROOT))
    run_stages(loaded, out, "merge")
    assert greeting(loaded, stage, 0.7).startswith(f"{stage} of cpu-tiny v1")
    run = StageRun(out, loaded, "evaluate")
    assert chat.Speaker(run, stage, chat.trained_stage(run, stage))


def test_a_recipe_without_the_section_says_so(trained, tmp_path, monkeypatch, capsys):
    flags = ["--recipe", RECIPE, "--out", tmp_path]
    code, _, err = rlhf(monkeypatch, capsys, "run", "grpo", *flags)
    assert code and "grpo" in err and "no such stage" in err and err.count("\n") == 1


# -- rewards from functions --------------------------------------------------------------------------------------------

RULES = {"normalize_scores": False, "missing_eos_penalty": None}


def with_prompts(trained: Path, folder: Path, count: int = 60) -> dict[str, object]:
    """Changes by which a recipe reads the toy's pairs and texts, and prompts with an answer."""
    toy = min((trained / ROOT / "data").glob("toy-*"))  # other tests may have made some too
    file = folder / "sums.jsonl"
    rows = [{"prompt": f"What is {i} plus {i}?", "answer": 2 * i} for i in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [str(toy / "corpus.jsonl"), str(toy / "pairs.jsonl"), str(file)]
    return {"data__source": "files", "data__files": files}


@pytest.fixture(scope="module")
def own_data(trained, tmp_path_factory):
    """Changes and root of a chain up to SFT on data with answers; no reward model."""
    folder = tmp_path_factory.mktemp("own")
    changes = with_prompts(trained, folder)
    run_stages(grouped("grpo", RULES | {"reward_funcs": ["json_valid"]}, **changes), folder, "pretrain", "sft")
    return changes, folder


def test_functions_need_no_reward_model_and_see_the_answers(own_data, tmp_path, monkeypatch):
    changes, folder = own_data
    out = beside(folder, tmp_path, "pretrain", "sft")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seen_rewards.py").write_text(
        "def even(prompts, completions, answer):\n"
        "    asked = [int(prompt.split('What is ')[1].split()[0]) for prompt in prompts]\n"
        "    assert answer == [str(2 * number) for number in asked]\n"
        "    return [len(c) % 2 for c in completions]\n"
    )
    names = ["seen_rewards:even", "length(most=3)", "numeric_answer"]
    loaded = grouped("grpo", RULES | {"reward_funcs": names, "reward_weights": [1.0, 0.5, 2.0]}, **changes)
    summary = run_stages(loaded, out, "grpo")
    row = read_intact_lines(out / ROOT / "grpo/metrics.jsonl")[-1]
    parts = {"rewards/seen_rewards.even": 1.0, "rewards/length": 0.5, "rewards/numeric_answer": 2.0}
    assert row["objective/scores"] == pytest.approx(sum(w * row[name] for name, w in parts.items()), abs=1e-5)
    found = summary["metrics"]
    gain = found["reward_numeric_answer"] - found["reward_numeric_answer_sft"]
    assert found["reward_numeric_answer_gain"] == pytest.approx(gain) and "score" in found
    assert "rm" not in content_of(out / ROOT / "grpo/manifest.json")["parents"]


def test_groups_without_signal_are_replaced_and_named(own_data, tmp_path, monkeypatch):
    """Half of the prompts get the same reward whatever the response: their groups teach nothing."""
    changes, folder = own_data
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rare_rewards.py").write_text(
        "def rare(prompts, completions):\n"
        "    return [len(c) % 7 if len(p) % 2 else 0 for p, c in zip(prompts, completions)]\n"
        "def never(completions): return [0.0] * len(completions)\n"
    )
    shares = []
    for times in (0, 6):
        out = beside(folder, tmp_path / str(times), "pretrain", "sft")
        group: dict[str, Any] = RULES | {"reward_funcs": ["rare_rewards:rare"], "resample_groups": times, "steps": 8}
        run_stages(grouped("grpo", group, **changes), out, "grpo")
        rows = read_intact_lines(out / ROOT / "grpo/metrics.jsonl")
        shares.append(sum(row["groups/no_signal"] for row in rows) / len(rows))
    assert shares[0] > 0.2 and shares[1] < shares[0] / 2
    out = beside(folder, tmp_path / "never", "pretrain", "sft")
    group = RULES | {"reward_funcs": ["rare_rewards:never"], "steps": 6, "save_steps": 6, "eval_steps": 6}
    summary = run_stages(grouped("rloo", group, **changes), out, "rloo")
    assert "no_signal" in summary["findings"]


def test_a_reward_that_fails_ends_the_stage_with_one_line(own_data, tmp_path, monkeypatch):
    changes, folder = own_data
    out = beside(folder, tmp_path, "pretrain", "sft")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad_rewards.py").write_text("def nan(completions): return [float('nan')] * len(completions)\n")
    with pytest.raises(
        UserError, match=r"^reward bad_rewards:nan is nan, .* the prompt '.*Human: .* and the response '"
    ):
        run_stages(grouped("grpo", RULES | {"reward_funcs": ["bad_rewards:nan"]}, **changes), out, "grpo")
    with pytest.raises(UserError, match=r"^grpo.reward_funcs: no reward 'exakt_answer'"):
        run_stages(grouped("grpo", RULES | {"reward_funcs": ["exakt_answer"]}, **changes), out, "grpo")


def test_prompts_without_answers_are_refused_where_one_is_needed(trained, tmp_path):
    out = beside(trained, tmp_path, *PARENTS)
    with pytest.raises(Exception, match=r"rloo needs prompts with a right answer"):
        run_stages(grouped("rloo", RULES | {"reward_funcs": ["exact_answer"]}), out, "rloo")


def test_one_prompt_with_two_answers_is_refused(trained, tmp_path):
    changes = with_prompts(trained, tmp_path, 30)
    with (tmp_path / "sums.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "What is 3 plus 3?", "answer": "7"}) + "\n")
    out = tmp_path / "runs"
    loaded = grouped("grpo", RULES | {"reward_funcs": ["exact_answer"]}, **changes)
    run_stages(loaded, out, "pretrain", "sft")
    with pytest.raises(Exception, match=r"sums.jsonl:(4|31) and .*sums.jsonl:(4|31) have different right answers"):
        run_stages(loaded, out, "grpo")
    assert StageRun(out, loaded, "grpo").done() is None
