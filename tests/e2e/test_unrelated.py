"""Tasks that no stage trains, in an evaluation: a policy that forgot them, and one that did not."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from rlhf import report
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.errors import UserError
from rlhf.files import sha256
from rlhf.process.guest.host import ended_afterwards
from rlhf.run.directory import StageRun
from rlhf.stages import runner, unrelated
from tests.helpers import beside, content_of, run_stages, small

ROOT = Path("cpu-tiny/v1")
LETTERS = "regex(pattern='^[a-m]')"


@pytest.fixture(scope="module")
def done(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a chain to DPO and its evaluation, without tasks."""
    out = beside(trained, tmp_path_factory.mktemp("unrelated"), "pretrain", "sft", "rm")
    run_stages(small(), out, "dpo", "evaluate")
    return out


def tasks_of(folder: Path) -> list[dict[str, str]]:
    """A task whose answers are right or wrong by chance, and one that no policy solves; one of its rows counts."""
    rows = [{"prompt": f"What is {i}?", "answer": i} for i in range(5)]
    (folder / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "never.jsonl").write_text(json.dumps({"prompt": "Why?"}) + "\n" + json.dumps(rows[0]) + "\n")
    rewards = {"letters": LETTERS, "never": "exact_answer"}
    return [{"file": str(folder / f"{name}.jsonl"), "reward": reward} for name, reward in rewards.items()]


def test_tasks_are_measured_beside_everything_else(done, tmp_path, capsys):
    out = beside(done, tmp_path, "pretrain", "sft", "rm", "dpo")
    tasks = tasks_of(tmp_path)
    metrics = run_stages(small(evaluate__unrelated=tasks), out, "evaluate")["metrics"]
    without = content_of(done / ROOT / "evaluate/summary.json")["metrics"]
    assert {key: value for key, value in metrics.items() if "unrelated" not in key} == without
    ours, theirs = (root / ROOT / "evaluate/samples.jsonl" for root in (out, done))
    assert ours.read_bytes() == theirs.read_bytes()
    of_start, of_dpo = metrics["sft/unrelated_letters"], metrics["dpo/unrelated_letters"]
    assert metrics["dpo/change_of_unrelated_letters"] == pytest.approx(of_dpo - of_start)
    assert 0 < of_start < 1 and of_start * 15 == pytest.approx(round(of_start * 15)), "five prompts, three answers each"
    assert metrics["dpo/noise_of_unrelated_letters"] > 0
    assert [metrics[f"{p}/unrelated_never"] for p in ("base", "sft", "dpo")] == [0.0] * 3
    assert "base/change_of_unrelated_letters" not in metrics
    assert "dpo, tasks that were not trained: no loss beyond noise" in capsys.readouterr().err
    facts = content_of(out / ROOT / "evaluate/details.json")["unrelated"]
    assert facts["never"] == {**tasks[1], "sha256": sha256(tmp_path / "never.jsonl"), "prompts": 1}
    report.write([out / ROOT], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "What was not trained" in page and "no loss beyond noise" in page
    run = StageRun(out, small(evaluate__unrelated=tasks), "evaluate")
    assert run.done()
    with (tmp_path / "letters.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "What is next?", "answer": 5}) + "\n")
    assert not run.done(), "an evaluation is made anew where a file of a task has changed"


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"file": "absent.jsonl"}, "evaluate.unrelated: no file absent.jsonl"),
        ({"reward": "regexp(pattern='a')"}, "evaluate.unrelated: no reward 'regexp'"),
        ({"file": "."}, "evaluate.unrelated: no file ."),
        ({"rewards": "exact_answer"}, "evaluate.unrelated.0.rewards"),
    ],
)
def test_a_task_that_cannot_be_measured_is_refused_before_the_first_stage(tmp_path, task, said):
    with pytest.raises(UserError, match=said):
        runner.check_settings(small(evaluate__unrelated=[tasks_of(tmp_path)[0] | task]), "evaluate")


def test_the_file_names_the_task(tmp_path):
    first = tasks_of(tmp_path)[0]
    with pytest.raises(UserError, match="two files are named letters: rename one"):
        small(evaluate__unrelated=[first, first | {"file": "other/letters.json"}])


def test_rows_without_answers_are_no_checked_task(done, tmp_path):
    out = beside(done, tmp_path, "pretrain", "sft", "rm", "dpo")
    tasks_of(tmp_path)
    (tmp_path / "never.jsonl").write_text(json.dumps({"prompt": "Why?"}) + "\n")
    task = {"file": str(tmp_path / "never.jsonl"), "reward": "exact_answer"}
    with pytest.raises(UserError, match="has no prompts with a right answer"):
        run_stages(small(evaluate__unrelated=[task]), out, "evaluate")
    (tmp_path / "never.jsonl").write_text(json.dumps({"prompt": "Why?", "answer": "so"}) + "\n")
    with pytest.raises(UserError, match=r"never.jsonl: numeric_answer cannot judge responses to 'Why\?': the answer"):
        run_stages(small(evaluate__unrelated=[task | {"reward": "numeric_answer"}]), out, "evaluate", resume=False)


def test_a_function_of_ones_own_has_the_threads_of_the_stage_here_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "import torch\n\n\ndef threads(completions):\n    return [torch.get_num_threads()] * len(completions)\n"
    (tmp_path / "counts_threads.py").write_text(code)
    loaded = small(evaluate__unrelated=[tasks_of(tmp_path)[0] | {"reward": "counts_threads:threads"}])
    tokenizer = SimpleNamespace(encode_prompts=lambda prompts, longest: (prompts, 0))
    before = torch.get_num_threads()
    torch.set_num_threads(before + 2)
    try:
        with ended_afterwards():
            (task,) = unrelated.load(loaded.recipe, cast(DialogueTokenizer, tokenizer), tmp_path, torch.device("cpu"))
            assert task.function(["Why?"], ["so"], [None]) == [before + 2]
    finally:
        torch.set_num_threads(before)
