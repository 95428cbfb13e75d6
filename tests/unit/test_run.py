"""Run directories: done means done, nothing is lost, a checkpoint is whole or absent."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf import recipe
from rlhf.cli.outcome import show_chain
from rlhf.errors import UserError
from rlhf.files import JsonObject, write_json
from rlhf.process.task import task_of
from rlhf.recipe.chain import comparable
from rlhf.recipe.published import Figure
from rlhf.run import provenance
from rlhf.run.checkpoints import checkpoint_problem
from rlhf.run.directory import ParentMissing, StageRun
from rlhf.run.finished import finished_evaluation
from rlhf.run.records import Costs, Summary
from rlhf.stages import runner
from tests.helpers import RECIPE, content_of, rlhf, small
from tests.lines import read_intact_lines
from tests.records import write_records

ROOT = Path(__file__).parents[2]
DEVICE = {"name": "cpu", "type": "cpu"}
COSTS: Costs = {
    "tokens_per_second": 1.0,
    "phase_seconds": {},
    "peak_vram_bytes": None,
    "phase_peak_bytes": None,
    "reserved_vram_bytes": None,
    "used_vram_bytes": None,
    "phase_joules": None,
    "peak_rss_bytes": 1,
    "component_bytes": None,
}


def started(out, stage="sft", loaded=None, resume=False) -> StageRun:
    run = StageRun(out, loaded or small(), stage)
    run.start(resume, ["rlhf"], DEVICE)
    return run


def checkpoint(run: StageRun, step: int) -> None:
    def save(folder: Path) -> None:
        (folder / "state").write_text(f"state {step}")

    run.save_checkpoint(step, save)


def finished(run: StageRun, metrics: dict[str, float]) -> Summary:
    summary = run.finish(metrics, COSTS)
    assert summary is not None
    return summary


def test_a_stage_is_done_when_its_summary_is_there(tmp_path):
    run = started(tmp_path)
    assert StageRun(tmp_path, small(), "sft").done() is None
    run.finish({"perplexity": 2.0}, COSTS)
    summary = StageRun(tmp_path, small(), "sft").done()
    assert summary is not None
    assert (summary.recipe, summary.version, summary.stage) == ("cpu-tiny", "v1", "sft")


RELEASED = sorted(ROOT.glob("results/*/v*/*/*.json"))


@pytest.mark.parametrize("file", RELEASED, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_released_summary_is_read_and_has_every_key_and_value_of_its_file(file):
    for stages in content_of(file)["seeds"].values():
        for old in stages.values():
            again = Summary.model_validate(old).plain()
            assert json.dumps(again, sort_keys=True) == json.dumps(old, sort_keys=True)


def test_a_finished_run_of_other_settings_is_never_reused_or_overwritten(tmp_path):
    started(tmp_path).finish({}, COSTS)
    folder = tmp_path / "cpu-tiny/v1/sft"
    before = (folder / "summary.json").read_bytes()
    with pytest.raises(UserError, match=rf"{folder} was made with sft.learning_rate 0.002 .*0.5.*--out"):
        StageRun(tmp_path, small(sft__learning_rate=0.5), "sft").done()
    for reader_of_it in ("rm", "evaluate"):
        with pytest.raises(UserError, match=rf"{folder} was made with sft.learning_rate 0.002 .*0.5"):
            StageRun(tmp_path, small(sft__learning_rate=0.5), reader_of_it).require("sft")
    assert StageRun(tmp_path, small(ppo__kl_coef=0.5), "sft").done() is not None  # PPO's keys do not concern SFT
    assert (folder / "summary.json").read_bytes() == before


def test_a_run_of_an_earlier_version_is_read_past_keys_that_it_lacks(tmp_path):
    run = started(tmp_path)
    run.finish({}, COSTS)
    manifest = content_of(run.path / "manifest.json")
    del manifest["settings"]["data"]["turns"]
    manifest["settings"]["sft"]["train_on"] = "last"
    write_json(run.path / "manifest.json", manifest)
    assert StageRun(tmp_path, small(), "sft").done() is not None


def executed(monkeypatch, out: Path, resume: bool | None, **changes: Any) -> None:
    """Run pretraining up to its own code, which is not run here."""

    def run_stage(run, device):
        raise UserError("not run here")

    monkeypatch.setattr(runner, "import_stage", lambda stage: run_stage)
    loaded = small(**changes)
    runner.execute(task_of(loaded, "pretrain", out, resume=resume), loaded)


@pytest.mark.parametrize(("changes", "said"), [({}, "step 1"), ({"pretrain__max_steps": 24}, "pretrain.max_steps 12")])
def test_a_checkpoint_is_only_set_aside_by_an_option_whatever_the_settings(tmp_path, monkeypatch, changes, said):
    run = started(tmp_path, "pretrain")
    checkpoint(run, 1)
    with pytest.raises(UserError, match=rf"{run.path} .*{said}.*--restart"):
        executed(monkeypatch, tmp_path, None, **changes)
    with pytest.raises(UserError, match="not run here" if not changes else said):
        executed(monkeypatch, tmp_path, True, **changes)
    assert run.checkpoints.steps() == [1]
    with pytest.raises(UserError, match="not run here"):
        executed(monkeypatch, tmp_path, False, **changes)
    assert (tmp_path / "cpu-tiny/v1/pretrain.before-1/checkpoints/step-000001/state").exists()


def test_an_unfinished_run_without_a_checkpoint_is_replaced(tmp_path, capsys):
    started(tmp_path).logs.metrics(1, {"loss": 1.0})
    again = started(tmp_path, loaded=small(sft__learning_rate=0.5))
    assert read_intact_lines(again.path / "metrics.jsonl") == [] and not capsys.readouterr().err
    assert not (tmp_path / "cpu-tiny/v1/sft.before-1").exists()


def test_a_process_that_is_not_the_main_one_writes_nothing(tmp_path):
    run = started(tmp_path)
    checkpoint(run, 1)
    checkpoint(run, 2)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    other = StageRun(tmp_path, small(), "sft", is_main=False)
    received: list[object] = []
    other.logs.on_metrics = [lambda *row: received.append(row)]

    def write(folder: Path) -> None:
        raise AssertionError(f"{folder} would be written")

    with other.locked():
        other.start(False, ["rlhf"], DEVICE)
        other.describe(cuts={})
        other.logs.metrics(1, {"loss": 1.0})
        other.logs.telemetry(1, {"seconds": 1.0})
        other.logs.samples(1, [{"response": "a"}])
        other.logs.finding(1, {"check": "loss"})
        other.save_checkpoint(3, write)
        other.seal_checkpoint(3, tmp_path / "absent")
        other.checkpoints.keep_newest(keep=1, spare=None)
        assert other.finish({}, COSTS) is None
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before and not received


def test_a_missing_parent_is_named(tmp_path):
    with pytest.raises(ParentMissing, match=r"sft has not been run \(.*: first `rlhf run sft --with-parents`"):
        StageRun(tmp_path, small(), "rm").require("sft")
    started(tmp_path)
    with pytest.raises(ParentMissing, match=r"sft did not finish \(.*: first `rlhf run sft --with-parents --resume`"):
        StageRun(tmp_path, small(), "rm").require("sft")


@pytest.fixture
def evaluated(tmp_path: Path) -> Path:
    """The folder of a finished evaluation."""
    folder = tmp_path / "cpu-tiny/v1/evaluate"
    folder.mkdir(parents=True)
    (folder / "samples.jsonl").write_text('{"step": 0, "prompt": "earlier"}\n')
    write_records(folder)
    return folder


def evaluating(out: Path) -> StageRun:
    run = StageRun(out, small(), "evaluate")
    run.parent_hashes = lambda stage: {}  # type: ignore[method-assign]  # none are there, and none are needed
    return run


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, UserError])
def test_a_finished_evaluation_stays_until_another_one_is_finished(evaluated: Path, tmp_path, stopped):
    def text() -> str:
        return (evaluated / "samples.jsonl").read_text()

    earlier, run = text(), evaluating(tmp_path)
    with pytest.raises(stopped), run.locked():
        run.start(False, [], DEVICE)
        run.logs.samples(0, [{"prompt": "later"}])
        assert text() == earlier and finished_evaluation(evaluated.parent).stage == "evaluate"
        raise stopped("stopped")
    assert text() == earlier and finished_evaluation(evaluated.parent).stage == "evaluate"
    killed = evaluating(tmp_path)
    killed.start(False, [], DEVICE)
    killed.logs.samples(0, [{"prompt": "of a run that was killed"}])
    run = evaluating(tmp_path)
    with run.locked():
        run.start(False, [], DEVICE)
        run.logs.samples(0, [{"prompt": "later"}])
        assert run.finish({}, COSTS) is not None and run.path == evaluated
    assert "later" in text() and "killed" not in text() and finished_evaluation(evaluated.parent)
    aside = evaluated.with_name("evaluate.before-1")
    assert (aside / "samples.jsonl").read_text() == earlier
    assert {path.name for path in evaluated.parent.iterdir() if path.is_dir()} == {"evaluate", "evaluate.before-1"}


def test_an_evaluation_that_was_killed_between_two_renames_is_found_again(evaluated, tmp_path):
    beside = evaluated.parent / ".new" / "evaluate"
    beside.parent.mkdir()
    evaluated.rename(beside)
    with evaluating(tmp_path).locked():
        pass
    assert finished_evaluation(evaluated.parent).stage == "evaluate"


def test_numbers_that_json_does_not_know_become_null(tmp_path):
    run = started(tmp_path)
    run.logs.metrics(1, {"loss": float("nan"), "other": 1.0})
    assert read_intact_lines(run.path / "metrics.jsonl") == [{"step": 1, "loss": None, "other": 1.0}]
    assert finished(run, {"perplexity": float("inf")}).metrics == {"perplexity": None}


def test_resume_continues_and_forgets_what_came_after_the_checkpoint(tmp_path):
    run = started(tmp_path)
    for step in (1, 2, 3):
        run.logs.metrics(step, {"loss": float(step)})
        if step == 2:
            checkpoint(run, step)
    again = started(tmp_path, resume=True)
    assert again.resumed_from is not None
    assert again.resumed_from.name == "step-000002"
    assert [row["step"] for row in read_intact_lines(again.path / "metrics.jsonl")] == [1, 2]
    assert not (again.path / "findings.jsonl").exists(), "no log is made that was not there"


def test_resume_forgets_what_the_checkpoint_s_own_step_logged_after_it(tmp_path):
    run = started(tmp_path)
    run.logs.samples(1, [{"prompt": "a"}])
    checkpoint(run, 1)
    run.logs.samples(1, [{"prompt": "b"}])  # as a stage does after its last step
    run.logs.metrics(1, {"loss": 1.0})
    again = started(tmp_path, resume=True)
    assert read_intact_lines(again.path / "samples.jsonl") == [{"step": 1, "prompt": "a"}]
    assert read_intact_lines(again.path / "metrics.jsonl") == []


def test_the_logs_are_on_disk_before_the_summary_says_that_the_stage_is_done(tmp_path, monkeypatch):
    run = started(tmp_path, stage="evaluate")
    run.logs.samples(0, [{"prompt": "a"}])
    synced: list[str] = []
    for module in ("files", "run.logs"):
        monkeypatch.setattr(f"rlhf.{module}.sync", lambda path: synced.append(path.name))
    run.finish({}, COSTS)
    summary = next(name for name in synced if name.startswith(".summary.json."))
    assert synced.index("samples.jsonl") < synced.index(summary)


def test_a_run_that_was_begun_from_another_parent_is_not_continued(tmp_path):
    parent = tmp_path / "cpu-tiny/v1/pretrain/summary.json"
    parent.parent.mkdir(parents=True)
    parent.write_text("{}")
    run = started(tmp_path)
    checkpoint(run, 1)
    parent.write_text("{} ")
    with pytest.raises(UserError, match=f"^{run.path} was made with another pretrain .*--restart"):
        started(tmp_path, resume=True)


@pytest.mark.parametrize("damage", ["cut", "gone", "no record", "record cut"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, damage, capsys):
    run = started(tmp_path)
    checkpoint(run, 1)
    checkpoint(run, 2)
    newest = run.path / "checkpoints/step-000002"
    assert checkpoint_problem(newest) is None
    if damage == "cut":
        (newest / "state").write_text("st")
    elif damage == "gone":
        (newest / "state").unlink()
    elif damage == "no record":
        (newest / "checkpoint.json").unlink()
    else:
        (newest / "checkpoint.json").write_text('{"step": 2, "sha')
    latest = run.checkpoints.latest()
    assert latest is not None
    assert latest.name == "step-000001"
    err = capsys.readouterr().err
    assert "step-000002 cannot be used" in err and err.count(str(newest)) == 1 and "trying the one before" in err
    (latest / "checkpoint.json").unlink()
    assert run.checkpoints.latest() is None
    assert capsys.readouterr().err.strip().endswith("the stage begins anew")


def test_a_checkpoint_that_fails_while_it_is_written_leaves_no_trace_among_the_whole_ones(tmp_path):
    run = started(tmp_path)
    checkpoint(run, 1)

    def disk_full(folder):
        (folder / "state").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        run.save_checkpoint(2, disk_full)
    assert [p.name for p in (run.path / "checkpoints").glob("step-*")] == ["step-000001"]


def test_one_process_at_a_time_and_the_other_one_is_named(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "cpu-tiny/v1/sft")]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=rf"v1/sft: process {holder.pid} "), StageRun(tmp_path, small(), "sft").locked():
        pass
    holder.communicate("end")
    with StageRun(tmp_path, small(), "sft").locked():
        pass


HOLDER = """
import sys
from pathlib import Path
from rlhf.run.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("stage", "options", "reason"),
    [
        ("sft", [], "pretrain has not been run"),
        ("sft", ["--report-to", "trackio"], "first `rlhf run pretrain"),
        ("pretrain", ["--data", RECIPE / "recipe.yaml"], "recipe.yaml"),
    ],
)
def test_a_refused_command_leaves_nothing(tmp_path, monkeypatch, capsys, stage, options, reason):
    code, _, err = rlhf(
        monkeypatch, capsys, "run", stage, "--recipe", RECIPE, "--out", tmp_path / "new" / "runs", *options
    )
    assert code != 0 and reason in err
    assert everything_in(tmp_path) == []


def test_a_summary_compares_its_figures_and_keeps_those_of_all_stages(tmp_path, capsys):
    loaded = recipe.load(RECIPE.parents[1] / "h100-mistral-7b" / "v1")
    peaks = {"sft": 58, "rm": 25, "ppo": 70.2}
    for stage, peak in peaks.items():
        run = started(tmp_path, stage, loaded)
        run.logs.metrics(1, {"objective/scores": 1.0})
        costs = COSTS.copy()
        costs["peak_vram_bytes"] = round(peak * 1e9)
        costs["component_bytes"] = {"base": 14_480_000_000} if stage == "sft" else None
        run.finish({"train_pairs": 7000.0}, costs)
    summaries = [content_of(tmp_path / f"h100-mistral-7b/v1/{stage}/summary.json") for stage in peaks]
    compared = {(entry["name"], entry["published"][0]): entry for entry in summaries[0]["targets"]}
    assert compared["peak memory at batch 16 and 512 tokens", 61]["verdict"] == "reproduced"
    assert (compared["peak memory", 45]["verdict"], compared["peak memory", 45]["detail"]) == ("above", "+28.9 %")
    assert compared["memory of the base", 14]["measured"] == 14.48
    assert compared["memory of the optimizer", 28]["verdict"] == "not measured"
    assert {entry["stage"] for entry in summaries[0]["all_stages"]} == {"all"}
    finished = {summary["stage"]: Summary.model_validate(summary) for summary in summaries}
    show_chain({"sft": finished["sft"]})
    assert "not compared: needs rm, ppo" in " ".join(capsys.readouterr().out.split())
    show_chain(finished)
    printed = re.sub(r"[│ \n]+", " ", capsys.readouterr().out)
    assert "fits the card with LoRA (Overview) ≤ 80 GB 70.2 reproduced" in printed
    assert "cost of a run" not in printed  # times are compared on the card that they were published for


@pytest.mark.parametrize(
    ("stage", "key", "kept"),
    [
        ("ppo", "data.files", False),
        ("ppo", "ppo.steps", False),
        ("ppo", "dpo.beta", True),
        ("ppo", "hardware.trunk", True),
        ("evaluate", "dpo.beta", False),
    ],
)
def test_figures_of_a_recipe_are_left_out_where_it_was_changed(stage, key, kept):
    """Otherwise own data would be judged by what the toy world's targets ask for."""
    figure = Figure(name="KL", stage=stage, metric="kl_per_token", range=(0.05, 0.3), unit="nats", source="here")
    own = recipe.load(RECIPE).recipe
    assert comparable(figure, own, [])
    assert comparable(figure, own, ["evaluate.batch_size", key] if stage == "ppo" else [key]) == kept


def test_the_manifest_says_what_ran(tmp_path):
    run = started(tmp_path)
    data: JsonObject = {"sha256": "0" * 64, "files": [], "pairs": 3}
    run.describe(data=data)
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert manifest["recipe_sha256"] == run.loaded.sha256
    assert manifest["packages"]["torch"]
    assert manifest["data"] == data
    assert {"code", "device", "argv", "seed", "settings", "python"} <= set(manifest)


def test_only_code_and_known_recipes_make_the_code_changed(tmp_path, monkeypatch):
    monkeypatch.delenv("RLHF_COMMIT", raising=False)
    known, other = (tmp_path / "recipes" / name / "v1" / "recipe.yaml" for name in ("known", "other"))
    for file in (known, other):
        file.parent.mkdir(parents=True)
    known.write_text("seed: 0\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "ours"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "rlhf/run/provenance.py"))
    other.write_text("seed: 0\n")
    assert provenance.code_version().dirty is False, "a run names the hash of its recipe"
    known.write_text("seed: 1\n")
    assert provenance.code_version().dirty is True, "a recipe that git knows was changed"
    known.write_text("seed: 0\n")
    assert provenance.code_version().dirty is False
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/new.py").touch()
    assert provenance.code_version().dirty is True
