"""RLOO and GRPO from the command line to the merged model: resume, kills, rewards from functions."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf.errors import UserError
from rlhf.evaluation import compare
from rlhf.rating.pairs import pair_answers
from rlhf.recipe import as_yaml
from tests.helpers import GROUP, RECIPE, SMALL, Crash, beside, content_of, crash, grouped, run_stages
from tests.lines import read_intact_lines

ROOT = Path("cpu-tiny/v1")
PARENTS = ("pretrain", "sft", "rm")
SAME = ("adapter/adapter_model.safetensors", "metrics.jsonl", "samples.jsonl")
RULES = {"normalize_scores": False, "missing_eos_penalty": None}


def section(stage: str) -> dict[str, object]:
    """RLOO learns from the reward model alone, GRPO from a function too."""
    return {"reward_funcs": ["model", "length(most=3)"]} if stage == "grpo" else {}


@pytest.fixture(scope="module", params=["rloo", "grpo"])
def done(request, trained, tmp_path_factory) -> tuple[str, Path]:
    """A stage and the root of its finished run."""
    out = beside(trained, tmp_path_factory.mktemp(request.param), *PARENTS)
    run_stages(grouped(request.param, section(request.param)), out, request.param)
    return request.param, out


def test_what_a_run_leaves_and_who_knows_of_it(done, tmp_path):
    stage, whole = done
    rows = read_intact_lines(whole / ROOT / stage / "metrics.jsonl")
    assert len(rows) == 4 and all(row["groups/no_signal"] == 0 for row in rows)
    assert {"rewards/model", "groups/reward_sd", "objective/kl_per_token", "policy/entropy_avg"} <= rows[0].keys()
    assert ("loss/kl_avg" in rows[0]) == (stage == "grpo")
    summary = content_of(whole / ROOT / stage / "summary.json")
    assert summary["metrics"]["kl_per_token"] > 0 and summary["metrics"]["best_step"] in (1, 2, 3, 4)
    out = beside(whole, tmp_path, *PARENTS, stage)
    metrics = run_stages(grouped(stage, section(stage), merge__stage=stage), out, "evaluate", "merge")
    assert metrics["metrics"]["adapter_effect"] > 0
    metrics = content_of(out / ROOT / "evaluate/summary.json")["metrics"]
    assert ("grpo/reward_length" in metrics) == ("sft/reward_length" in metrics) == (stage == "grpo")
    assert {f"{stage}/score", f"{stage}/kl_per_token", f"{stage}/true_reward_gain_sd"} <= metrics.keys()
    assert compare.load(out / ROOT).policy == stage == pair_answers(out / ROOT).b


def test_after_a_crash_it_ends_with_the_same_bytes_and_is_not_begun_anew_by_accident(
    done, trained, tmp_path, monkeypatch
):
    stage, whole = done
    out = beside(trained, tmp_path, *PARENTS)
    folder, loaded = out / ROOT / stage, grouped(stage, section(stage))
    crash(monkeypatch, 2)
    with pytest.raises(Crash):
        run_stages(loaded, out, stage)
    monkeypatch.undo()
    kept = content_of(folder / "manifest.json")
    with pytest.raises(UserError, match=rf"{stage}.*--resume.*--restart"):
        run_stages(loaded, out, stage)
    assert content_of(folder / "manifest.json") == kept, "the run is as it was"
    run_stages(loaded, out, stage, resume=True)
    for name in SAME:
        assert (folder / name).read_bytes() == (whole / ROOT / stage / name).read_bytes(), name


def test_killed_without_warning_it_ends_with_the_same_bytes(trained, tmp_path):
    """SIGKILL between two steps of a longer run."""
    longer = GROUP | {"steps": 10, "eval_steps": 5}
    whole, cut = (beside(trained, tmp_path / name, *PARENTS) for name in ("whole", "cut"))
    run_stages(grouped("grpo", longer), whole, "grpo")
    flags = [part for key, value in SMALL.items() for part in ("--set", f"{key}={as_yaml(value)}")]
    flags += ["--set", f"grpo={json.dumps(longer)}"]
    line = [sys.executable, "-m", "rlhf.cli", "run", "grpo", "--recipe", str(RECIPE), "--out", str(cut), *flags]
    started = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(read_intact_lines(cut / ROOT / "grpo/metrics.jsonl")) < 4:
        assert started.poll() is None
        time.sleep(0.002)
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert not (cut / ROOT / "grpo/summary.json").exists()
    assert subprocess.run([*line, "--resume"], capture_output=True).returncode == 0
    assert content_of(cut / ROOT / "grpo/manifest.json")["resumed_from"] is not None
    for name in SAME:
        assert (cut / ROOT / "grpo" / name).read_bytes() == (whole / ROOT / "grpo" / name).read_bytes(), name


# -- rewards from functions --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_data(trained, tmp_path_factory):
    """Changes and root of a chain up to SFT on the toy's rows and prompts with an answer; no reward model."""
    folder = tmp_path_factory.mktemp("own")
    toy = min((trained / ROOT / "data").glob("toy-*"))  # other tests may have made some too
    file = folder / "sums.jsonl"
    rows = [{"prompt": f"What is {i} plus {i}?", "answer": 2 * i} for i in range(60)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [str(toy / "corpus.jsonl"), str(toy / "pairs.jsonl"), str(file)]
    changes = {"data__source": "files", "data__files": files}
    run_stages(grouped("grpo", RULES | {"reward_funcs": ["length(most=9)"]}, **changes), folder, "pretrain", "sft")
    return changes, folder


def test_functions_need_no_reward_model_and_see_the_answers(own_data, tmp_path, monkeypatch):
    changes, folder = own_data
    out = beside(folder, tmp_path, "pretrain", "sft")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seen_rewards.py").write_text(
        "def even(prompts, completions, answer, **more):\n"
        "    asked = [int(prompt.split('What is ')[1].split()[0]) for prompt in prompts]\n"
        "    assert answer == [str(2 * number) for number in asked]\n"
        "    return [len(c) % 2 for c in completions]\n"
    )
    names = ["seen_rewards:even", "length(most=3)", "numeric_answer"]
    loaded = grouped("grpo", RULES | {"reward_funcs": names, "reward_weights": [1.0, 0.5, 2.0]}, **changes)
    found = run_stages(loaded, out, "grpo")["metrics"]
    row = read_intact_lines(out / ROOT / "grpo/metrics.jsonl")[-1]
    parts = {"rewards/seen_rewards.even": 1.0, "rewards/length": 0.5, "rewards/numeric_answer": 2.0}
    assert row["objective/scores"] == pytest.approx(sum(w * row[name] for name, w in parts.items()), abs=1e-5)
    gain = found["reward_numeric_answer"] - found["reward_numeric_answer_sft"]
    assert found["reward_numeric_answer_gain"] == pytest.approx(gain)
    assert "rm" not in content_of(out / ROOT / "grpo/manifest.json")["parents"]


@pytest.mark.parametrize(
    ("reward", "named"),
    [("bad_rewards:nan", "bad_rewards:nan"), ("exakt_answer", "exact_answer"), ("bad_rewards:none", "bad_rewards")],
)
def test_a_reward_that_fails_ends_the_stage_with_one_line(own_data, tmp_path, monkeypatch, reward, named):
    changes, folder = own_data
    out = beside(folder, tmp_path, "pretrain", "sft")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad_rewards.py").write_text("def nan(completions, **more): return [float('nan')] * len(completions)\n")
    with pytest.raises(UserError, match=named) as caught:
        run_stages(grouped("grpo", RULES | {"reward_funcs": [reward]}, **changes), out, "grpo")
    assert "\n" not in str(caught.value)
