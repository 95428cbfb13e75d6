"""The experiments: arms are recipes that load, figures and intervals are right, and page and log show the records."""

import json
import math
from pathlib import Path

import pytest
import torch

from bench.docs_tables import BLOCK
from bench.paths import ROOT
from rlhf import recipe
from rlhf.errors import UserError
from rlhf.models.nf4 import round_to_nf4
from rlhf.stages import ppo, runner
from studies.experiments import __main__ as experiments
from studies.experiments import runs
from studies.experiments.table import EXPERIMENTS, Arm, Reading, critic_of_policy
from studies.paths import EXPERIMENTS as FOLDER


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_arm_is_a_recipe_with_the_stages_that_it_trains_and_reads(name):
    experiment = EXPERIMENTS[name]
    for arm in experiment.arms.values():
        loaded = recipe.load(experiment.recipe, {**experiment.shared, **arm.changes}).recipe
        for stage in (*experiment.base, *experiment.stages):
            assert loaded.section(stage) is not None
            assert set(recipe.parents(loaded, stage)) <= {*experiment.base, *experiment.stages}
    assert {reading.stage for reading in experiment.readings} <= set(experiment.stages)


def test_a_fresh_critic_is_the_policy_with_a_head_of_zeros_and_only_within_the_block():
    class Base:
        class roles:
            @staticmethod
            def parameters(role: str) -> list[str]:
                return [f"adapter of {role}"]

        def add_value_copy(self) -> torch.nn.Linear:
            return torch.nn.Linear(2, 1, bias=False)

    usual = ppo.new_critic
    with critic_of_policy():
        head, adapter = ppo.new_critic(Base(), Path(), None, None)  # type: ignore[arg-type]  # stand-ins
    assert head.shape == (1, 2) and adapter == "adapter of value" and ppo.new_critic is usual


@pytest.mark.parametrize("seeds", experiments.T95)
def test_intervals_over_seeds_are_those_of_students_t(seeds):
    """The probability between -t and t, integrated from the density."""
    t, df = experiments.T95[seeds], seeds - 1
    constant = math.gamma((df + 1) / 2) / (math.sqrt(df * math.pi) * math.gamma(df / 2))
    points = torch.linspace(-t, t, 100_001, dtype=torch.float64)
    inside = torch.trapezoid(constant * (1 + points**2 / df) ** (-(df + 1) / 2), points).item()
    assert inside == pytest.approx(0.95, abs=1e-4)
    estimate = experiments.over_seeds([0.0] * (seeds - 1) + [1.0])
    assert estimate and estimate.high - estimate.value == pytest.approx(t / seeds)  # sd/√n of one 1 is 1/n


def test_a_table_has_intervals_of_three_seeds_both_values_of_two_and_the_paired_difference_of_two_arms():
    def run(value: float | None) -> dict[str, object]:
        return {"figures": {"gain": value}, "cpu_seconds": 1.0}

    record = {"runs": {"a": {str(n): run(float(n)) for n in (1, 2, 3)}, "b": {str(n): run(n + 0.5) for n in (1, 2, 3)}}}
    assert experiments.table(record).splitlines() == [  # type: ignore[arg-type]
        "|  | a | b | difference |",
        "| --- | ---: | ---: | ---: |",
        "| gain | 2 (-0.484 to 4.48) | 2.5 (0.0157 to 4.98) | +0.5 (+0.5 to +0.5) |",
    ]
    record["runs"] = {"a": {"0": run(1.0), "1": {"figures": {}, "cpu_seconds": 0.0, "ended": "nan"}}}
    assert experiments.table(record).splitlines()[2:] == ["| a | 1, – |"]  # type: ignore[arg-type]


def test_a_logged_figure_is_the_mean_over_its_steps(tmp_path):
    lines = [{"step": step, "val": step / 10} | ({"eval": 1.0} if step == 4 else {}) for step in range(1, 7)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert runs.logged(tmp_path, Reading("", "ppo", "val", (2, 4))) == pytest.approx(0.3)
    assert runs.logged(tmp_path, Reading("", "ppo", "eval", (4, 4))) == 1.0
    assert runs.logged(tmp_path, Reading("", "ppo", "eval", (1, 3))) is None


def test_an_arm_whose_loss_is_no_number_is_a_result(monkeypatch, tmp_path):
    def ended(*arguments: object, **options: object) -> None:
        raise UserError("sft: the loss is not a number")

    monkeypatch.setattr(runner, "execute", ended)
    experiment = EXPERIMENTS["rate-sft"]
    found = runs.run_arm(experiment, recipe.load(experiment.recipe), Arm({}), tmp_path, tmp_path)
    assert found == {"figures": {}, "cpu_seconds": 0.0, "ended": "sft: the loss is not a number"}


def test_rounded_weights_are_what_an_nf4_layer_computes_with():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)

    class Plain(torch.nn.Sequential):
        def get_output_embeddings(self) -> None:
            """It has none, so all of its layers are rounded."""

    plain = Plain(torch.nn.Linear(64, 64, bias=False))
    packed = bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    packed.load_state_dict(plain[0].state_dict())
    packed.to("cpu")
    round_to_nf4(plain)  # type: ignore[arg-type]
    row = torch.randn(3, 64)
    assert torch.allclose(plain(row), packed(row), atol=2e-3)


def test_the_page_shows_the_newest_record_of_each_experiment_which_is_of_committed_code():
    page = (FOLDER / "README.md").read_text()
    shown = {block["name"]: block["table"] for block in BLOCK.finditer(page)}
    recorded = {file.name.split("_")[0] for file in (FOLDER / "results").glob("*.json")}
    assert recorded == set(shown) and recorded <= set(EXPERIMENTS)
    for name in recorded:
        record = experiments.newest_record(name)
        assert shown[name] == experiments.table(record)
        assert record["code"]["dirty"] is False
        assert record["recipe_sha256"] == recipe.load(EXPERIMENTS[name].recipe).sha256
        assert record["arms"] == {arm: dict(setting.changes) for arm, setting in EXPERIMENTS[name].arms.items()}
        assert f"studies/experiments/README.md#{name.partition('-')[0]}" in (ROOT / "docs/log.md").read_text()
