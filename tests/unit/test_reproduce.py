"""`rlhf reproduce`: what it starts for each seed, what it records and what it refuses to put into one table."""

import json
import re
from pathlib import Path
from shutil import copytree

import pytest

from rlhf import recipe
from rlhf.errors import UserError
from rlhf.evaluation import conditions, reproduce
from rlhf.process import children
from rlhf.process.exhaustion import EXHAUSTED
from rlhf.process.task import Task
from rlhf.run import reader
from rlhf.run.outcomes import Reproduction
from rlhf.run.records import Summary
from rlhf.terminal import wording
from tests.helpers import RECIPE, noted, rlhf, task_of
from tests.records import summary_of, write_records

ROOT = Path(__file__).parents[2]
LOADED = recipe.load(RECIPE)
PACKAGES = dict.fromkeys(("torch", "transformers", "trl", "peft"), "1")


def measured(out: Path, seed: int, **manifest: object) -> None:
    """A finished SFT of one seed."""
    folder = reproduce.runs_root(out, seed) / LOADED.name / LOADED.version / "sft"
    write_records(folder, {"python": "3.11.9", "packages": PACKAGES} | manifest)


def test_each_seed_and_stage_is_a_run_that_keeps_and_resumes_what_is_there(tmp_path, monkeypatch):
    run: list[Task] = []
    monkeypatch.setattr(children, "run_child", lambda words, _: noted(run, task_of(words), 0))
    changed = LOADED.with_changes({"ppo.steps": 3})
    reproduce.run_seeds(changed, ["sft", "rm"], [0, 7], tmp_path)
    assert [(task.stage, task.out) for task in run] == [
        (stage, str(tmp_path / f"seed-{seed}")) for seed in (0, 7) for stage in ("sft", "rm")
    ]
    for task in run:
        assert task.if_needed and task.resume
        assert task.load() == recipe.load(RECIPE, {"ppo.steps": 3}, int(task.out[-1]))


def test_a_seed_that_stops_names_its_command_and_keeps_its_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(children, "run_child", lambda *_: EXHAUSTED)
    with pytest.raises(SystemExit) as stopped:
        reproduce.run_seeds(LOADED, ["sft"], [0], tmp_path)
    assert stopped.value.code == EXHAUSTED
    assert re.match(
        r"error: seed 0 stopped in sft; .*repeat this .*\(.*: `rlhf run sft .*/seed-0/cpu-tiny/v1 --resume`",
        capsys.readouterr().err,
    )


def test_a_record_holds_every_seed_and_is_read_back(tmp_path):
    for seed in (0, 1):
        measured(tmp_path, seed)
    record = reproduce.write_record(LOADED, ["sft"], [0, 1], tmp_path, price=2.0)
    assert record.seeds.keys() == {"0", "1"} and record.price_per_hour == 2.0
    assert reader.read(tmp_path / "cpu-tiny-v1.json", Reproduction) == record


OWN_ROWS = {"data.source": "files", "data.files": ["/my/rows.jsonl"], "data.format": "auto", "data.name": None}


@pytest.mark.parametrize("others", [{}, {"ppo.steps": 3}])
def test_a_record_names_the_files_of_own_rows_and_what_else_was_changed(tmp_path, others):
    file = {"name": "/my/rows.jsonl", "sha256": "a" * 64, "rows": 9}
    measured(tmp_path, 0, data={"sha256": "b" * 64, "files": [file]})
    loaded = LOADED._replace(overrides=OWN_ROWS | others)
    record = reproduce.write_record(loaded, ["sft"], [0], tmp_path)
    assert [(one.name, one.sha256) for one in record.rows] == [("rows.jsonl", "a" * 64)]
    assert json.loads((tmp_path / "cpu-tiny-v1.json").read_text())["overrides"] == others
    assert ", rows of rows.jsonl (sha256 aaaaaaaaaaaa), " in reproduce.markdown(record)


def test_a_record_of_other_rows_is_not_shown_beside_the_recipes_own(tmp_path):
    folder = tmp_path / "recipes/cpu-tiny/v1"
    copytree(RECIPE, folder)
    record = next((ROOT / "results/cpu-tiny/v1/cpu").glob("*.json"))
    kept = tmp_path / "results/cpu-tiny/v1/cpu/2026-01-01.json"
    kept.parent.mkdir(parents=True)
    for rows, shown in (([], True), ([{"name": "rows.jsonl", "sha256": "a" * 64}], False)):
        kept.write_text(json.dumps(json.loads(record.read_text()) | {"rows": rows}))
        assert (reproduce.record_of(recipe.load(folder)) is not None) is shown


@pytest.mark.parametrize(
    "other",
    [
        {"python": "3.12.1"},
        {"code": {"commit": "abc", "dirty": None}},
        {"packages": PACKAGES | {"torch": "2"}},
        {"device": {"name": "another", "type": "cpu"}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_seeds_of_another_code_python_package_or_device_are_in_no_table(tmp_path, other):
    measured(tmp_path, 0)
    measured(tmp_path, 1, **other)
    key, folder = next(iter(other)), tmp_path / "seed-1/cpu-tiny/v1/sft"
    with pytest.raises(UserError, match=rf"^{folder}: {key}\S* is .*, and .* in {tmp_path}/seed-0/cpu-tiny/v1/sft; "):
        reproduce.write_record(LOADED, ["sft"], [0, 1], tmp_path)
    assert not (tmp_path / "cpu-tiny-v1.json").exists()


def test_a_stage_that_would_not_fit_into_the_table_is_not_begun(tmp_path, monkeypatch):
    measured(tmp_path, 0, python="2.7")
    run: list[str] = []
    monkeypatch.setattr(children, "run_child", lambda words, _: noted(run, task_of(words).stage, 0))
    now = {"code": {"commit": None, "dirty": None}, "packages": PACKAGES, "python": "3.11.9", "device": {"type": "cpu"}}
    monkeypatch.setattr(conditions, "of_this_process", lambda loaded: now)
    with pytest.raises(UserError, match=r"seed-0/cpu-tiny/v1/rm: python is 3\.11\.9, and 2\.7 in .*/v1/sft; one table"):
        reproduce.run_seeds(LOADED, ["sft", "rm"], [0], tmp_path)
    assert run == ["sft"], "it is done, and was kept"


def test_what_is_done_everywhere_is_shown_before_a_refusal(tmp_path, monkeypatch, capsys):
    measured(tmp_path, 0)
    measured(tmp_path, 1, python="3.12.1")
    monkeypatch.setattr(children, "run_child", lambda command: 0)
    options = ("--recipe", RECIPE, "--seeds", "0,1", "--stage", "sft", "--out", tmp_path)
    code, out, err = rlhf(monkeypatch, capsys, "reproduce", *options)
    assert code == 1 and "cpu-tiny v1, seeds 0 1" in out and "wall time, s" in out
    assert "seed-1/cpu-tiny/v1/sft: python is 3.12.1, and 3.11.9 in" in err
    assert not (tmp_path / "cpu-tiny-v1.json").exists()


def test_the_conditions_of_this_process_are_those_that_a_stage_writes():
    now = conditions.of_this_process(LOADED)
    assert now.keys() == set(conditions.KEYS) and now["device"]["type"] == "cpu" and now["device"]["model"]


def test_recorded_figures_stand_beside_those_of_the_same_seed():
    found = reproduce.record_of(LOADED)
    assert found is not None and found[0].parts[-4:-1] == ("cpu-tiny", "v1", "cpu")
    seeds = found[1].seeds
    target = seeds["0"]["ppo"].targets[0]
    assert target.measured is not None
    changed = Summary.model_validate(
        seeds["0"]["ppo"].plain()
        | {
            "targets": [
                target.plain() | {"measured": target.measured + 1e-9},
                *seeds["0"]["ppo"].plain()["targets"][1:],
            ]
        }
    )
    table = reproduce.rows({"0": {"ppo": changed}, "9": {"ppo": seeds["1"]["ppo"]}}, None, seeds)
    first, second = table[1], table[2]
    shown = wording.number(target.measured)
    assert first[3] == f"{shown} (recorded {shown}: different by +1e-09)"
    assert second[3].endswith(": equal)") and "recorded" not in second[4], "no seed 9 is recorded"
    assert not any("recorded" in cell for row in reproduce.rows({"0": {"ppo": changed}}) for cell in row)


def test_a_changed_recipe_and_one_without_records_have_no_recorded_figures(tmp_path):
    assert reproduce.record_of(LOADED.with_changes({"ppo.steps": 3})) is None
    assert reproduce.record_of(recipe.load(copytree(RECIPE, tmp_path / "recipes/cpu-tiny/v1"))) is None


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1.0, 2.0, 3.0], "2 ± 1"),
        ([1.0, float("nan"), 3.0, float("inf"), None], "2 ± 1.414"),
        ([2.0, None], "2"),
        ([None, float("nan")], "-"),
    ],
)
def test_mean_and_deviation_are_those_of_the_finite_values(values, text):
    assert reproduce.mean_sd(values) == text


def test_a_stage_without_targets_has_its_main_figure():
    gain = {"true_reward_sft": 0.5, "true_reward_gain_sd": 1.0, "response_length_sft": 9.0}
    seeds = {
        str(seed): {
            "rm": summary_of(stage="rm", metrics={"accuracy": 0.7 + 0.1 * seed}),
            "dpo": summary_of(stage="dpo", metrics=gain | {"true_reward": 1.0 + seed}),
        }
        for seed in range(2)
    }
    rows = {row[:2]: row[3:] for row in reproduce.rows(seeds)}
    assert rows["rm", "accuracy"][:3] == ("0.7", "0.8", "0.75 ± 0.07071")
    assert rows["dpo", "true reward, 0.5 at the start"][:2] == ("1", "2")
