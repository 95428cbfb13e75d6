"""Stages that others build on: looked for, verified and refused before anything is trained."""

from pathlib import Path

import pytest

from rlhf.cli import chain as chains
from rlhf.errors import UserError
from rlhf.run.directory import StageRun
from tests.helpers import RECIPE, SMALL, beside, rlhf, run_stages, small

ROOT = Path("cpu-tiny/v1")
SETS = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
PARENTS = ("pretrain", "sft", "rm")
ADAPTER = ROOT / "ppo/adapter/adapter_model.safetensors"


def test_an_experiment_in_a_root_of_its_own_builds_on_stages_that_are_copied_or_linked_there(trained, tmp_path):
    bytes_of = []
    for name in ("one", "other"):
        out = beside(trained, tmp_path / name, *PARENTS)
        run_stages(small(ppo__kl_coef=0.05), out, "ppo")
        bytes_of.append((out / ADAPTER).read_bytes())
    assert bytes_of[0] == bytes_of[1]
    run = StageRun(tmp_path / "one", small(sft__learning_rate=0.5), "ppo")
    with pytest.raises(UserError, match=r"sft\.learning_rate"):
        run.require("sft")


def test_an_evaluation_trains_no_policy_where_one_is_trained(tmp_path):
    assert chains.stages_before(StageRun(tmp_path, small(), "evaluate")) == [*PARENTS, "ppo"]
    (tmp_path / ROOT / "dpo").mkdir(parents=True)
    (tmp_path / ROOT / "dpo/summary.json").write_text("{}")
    assert chains.stages_before(StageRun(tmp_path, small(), "evaluate")) == [*PARENTS]


@pytest.mark.parametrize(
    ("stage", "changes", "named"),
    [
        ("rm", {"rm.learning_rate": 0.5}, "rm.learning_rate"),
        ("ppo", {"rm.learning_rate": 0.5}, "rm.learning_rate"),
        ("grpo", {}, "grpo"),
        ("ppo", {"ppo.reward_funcs": "[model,numeric_answr]"}, "numeric_answer"),
        ("ppo", {"ppo.reward_funcs": "[model,'absent_module:polite']"}, "absent_module:polite"),
    ],
)
def test_what_a_stage_cannot_do_is_said_before_its_parents_are_trained(
    trained, tmp_path, monkeypatch, capsys, stage, changes, named
):
    beside(trained, tmp_path, "pretrain", "rm")
    sets = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    command = ["run", stage, "--with-parents", "--recipe", str(RECIPE), "--out", str(tmp_path), *SETS, *sets]
    code, out, err = rlhf(monkeypatch, capsys, *command)
    assert code == 1 and named in err and "stage 1 of" not in out
    assert not (tmp_path / ROOT / "sft").exists()
