"""A released recipe whose file was edited: each place that names it says so, and its targets get no verdict."""

import json
import re
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from rlhf import recipe
from rlhf.cli.summary_tables import summary_table, targets_table
from rlhf.files import sha256
from rlhf.recipe import PinnedRecipe, plain_yaml, released
from rlhf.recipe.moved import is_moved
from rlhf.report import records, tables
from rlhf.run.directory import StageRun
from rlhf.run.records import Costs, Summary
from tests.helpers import FIXTURES, RECIPE, not_none, rlhf

ROOT = Path(__file__).parents[2]
ALL = [directory for root in (ROOT / "recipes", FIXTURES) for directory in recipe.available(root)]
RELEASED = [directory for directory in ALL if recipe.load(directory).recipe.status == "released"]
COSTS: Costs = {
    "tokens_per_second": None,
    "phase_seconds": {},
    "peak_vram_bytes": None,
    "phase_peak_bytes": None,
    "reserved_vram_bytes": None,
    "used_vram_bytes": None,
    "phase_joules": None,
    "peak_rss_bytes": 1,
    "component_bytes": None,
    "peak_over_loaded_bytes": None,
}


@pytest.fixture
def edited(tmp_path) -> PinnedRecipe:
    """The recipe cpu-tiny v1 with another learning rate in its file."""
    folder = copytree(RECIPE, tmp_path / "recipes" / "cpu-tiny" / "v1")
    text = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(re.sub(r"(?m)^(ppo:\n(?:  .*\n)*?  steps: )\d+", r"\g<1>3", text))
    return recipe.load(folder)


def finished(loaded: PinnedRecipe, out: Path) -> Summary:
    """The summary of PPO of a recipe, with a figure for one of its targets."""
    run = StageRun(out, loaded, "ppo")
    run.parents.hashes = dict  # type: ignore[method-assign]  # none are there, and none are needed
    run.start(resume=False, argv=[], device={"name": "cpu", "type": "cpu"})
    summary = run.finish({"true_reward_gain_sd": 2.0}, COSTS)
    assert summary is not None
    return summary


def words(text: str) -> str:
    """Printed text without line breaks and the frames of tables."""
    return " ".join(re.sub(r"[│┃]", " ", text).split())


def test_the_hashes_of_released_recipes_are_those_of_their_records_and_files():
    loaded = [recipe.load(directory) for directory in ALL]
    files = {f"{one.name}/{one.version}": one.sha256 for one in loaded if one.recipe.status == "released"}
    records = [json.loads(file.read_text()) for file in sorted((ROOT / "results").glob("*/v*/*/*.json"))]
    own_rows = [record for record in records if "rows" not in record]  # drafts alone have records of other rows
    hashes = {f"{r['recipe']}/{r['version']}": r["recipe_sha256"] for r in own_rows}
    assert {name: sha256 for name, sha256 in hashes.items() if name in files} == files == released.SHA256


def test_an_edited_released_recipe_is_modified_and_no_longer_released(edited):
    difference = f"differs from its released version: sha256 {edited.sha256[:12]}, released f2f085fb36b0"
    assert (edited.modified, edited.status) == (True, difference)
    original = recipe.load(RECIPE)
    assert (original.modified, original.status, original.released_sha256) == (False, "released", None)
    assert edited.figures and all(figure.not_comparable for figure in edited.figures)
    assert not any(figure.not_comparable for figure in original.figures)


@pytest.mark.parametrize("by", ["--recipe", "--hw"])
def test_the_first_line_of_a_command_says_that_the_recipe_was_edited(edited, tmp_path, monkeypatch, capsys, by):
    root = edited.directory.parents[1]
    named = ("--recipe", edited.directory) if by == "--recipe" else ("--hw", "cpu", "--recipe-root", root)
    _, _, err = rlhf(monkeypatch, capsys, "report", *named, "--out", tmp_path / "runs")
    assert err.splitlines()[0] == f"recipe: {edited.directory} ({edited.status})"
    _, out, _ = rlhf(monkeypatch, capsys, "recipes", "--recipe-root", root)
    assert " edited " in words(out) and " released " not in words(out)


def test_the_summary_and_its_tables_say_it_and_show_targets_without_a_verdict(edited, tmp_path, capsys):
    summary = finished(edited, tmp_path)
    assert (summary.modified, summary.released_sha256) == (True, released.SHA256["cpu-tiny/v1"])
    target = next(target for target in summary.targets if target.metric == "true_reward_gain_sd")
    assert (target.measured, str(target.outcome)) == (2.0, "not compared: target of the released recipe")
    for show in (summary_table, lambda one: targets_table([one])):
        show(summary)
        printed = words(capsys.readouterr().out)
        assert "modified recipe" in printed and "released f2f085fb36b0" in printed
        assert "target of the released recipe" in printed and " met " not in printed and "missed" not in printed


def test_a_released_recipe_that_nobody_edited_is_judged(tmp_path, capsys):
    summary = finished(recipe.load(RECIPE), tmp_path)
    assert (summary.modified, summary.released_sha256) == (False, None)
    summary_table(summary)
    printed = words(capsys.readouterr().out)
    assert " met " in printed and "modified" not in printed


def test_the_report_says_it_and_judges_no_target(edited, tmp_path):
    finished(edited, tmp_path)
    run = records.load(tmp_path / "cpu-tiny/v1")
    assert edited.status in {cell.text for row in not_none(tables.provenance(run)).rows for cell in row}
    verdicts = {row[-1].text for row in not_none(tables.figures(run, None)).rows}
    assert all(verdict.startswith("not compared") for verdict in verdicts)


def leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a recipe by their dotted keys."""
    plain: dict[str, Any] = {}
    for key, value in values.items():
        plain |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return plain


def test_the_defaults_of_released_recipes_never_change():
    """What their files leave out has the value that it had when they were released, or is gone."""
    defaults = json.loads((Path(__file__).parent / "released_defaults.json").read_text())
    there: set[str] = set()
    for directory in RELEASED:
        written = leaves(plain_yaml.read_yaml(directory / "recipe.yaml"))
        resolved = leaves(recipe.load(directory).recipe.model_dump(mode="json"))
        for key, value in defaults.items():
            if key in resolved and key not in written:
                assert resolved[key] == value, f"{directory}: {key}"
        there |= resolved.keys()
    assert [key for key in defaults if key not in there and not is_moved(key)] == []


# Hashes of the released recipes' targets: they were set before the record, and are not moved after it.
TARGETS = {
    "cpu-tiny/v1": "3a75f2b9ab7be481",
    "cpu-tiny/v2": "bda85cb920d28a9c",
    "cpu-tiny-groups/v1": "f2a2c283b20c53b7",
    "cpu-tiny-sums/v1": "d526f9597a6e94b5",
    "cpu-smollm2-sums/v1": "474ee0172f85934e",
    "cpu-smollm2-chain-sum/v1": "59e923a5329642cd",
}


def test_the_targets_of_released_recipes_never_change():
    files = {f"{d.parent.name}/{d.name}": d / "published.yaml" for d in RELEASED}
    assert {name: sha256(file)[:16] for name, file in files.items()} == TARGETS
