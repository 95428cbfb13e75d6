"""Results are evidence: made by a released recipe, unmodified, from committed code, and the README shows just them."""

import json
import re
from pathlib import Path
from shutil import copytree

import pytest

from bench import recipe_index, records, results
from bench.kinds import PeerRecord, SameRecord
from bench.memory import budgets
from bench.paths import newest
from bench.peer import figures
from bench.reading import read
from rlhf import recipe
from rlhf.errors import UserError
from rlhf.evaluation import reproduce
from rlhf.files import sha256
from rlhf.plan import prediction_file
from rlhf.recipe.pinned import content_hash
from rlhf.run import reader
from rlhf.run.evidence import gains_over_start
from rlhf.run.outcomes import Reproduction
from tests.helpers import not_none, rlhf

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "results").rglob("*.json"))
SEEDS = [file for file in RECORDS if "seeds" in json.loads(file.read_text())]
RELEASED = [d for d in recipe.available(ROOT / "recipes") if recipe.load(d).recipe.status == "released"]


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: "/".join(file.relative_to(ROOT / "results").parts))
def test_every_record_is_of_committed_code_and_of_a_recipe_that_has_not_changed_since(file):
    place = file.relative_to(ROOT / "results")
    assert records.problems(json.loads(file.read_text()), place, ROOT / "recipes") == []


# Hashes of all values of the released recipes, those of keys that a file leaves out too.
RESOLVED = {
    "cpu-tiny/v1": "31800fa83ebbe01d",
    "cpu-tiny/v2": "194079f38c690af9",
    "cpu-tiny-groups/v1": "9e0cf78dae0a7b2c",
    "cpu-tiny-sums/v1": "bdeb3be52ab61c1a",
    "cpu-smollm2-sums/v1": "66e7c6093a7eee35",
    "cpu-smollm2-chain-sum/v1": "9c0023c2fa9677e1",
}


def test_the_defaults_of_released_recipes_never_change():
    """A key that comes or goes changes hashes too, unless it is null: pin them anew if every outcome is as it was."""
    loaded = [recipe.load(directory) for directory in RELEASED]
    values = {f"{one.name}/{one.version}": one.recipe.model_dump(mode="json", exclude_none=True) for one in loaded}
    assert {name: content_hash(value)[:16] for name, value in values.items()} == RESOLVED


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


def first(key: str) -> Path:
    """The first stored record with this key, made with the recipe's own rows."""
    return next(file for file in RECORDS if key in (record := json.loads(file.read_text())) and "rows" not in record)


@pytest.mark.parametrize("kind", ["seeds", "stages", "phases", "stages_beside", "figures", "planted", "same"])
def test_a_record_of_uncommitted_code_or_of_another_recipe_is_refused_whatever_it_measures(kind):
    file = first(kind)
    place, honest = file.relative_to(ROOT / "results"), json.loads(file.read_text())
    forged = {"its code differed from the commit": {"code": honest["code"] | {"dirty": True}}}
    forged["it names no device"] = {"device": None}
    forged["its code has no commit"] = {"code": {"commit": "0123", "dirty": False}}
    if "recipe" in honest:
        forged["has changed since"] = {"recipe_sha256": "0" * 64}
        forged["its recipe was modified"] = {"modified": True}
        forged["there is no recipe"] = {"recipe": "none", "version": "v1"}
    for reason, change in forged.items():
        reasons = records.problems(honest | change, place, ROOT / "recipes")
        assert any(reason in line for line in reasons), (reason, reasons)


def test_a_record_is_kept_in_the_folder_of_its_recipe_and_device():
    file = first("phases")
    honest = json.loads(file.read_text())
    assert records.problems(honest, Path("cpu-tiny/v2/cpu/memory", file.name), ROOT / "recipes") == [
        "its place is below cpu-tiny/v1/cpu"
    ]
    del honest["recipe"]
    (line,) = records.problems(honest, file.relative_to(ROOT / "results"), ROOT / "recipes")
    assert line.startswith("it names no recipe")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"status": "failed"}, "seed 0, ppo: failed, modified: False"),
        ({"modified": True}, "seed 0, ppo: done, modified: True"),
        ({"seed": 7}, "seed 0, ppo: its summary is of seed 7, ppo"),
    ],
)
def test_a_seed_that_is_not_done_or_was_modified_is_a_reason(change, reason):
    file = next(file for file in SEEDS if "cpu-tiny" in file.parts)
    record = json.loads(file.read_text())
    record["seeds"]["0"]["ppo"] |= change
    assert records.problems(record, file.relative_to(ROOT / "results"), ROOT / "recipes") == [reason]


@pytest.mark.parametrize(
    ("status", "overrides", "kept"), [("draft", {}, True), ("draft", {"ppo.steps": 3}, False), ("released", {}, False)]
)
def test_a_draft_alone_has_records_of_other_rows_than_its_own(tmp_path, status, overrides, kept):
    file = next(file for file in SEEDS if "cpu-tiny" in file.parts)
    record = json.loads(file.read_text())
    folder = tmp_path / record["recipe"] / record["version"]
    copytree(ROOT / "recipes" / record["recipe"] / record["version"], folder)
    (folder / "recipe.yaml").write_text(
        (folder / "recipe.yaml").read_text().replace("status: released", f"status: {status}")
    )
    record |= {"recipe": "mine", "recipe_sha256": recipe.load(folder).sha256, "modified": True, "overrides": overrides}
    record["rows"] = [{"name": "rows.jsonl", "sha256": "a" * 64}]
    for summary in record["seeds"].values():
        for stage in summary.values():
            stage["modified"] = True
    folder.parent.rename(tmp_path / "mine")
    place = Path("mine", *file.relative_to(ROOT / "results").parts[1:])
    assert (records.problems(record, place, tmp_path) == []) is kept


def test_the_page_of_results_is_made_from_the_records():
    assert (ROOT / "results/README.md").read_text() == results.page(), "out of date: `make results-index`"


def test_the_page_of_results_names_the_processor_and_its_threads_where_the_record_does():
    devices = {cells(line)[0]: cells(line)[2] for line in results.page().splitlines() if line.startswith("| [")}
    named = [device for record, device in devices.items() if "cpu-tiny/v2/" in record]
    assert named == ["AMD EPYC, 1 thread", "Intel(R) Xeon(R) Processor @ 2.80GHz, 1 thread"]
    assert all(device != "cpu" for record, device in devices.items() if "peers/trl-defaults" not in record)


def headline(folder: str, commit: str) -> str:
    """The line of the page for a stored record of a peer."""
    (line,) = [line for line in results.page().splitlines() if f"peers/{folder}/" in line and commit in line]
    return line


def test_a_commit_beside_itself_raises_no_alarm():
    """One of the older records has one, from before what looks worse was measured twice as often again."""
    files = sorted((ROOT / "results/against").glob("same_*.json"))
    alarms = {file.name: sum(bool(row["worse"]) for row in read(file, SameRecord)["same"]) for file in files}
    assert {name: count for name, count in alarms.items() if count} == {"same_2026-11-26T215645_b3a6b33e.json": 1}
    assert alarms[max(alarms)] == 0


def test_the_index_of_recipes_is_made_from_the_recipes():
    assert (ROOT / "recipes/README.md").read_text() == recipe_index.page(ROOT / "recipes"), "`make results-index`"


@pytest.mark.parametrize("directory", budgets.pinned_recipes(ROOT / "recipes"), ids=str)
def test_the_page_of_a_recipe_for_a_card_has_what_its_stages_are_predicted_to_need(directory):
    card_gb = recipe.load(directory).recipe.hardware.memory_gb
    assert card_gb is not None
    table = prediction_file.needs_table(budgets.pinned_needs(directory), card_gb)
    assert f"\n\n{table}\n\n" in (directory / "README.md").read_text(), f"it should have\n{table}"


def test_the_index_of_recipes_names_the_largest_need_and_gated_weights():
    folders = {row[0]: row for row in map(cells, recipe_index.page(ROOT / "recipes").splitlines()) if len(row) == 8}
    needs = prediction_file.card_needs(budgets.pinned_needs(ROOT / "recipes/4090-qwen3-8b/v1"))
    assert max(needs, key=needs.__getitem__) == "ppo"
    assert folders["4090-qwen3-8b"][3] == f"{needs['ppo'] / 1e9:.1f} of 25.7 (ppo)"
    assert folders["cpu-tiny"][3] == "–" and folders["cpu-tiny"][5] == "generated: toy"
    for folder, row in folders.items():
        pages = "".join(file.read_text() for file in (ROOT / "recipes" / folder).glob("v*/README.md"))
        if "(Apache-2.0, not gated)" in pages:
            assert "gated" not in row[4]
        elif re.search(r"weights are gated|License, gated|License;\naccept it", pages):
            assert row[4].endswith(", gated")


def test_the_index_of_recipes_has_every_version_and_marks_the_one_that_hw_takes():
    versions, page = recipe.available(ROOT / "recipes"), recipe_index.page(ROOT / "recipes")
    lines = [line for line in page.splitlines() if "/README.md) (" in line or "/README.md)** (" in line]
    assert len(lines) == len({version.parent for version in versions})
    assert re.findall(r"\]\(([\w.-]+/v\d+)/README.md\)", page) == ["/".join(d.parts[-2:]) for d in versions]
    taken = {recipe.resolve(recipe.load(d).recipe.hardware.name, ROOT / "recipes") for d in versions}
    bold = re.findall(r"\*\*\[v\d+\]\(([^)]+)/README.md\)\*\*", page)
    assert sorted(bold) == sorted("/".join(d.parts[-2:]) for d in taken)


def test_an_index_that_is_out_of_date_is_named(tmp_path, monkeypatch, capsys):
    for folder in ("recipes", "results"):
        copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    (tmp_path / "recipes/README.md").write_text("old")
    with pytest.raises(SystemExit, match=r"recipes/README\.md is out of date: `make results-index`"):
        results.main(["--check"], standalone_mode=False)
    results.main([], standalone_mode=False)
    results.main(["--check"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["written to results/README.md", "written to recipes/README.md"]


def test_a_headline_beside_trl_compares_like_designs_by_a_named_clock():
    line = headline("trl-1.12-ppo", "e11b8fb5")
    assert "a step of PPO compared with trl 1.12.0, CPU seconds" in line
    assert (
        "| ours, critic with an adapter: 1.10 times TRL, value model through LoRA (ranges of steps overlap) |" in line
    )
    line = headline("trl-1.16-grpo", "e11b8fb5")
    kept, again = "activations kept", "activations recomputed"
    assert f"| ours, {kept}: 1.34 times TRL, {kept}; ours, {again}: 1.18 times TRL, {again} |" in line


def test_a_headline_beside_trl_s_defaults_has_the_tuned_ratio_and_what_was_changed():
    line = headline("trl-defaults", "ec2acf72")
    assert "steps compared with trl 1.16.0, hardware.trunk=lean, CPU seconds" in line
    assert "sft 4.35 times TRL's defaults, 1.97 times tuned" in line
    assert "tuned" not in headline("trl-defaults", "d0fceebf"), "it was not measured then"


def test_a_headline_beside_trl_s_defaults_has_the_range_of_the_rounds_where_it_is_known():
    record = json.loads(next(file for file in (ROOT / "results").rglob("*ec2acf72.json")).read_text())
    for sides in record["stages_beside"].values():
        sides["ours"] |= {"times_faster_range": [1.5, 2.5], "times_faster_tuned_range": [0.5, 1.25]}
    text = results._supervised(record, "a record")[1]
    assert "sft 4.35 (1.50 to 2.50) times TRL's defaults, 1.97 (0.50 to 1.25) times tuned" in text


def test_ratios_to_tokens_of_trl_that_include_its_warm_up_are_marked_on_every_page():
    lines = [line for line in results.page().splitlines() if "peers/trl-defaults/" in line]
    old = [any(commit in line for commit in results.TOKENS_OF_WARM_UP) for line in lines]
    assert sum(old) == len(results.TOKENS_OF_WARM_UP)
    assert [line.endswith(r" \* |") for line in lines] == old
    log = (ROOT / "archive/log.md").read_text()
    heads = re.findall(r"^\| stage \| ours, tokens per CPU second .*", log, re.M)
    assert len(heads) == sum(old)
    assert all(cell.endswith(r"\*") for head in heads for cell in head.strip("| ").split(" | ")[2:])


def test_a_headline_of_memory_names_the_phases_that_only_one_side_has():
    record = json.loads(first("phases").read_text())
    close = next(row for row in record["phases"] if abs(row["error"]) < 0.005)
    record["phases"] = [close, close | {"error": 0.005}, close | {"error": -0.0049, "phase": "score"}]
    headline = results._memory(record, "a record")[1]
    assert headline.startswith("2 of 3 phases within 0.5 %, worst 0.5%") and "only" not in headline
    record["unmatched"] = ["rm/load: predicted, not measured"]
    assert results._memory(record, "a record")[1] == headline + ", 1 only predicted or only measured"


def test_like_designs_that_do_not_fit_make_no_headline():
    lost = {name: {"out_of_memory": True} for pair in figures.ALIKE for name in pair}
    record = json.loads(first("figures").read_text()) | {"figures": lost}
    assert results._peer(record, "a record")[1] == "like designs did not fit both"


@pytest.mark.parametrize(
    ("folder", "page"), [("trl-1.12-ppo", "speed.md"), ("trl-1.16-grpo", "groups.md"), ("trl-1.16-rloo", "groups.md")]
)
def test_a_page_shows_the_newest_comparison_with_the_peer(folder, page):
    newest = max((ROOT / "results/peers" / folder).glob("cpu_*.json"), key=lambda file: file.name)
    record = read(newest, PeerRecord)
    assert record["code"]["dirty"] is False
    phases = page.replace("speed.md", "internals.md")
    assert figures.markdown(record) in (ROOT / "docs" / page).read_text()
    assert figures.phases_table(record) in (ROOT / "docs" / phases).read_text()


@pytest.mark.parametrize(
    ("change", "message"),
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
        pytest.param(lambda r: r.update(device="cpu"), "device: not an object with keys", id="device"),
    ],
)
def test_a_record_that_is_damaged_is_one_line(tmp_path, monkeypatch, capsys, change, message):
    record = json.loads(next(file for file in SEEDS if "cpu-tiny" in file.parts).read_text())
    change(record)
    file = tmp_path / "record.json"
    file.write_text(json.dumps(record))
    code, out, err = rlhf(monkeypatch, capsys, "results", file)
    assert code == 1 and out == "" and len(err.splitlines()) == 1 and message in err


@pytest.mark.parametrize("directory", RELEASED, ids=lambda d: f"{d.parent.name}-{d.name}")
def test_a_released_recipe_has_a_record(directory):
    assert [file for file in SEEDS if file.parts[-4:-2] == directory.parts[-2:]]


def test_the_page_of_results_shows_the_newest_record_of_the_cpu_recipe():
    newest = max((file for file in SEEDS if "cpu-tiny" in file.parts), key=lambda file: file.name)
    assert reproduce.table_of(newest) in (ROOT / "docs/choosing.md").read_text()


def cells(row: str) -> list[str]:
    """The cells of one line of a Markdown table."""
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", r"cpu_2026-01-01\.json: input should be"),
        ('{"a": 1}', r"cpu_2026-01-01\.json: not a record of a measurement"),
        ('{"stages": {"sft": {"tokens_per_second": "9"}}}', r"json: key 'code' is missing"),
        ('{"seeds": {}}', r"cpu_2026-01-01\.json: key 'recipe' is missing"),
    ],
)
def test_the_page_of_results_names_a_record_that_is_damaged(tmp_path, content, message):
    (tmp_path / "cpu_2026-01-01.json").write_text(content)
    with pytest.raises(UserError, match=message):
        results.page(tmp_path)


def test_the_page_of_chain_sum_says_what_its_record_proves():
    page = (ROOT / "recipes/cpu-smollm2-chain-sum/v1/README.md").read_text()
    file = newest(ROOT / "results/cpu-smollm2-chain-sum/v1", "*/*.json")
    assert f"](../../../{file.relative_to(ROOT)})" in page
    for seed, stages in not_none(reader.read(file, Reproduction)).seeds.items():
        metrics, (gain,) = stages["evaluate"].metrics, gains_over_start(stages)
        shares = [
            "{:.1%} ({:.1%} to {:.1%})".format(*(metrics[f"{who}/{gain.key}{end}"] for end in ("", "_low", "_high")))
            for who in ("base", "grpo")
        ]
        points = f"{100 * gain.value:.0f} ({100 * not_none(gain.low):.0f} to {100 * not_none(gain.high):.0f})"
        assert f"| {seed} | {gain.prompts} | {' | '.join(shares)} | {points} | {gain.verdict} |" in page
    logs = sorted(file.with_suffix("").glob("*/samples.jsonl"))
    rows = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    sums = [row for row in rows if " + " in row["prompt"]]
    before, after = (sum(row[who]["rewards"]["reasoning_gym"] == 1 for row in sums) for who in ("base", "grpo"))
    assert f"rose from {before} to {after} of {len(sums)}" in page
