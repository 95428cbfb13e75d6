"""Results are evidence: made by a released recipe, unmodified, from committed code, and the README shows just them."""

import json
from pathlib import Path

import pytest

from bench import results
from bench.gpu import record as gpu_record
from bench.peer import __main__ as peer
from rlhf import recipe
from rlhf.errors import UserError
from rlhf.use import reproduce
from tests.conftest import rlhf

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "results").glob("*/*/*/*.json"))
RELEASED = [d for d in recipe.available(ROOT / "recipes") if recipe.load(d).recipe.status == "released"]


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: "/".join(file.relative_to(ROOT / "results").parts))
def test_a_record_belongs_to_a_released_recipe_that_has_not_changed_since(file):
    record = json.loads(file.read_text())
    name, version, device, _ = file.relative_to(ROOT / "results").parts
    loaded = recipe.load(ROOT / "recipes" / name / version)
    assert (record["recipe"], record["version"]) == (name, version)
    assert record["recipe_sha256"] == loaded.sha256, "a released recipe is frozen: make the change a new version"
    assert not record["modified"]
    assert record["code"]["dirty"] is False
    assert len(record["code"]["commit"]) == 40
    assert device in record["device"]["name"].lower().replace(" ", "-")
    for seed, stages in record["seeds"].items():
        for stage, summary in stages.items():
            assert (summary["stage"], summary["seed"], summary["status"]) == (stage, int(seed), "done")
            assert not summary["modified"]


def test_every_record_of_a_gpu_can_be_traced():
    """Committed code, an unchanged recipe of today, a real GPU, and the place that its content asks for."""
    for file in sorted((ROOT / "results").rglob("*.json")):
        record = json.loads(file.read_text())
        if "gpu_item" in record:
            assert gpu_record.problems(record, ROOT / "recipes") == [], file
            assert file.relative_to(ROOT / "results") == gpu_record.path_of(record)


def test_the_page_of_results_is_made_from_the_records():
    assert (ROOT / "results/README.md").read_text() == results.page(), "out of date: `make results-index`"


@pytest.mark.parametrize(
    ("folder", "page"), [("trl-1.12-ppo", "ppo.md"), ("trl-1.16-grpo", "groups.md"), ("trl-1.16-rloo", "groups.md")]
)
def test_a_page_shows_the_newest_comparison_with_the_peer(folder, page):
    newest = max((ROOT / "results/peers" / folder).glob("cpu_*.json"), key=lambda file: file.name)
    record = json.loads(newest.read_text())
    assert record["code"]["dirty"] is False
    text = (ROOT / "docs" / page).read_text()
    assert peer.markdown(record) in text
    assert peer.phases_table(record) in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(lambda r: r.update(seeds={}), "seeds: dictionary should have at least 1 item", id="seeds0"),
        pytest.param(lambda r: r.update(seeds=None), "seeds: input should be a valid dict", id="seedsx"),
        pytest.param(lambda r: r.update(seeds={"0": 5}), "seeds.0: input should be a valid dict", id="seedsy"),
        pytest.param(lambda r: r.update(seeds={"0": {}}), "every seed needs the same stages", id="seeds-none"),
        pytest.param(lambda r: r["seeds"]["0"].pop("ppo"), "every seed needs the same stages", id="seeds-differ"),
        pytest.param(
            lambda r: r["seeds"]["1"]["ppo"]["targets"].pop(), "every seed needs the same", id="targets-differ"
        ),
        pytest.param(lambda r: r["seeds"]["0"]["ppo"].pop("wall_seconds"), "ppo.wall_seconds' is missing", id="wall"),
        pytest.param(lambda r: r.pop("packages"), "key 'packages' is missing", id="packages"),
        pytest.param(lambda r: r.update(device="cpu"), "device: input should be", id="device"),
    ],
)
def test_a_record_that_is_damaged_is_one_line(tmp_path, monkeypatch, capsys, change, said):
    record = json.loads(next(file for file in RECORDS if "cpu-tiny" in file.parts).read_text())
    change(record)
    file = tmp_path / "record.json"
    file.write_text(json.dumps(record))
    code, out, err = rlhf(monkeypatch, capsys, "results", file)
    assert code == 1 and out == "" and len(err.splitlines()) == 1 and said in err


@pytest.mark.parametrize("directory", RELEASED, ids=lambda d: f"{d.parent.name}-{d.name}")
def test_a_released_recipe_has_a_record(directory):
    assert [file for file in RECORDS if file.parts[-4:-2] == directory.parts[-2:]]


def test_the_readme_shows_the_newest_record_of_the_cpu_recipe():
    newest = max((file for file in RECORDS if "cpu-tiny" in file.parts), key=lambda file: file.name)
    table = reproduce.table_of(newest)
    assert table in (ROOT / "docs/results.md").read_text()
    seeds = len(json.loads(newest.read_text())["seeds"])
    without_seeds = {tuple(cells(line)[:3] + cells(line)[3 + seeds :]) for line in table.splitlines()}
    page = (ROOT / "README.md").read_text().split("## Results")[1].split("**Predicted**")[0]
    shown = [tuple(cells(line)) for line in page.splitlines() if line.startswith("|")][2:]
    assert len(shown) >= 6 and set(shown) <= without_seeds


def cells(row: str) -> list[str]:
    """The cells of one line of a Markdown table."""
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read"),
        ('{"a": 1}', "not a record of a measurement"),
        ('{"seeds": {}}', "a record of seeds: key 'recipe' is missing"),
    ],
)
def test_the_page_of_results_names_a_record_that_is_damaged(tmp_path, content, said):
    (tmp_path / "cpu_2026-01-01.json").write_text(content)
    with pytest.raises(UserError, match=said):
        results.page(tmp_path)
