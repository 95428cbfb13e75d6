"""The page about a run, opened in a real browser where there is one, with answers that mean harm."""

import json
import random
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError
from markupsafe import escape

from rlhf import recipe, report
from rlhf.data import formats
from rlhf.errors import UserError
from rlhf.evaluation.reward_model import reward_model_figures
from rlhf.files import write_json
from rlhf.recipe import StageName, published
from rlhf.recipe.stages import ONLINE, STAGE_TABLE
from rlhf.report import RunRecords, learned, overview, tables, training
from rlhf.report.evaluation import (
    sections_of_policies,
    sections_of_reward_model,
)
from rlhf.report.page import render
from rlhf.report.parts import Charts, Section, Table
from rlhf.report.runs import metrics, trusted_summaries
from rlhf.report.samples import OPEN, SampleTable, sections_of_samples
from rlhf.run import evidence, records
from rlhf.run.records import Manifest, Summary
from rlhf.terminal.wording import number
from tests.browser import chromium as chromium
from tests.browser import complaints, needs_browser, open_page
from tests.helpers import RECIPE, content_of, not_none, noted, rlhf, run_stages, small
from tests.records import manifest_of, summary_of, write_records

pytest.importorskip("plotly", reason="a report needs plotly")
HOSTILE = [
    "<script>document.title = 'taken over'</script>",
    '"><img src=x onerror="document.title = 1">',
    "</script><script>document.title = 'taken over'</script>",
    "x" * 1_000_000,
    "bell \x07 escape \x1b[31m null \x00 delete \x7f",
    "\u202eright to left",
    "the needle",
]


@pytest.fixture(scope="module")
def run(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished chain to PPO, and samples of an evaluation that was not held."""
    out = tmp_path_factory.mktemp("report")
    shutil.copytree(trained, out, dirs_exist_ok=True)
    run_stages(small(), out, "ppo")
    root = out / "cpu-tiny" / "v1"
    summary = content_of(root / "ppo" / "summary.json")  # a changed recipe has no targets of its own
    target = next(f for f in recipe.load(RECIPE).figures if f.metric == "kl_per_token")
    summary["targets"] = [records.compared(target, summary["metrics"]["kl_per_token"])]
    (root / "ppo" / "summary.json").write_text(json.dumps(summary))
    (root / "evaluate").mkdir()
    rows = [{"step": 0, "prompt": f"prompt {i} {text}", "sft": {"response": text}} for i, text in enumerate(HOSTILE)]
    (root / "evaluate" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    finding = {"check": "nan", "step": 3, "seen": "<b>bold</b>", "cause": "none", "remedies": {"ppo.kl_coef": 0.1}}
    (root / "ppo" / "findings.jsonl").write_text(json.dumps(finding) + "\n")
    report.write([root], out / "report.html")
    return root


@pytest.fixture(scope="module")
def evaluated(run: Path) -> Path:
    """The same chain with an evaluation of its own."""
    root = run.parents[1] / "evaluated" / "cpu-tiny" / "v1"
    shutil.copytree(run, root)
    shutil.rmtree(root / "evaluate")
    run_stages(small(), root.parents[1], "evaluate")
    return root


def pairs_of(root: Path) -> Path:
    """The pairs that a run was trained on; tests with other settings leave theirs in the same folder."""
    manifest = json.loads((root / "rm" / "manifest.json").read_text())
    name = next(Path(file["name"]) for file in manifest["data"]["files"] if file["kind"] == "hh")
    return root / "data" / name.parent.name / name.name


def charts_of(page: str) -> dict[str, dict[str, Any]]:
    """The charts by their titles."""
    charts = json.loads(not_none(re.search(r'id="charts">(.*?)</script>', page, re.S))[1])
    return {chart["layout"]["title"]["text"]: chart for chart in charts}


def text_of(root: Path) -> str:
    return (root.parents[1] / "report.html").read_text(encoding="utf-8")


def address(root: Path) -> str:
    return (root.parents[1] / "report.html").as_uri()


def test_the_page_needs_no_network(run):
    page = text_of(run)
    ours = page.replace(not_none(re.search(r"<script>/\*.*?</script>", page, re.S))[0], "")
    assert "default-src 'none'" in page
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", ours)


def test_the_page_of_a_run_has_its_sections_its_curves_and_its_findings(run):
    page = text_of(run)
    for title in ("Targets and what was measured", "Findings during training", "Score against divergence"):
        assert f"<h2>{title}</h2>" in page
    for title in ("Where the time went", "Memory", "Samples", "Provenance"):
        assert f"<h2>{title}</h2>" in page
    charts = json.loads(not_none(re.search(r'id="charts">(.*?)</script>', page, re.S))[1])
    (curve,) = (c for c in charts if c["layout"]["title"]["text"] == "KL to the reference")
    rows = [json.loads(line) for line in (run / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert curve["data"][0]["y"] == [row["objective/kl_per_token"] for row in rows]
    assert curve["layout"]["yaxis"]["title"]["text"] == "nats per token"
    without_unit = [c["layout"] for c in charts if not {"title"} <= {*c["layout"].get("yaxis", {})}]
    assert [layout["title"]["text"] for layout in without_unit] == ["seconds by phase, measured"]
    assert "&lt;b&gt;bold&lt;/b&gt;" in page and "ppo.kl_coef=0.1" in page


def test_a_log_is_read_once_for_all_its_curves(run, monkeypatch):
    read: list[StageName] = []
    once = metrics
    monkeypatch.setattr(training, "metrics", lambda run, stage: noted(read, stage, once(run, stage)))
    training.sections_of_curves([report.load(run)], Charts())
    assert sorted(read) == sorted(stage for stage, row in STAGE_TABLE.items() if row.curves)
    read.clear()
    training.sections_of_frontier([report.load(run)], Charts())
    assert read == [*ONLINE]


@pytest.mark.parametrize(("rows", "mode"), [(1, "lines+markers"), (20, "lines+markers"), (21, "lines")])
def test_few_points_of_a_curve_are_marked(tmp_path, rows, mode):
    """A line through one point is invisible."""
    (tmp_path / "rm").mkdir()
    for name, values in (("metrics", {"accuracy": 0.5}), ("telemetry", {"memory_bytes": 1e9})):
        text = "".join(json.dumps({"step": step} | values) + "\n" for step in range(rows))
        (tmp_path / "rm" / f"{name}.jsonl").write_text(text)
    charts, run = Charts(), RunRecords("run", tmp_path, {"rm": MANIFEST}, {})
    training.sections_of_curves([run], charts)
    training.sections_of_memory([run], charts)
    assert [line["mode"] for chart in charts.all for line in chart["data"]] == [mode, mode]


def test_what_a_model_says_is_text(run):
    page = text_of(run)
    body = page.partition('id="charts"')[0]
    assert "<script>document" not in body and "<img" not in body
    assert str(escape(HOSTILE[0])) in body
    assert "x" * 2001 not in body and "…" in body
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", body)


@needs_browser
def test_in_a_browser_the_charts_are_drawn_and_nothing_takes_over(run, chromium):
    page = open_page(chromium, address(run))
    assert page.title() == "cpu-tiny v1"
    assert page.locator(".main-svg").count() >= 8
    assert page.text_content("#shown") == "7" and page.locator(".sample:visible").count() == 7
    assert not complaints(page)


@needs_browser
def test_in_a_browser_axes_have_plain_numbers_and_charts_room(evaluated, chromium, tmp_path):
    """Neither 200µ nor 2e-4; the title of a chart does not touch the axis of the one above."""
    root = tmp_path / "cpu-tiny" / "v1"
    shutil.copytree(evaluated, root)
    rows = "".join(json.dumps({"step": i, "loss": 0.0001 * i}) + "\n" for i in range(1, 4))
    (root / "sft" / "metrics.jsonl").write_text(rows)
    report.write([root], tmp_path / "report.html")
    page = open_page(chromium, (tmp_path / "report.html").as_uri())
    ticks = page.locator("#sft-curves .ytick text").all_text_contents()
    assert "0.0002" in ticks and not any(re.search("[µkme]", tick) for tick in ticks)
    (above, below) = page.locator("#score-against-divergence .chart").all()
    axis, title = (
        not_none(chart.locator(part).bounding_box()) for chart, part in ((above, ".xtitle"), (below, ".gtitle"))
    )
    assert title["y"] - (axis["y"] + axis["height"]) > 10


@needs_browser
def test_in_a_browser_samples_are_filtered(run, chromium):
    """By the address of the page, and by what is typed."""
    page = open_page(chromium, f"{address(run)}#filter=needle")
    assert page.text_content("#shown") == "1" and page.locator(".sample:visible").count() == 1
    page.fill("#filter", "")
    assert page.locator(".sample:visible").count() == 7
    page.locator("#filter").press_sequentially("NEEDLE")
    assert page.locator(".sample:visible").count() == 1 and page.text_content("#shown") == "1"
    assert not complaints(page)


def test_the_evaluation_is_shown_side_by_side(evaluated):
    page = report.page([report.load(evaluated)]).html
    summary = json.loads((evaluated / "evaluate" / "summary.json").read_text())
    row = not_none(re.search(r'<tr><td data-label="metric">win rate at equal length vs sft</td>(.*?)</tr>', page))[1]
    cells = re.findall(r'<td class="number" [^>]*>(.*?)</td>', row)
    metrics = summary["metrics"]
    wanted = [metrics[f"{who}/lc_win_rate_vs_sft{end}"] for who in ("base", "ppo") for end in ("", "_low", "_high")]
    numbers = [float(number) for cell in cells for number in re.findall(r"[0-9.]+", cell)]
    assert numbers == pytest.approx(wanted, rel=1e-3) and cells[1] == ""
    assert "win rate at equal length vs sft low" not in page and "ci95" not in page
    for key in ("win_rate_vs_sft", "score_gain_sd"):
        low, value, high = (metrics[f"ppo/{key}{end}"] for end in ("_low", "", "_high"))
        assert low < value < high and not any(f"base/{key}{end}" not in metrics for end in ("_low", "_high"))
        assert f"{number(value)} ({number(low)} to {number(high)})" in page
    low, value, high = (metrics[f"rm/accuracy{end}"] for end in ("_low", "", "_high"))
    assert low < value < high and f">{number(value)} ({number(low)} to {number(high)})</td>" in page
    charts = charts_of(page)
    assert {"calibration (dotted: perfect)", "margin, chosen less rejected", "score after a sigmoid"} <= charts.keys()
    scores = charts["scores of every policy's answers"]["data"]
    assert [line["name"] for line in scores] == ["base", "sft", "ppo"]
    assert all(sum(line["y"]) == small().recipe.evaluate.max_samples for line in scores)
    gains = charts["gain by the reward model, and true gain"]["data"]
    rows = [json.loads(line) for line in (evaluated / "ppo" / "metrics.jsonl").read_text().splitlines()]
    truth = [row["eval/true_reward_gain_sd"] for row in rows if "eval/true_reward_gain_sd" in row]
    assert gains[1]["y"] == [0, *truth]
    assert charts["the process's memory, measured"]["data"][0]["y"][0] > 0.01


def test_the_data_is_checked_once(evaluated, monkeypatch):
    charts = charts_of(report.page([report.load(evaluated)]).html)
    quality = json.loads((evaluated / "data" / "quality.json").read_text())
    manifest = json.loads((evaluated / "rm" / "manifest.json").read_text())
    assert (quality["pairs"], quality["made_from"]["data"]) == (manifest["data"]["pairs"], manifest["data"]["sha256"])
    assert charts["tokens per chosen"]["data"][0]["y"] == quality["lengths"]["chosen"]["counts"]
    monkeypatch.setattr("rlhf.data.quality.check.check", None)
    page = report.page([report.load(evaluated)]).html
    assert "<h2>Data quality</h2>" in page and ">chosen longer</td>" in page
    for function in ("hash_of_modules", "sha256"):
        with monkeypatch.context() as patch, pytest.raises(TypeError, match="'NoneType' object is not callable"):
            patch.setattr(f"rlhf.report.data.{function}", lambda _: "of code that has changed since")
            report.page([report.load(evaluated)])  # it is checked again


def test_a_damaged_check_of_the_data_is_made_again(evaluated):
    page, file = report.page([report.load(evaluated)]).html, evaluated / "data" / "quality.json"
    pairs, made_from = content_of(file)["pairs"], content_of(file)["made_from"]
    for damaged in ("{", json.dumps({"made_from": made_from})):
        file.write_text(damaged)
        assert report.page([report.load(evaluated)]).html == page and content_of(file)["pairs"] == pairs


def test_data_from_the_hub_is_checked_too(evaluated, tmp_path):
    """A folder stands for the pinned files of the hub's data set."""
    pairs = pairs_of(evaluated)
    shutil.copy(pairs, tmp_path / "train.jsonl")
    rows = formats.read_hub(str(tmp_path), "0" * 40, on_bad_row="skip")
    root = tmp_path / "run" / "v1"
    (root / "rm").mkdir(parents=True)
    manifest = json.loads((evaluated / "rm" / "manifest.json").read_text())
    manifest["settings"]["data"] |= {"source": "hub", "name": str(tmp_path), "revision": "0" * 40}
    manifest["data"]["files"] = [{"name": f.name, "sha256": f.sha256} for f in rows.report.files]
    (root / "rm" / "manifest.json").write_text(json.dumps(manifest))
    assert "words per chosen" in charts_of(report.page([report.load(root)]).html)


def test_dropped_rows_are_those_of_the_stage_whose_data_is_checked(evaluated, tmp_path):
    """The first stage is not always one with data."""
    root = tmp_path / "cpu-tiny" / "v1"
    shutil.copytree(evaluated, root)
    pretrain, sft = (root / stage / "manifest.json" for stage in ("pretrain", "sft"))
    pretrain.write_text(json.dumps(content_of(pretrain) | {"data": None}))
    data = content_of(sft)["data"] | {"dropped": {"one_word": 2}}
    sft.write_text(json.dumps(content_of(sft) | {"data": data}))
    assert "Left out before training (data.drop): one word 2." in report.page([report.load(root)]).html


def test_data_that_is_not_what_was_trained_on_is_not_checked(evaluated):
    (evaluated / "data" / "quality.json").unlink(missing_ok=True)
    pairs = pairs_of(evaluated)
    manifest_file = evaluated / "pretrain" / "manifest.json"
    manifest = json.loads(manifest_file.read_text())
    manifest_file.write_text(json.dumps(manifest).replace(str(pairs.parents[4]), str(evaluated.parents[1])))
    before = pairs.read_text()
    pairs.write_text("".join(before.splitlines(keepends=True)[:20]))
    for named in (evaluated / "pretrain", evaluated / "rm"):
        text = (named / "manifest.json").read_text()
        (named / "manifest.json").write_text(re.sub(r'"/[^"]*?/cpu-tiny/v1/data', f'"{evaluated}/data', text))
    page = report.page([report.load(evaluated)]).html
    assert "its data has changed since" in page and not (evaluated / "data" / "quality.json").exists()
    pairs.unlink()
    assert "its data cannot be checked any more" in report.page([report.load(evaluated)]).html
    pairs.write_text(before)


EVALUATION = ["samples", "policies", "best of n", "reward model"]  # the parts of the page that read it


@pytest.mark.parametrize(
    ("file", "content", "lost"),
    [
        ("evaluate/details.json", '{"scores": 3}', EVALUATION),
        ("evaluate/details.json", None, EVALUATION),
        ("ppo/metrics.jsonl", '{"objective/scores": 1}\n', ["ppo learned", "frontier", "ppo curves"]),
        ("sft/metrics.jsonl", '{"loss": 1}\n', ["sft curves"]),
        ("evaluate/samples.jsonl", '{"prompt": 5, "sft": {"response": "a", "score": "b"}}\n', EVALUATION),
        ("evaluate/samples.jsonl", "", EVALUATION),
    ],
)
def test_a_damaged_file_takes_its_part_of_the_page_only(evaluated, file, content, lost):
    before = (evaluated / file).read_text()
    (evaluated / file).unlink()
    if content is not None:
        (evaluated / file).write_text(content)
    page, left_out = report.page([report.load(evaluated)])
    (evaluated / file).write_text(before)
    assert [reason.partition(":")[0] for reason in left_out] == lost
    assert re.findall(r'<p class="warn">Left out: ([\w ]+):', page) == lost
    assert ("<h2>sft: curves</h2>" in page) == ("sft curves" not in lost)
    ids = re.findall(r'"id": "(chart-[0-9]+)"', page.partition('id="charts">')[2])
    assert sorted(ids) == sorted(re.findall(r'id="(chart-[0-9]+)"', page)), "a chart without a place ends the script"
    assert "<h2>Provenance</h2>" in page


def test_an_evaluation_that_has_changed_is_left_out(evaluated, tmp_path, monkeypatch, capsys):
    """A cut file and a renamed key are valid, and `rlhf compare` refuses them."""
    root = tmp_path / "cpu-tiny" / "v1"
    shutil.copytree(evaluated, root)
    samples = root / "evaluate" / "samples.jsonl"
    whole = samples.read_text()
    for text in (whole.replace('"score"', '"scores"', 1), "".join(whole.splitlines(keepends=True)[:-1])):
        samples.write_text(text)
        html, left_out = report.page([report.load(root)])
        assert [reason.partition(":")[0] for reason in left_out] == EVALUATION
        assert f"{samples} has changed since evaluate was done; move" in html and '<tr class="sample"' not in html
    code, out, err = rlhf(monkeypatch, capsys, "report", root, "--to", tmp_path / "page.html")
    assert code == 0 and "written to" in out and err.count("\n") == 1
    assert err.startswith(f"5 parts left out of the page, which names the reasons; the first: samples: {samples} has")
    samples.write_text(whole)
    code, _, err = rlhf(monkeypatch, capsys, "report", root, "--to", tmp_path / "page.html")
    assert (code, err) == (0, "")


def test_brackets_are_explained_where_there_are_some(tmp_path):
    def told(**metrics: float) -> str:
        summary = summary_of(stage="evaluate", metrics={f"ppo/{key}": value for key, value in metrics.items()})
        write_records(tmp_path / "evaluate")
        (section,) = sections_of_policies([RunRecords("run", tmp_path, {}, {"evaluate": summary})], Charts())
        return render(section.template, section=section)

    older = told(win_rate_vs_sft=0.75, win_rate_vs_sft_ci95=0.05)
    assert "Brackets" not in older and ">win rate vs sft ci95<" in older
    ends = {"win_rate_vs_sft_low": 0.7, "win_rate_vs_sft_high": 0.8}
    newer = told(win_rate_vs_sft=0.75, win_rate_vs_sft_ci95=0.05, **ends)
    assert "Brackets: a 95 % interval." in newer and "ci95" not in newer and ">0.75 (0.7 to 0.8)<" in newer


def test_nan_in_a_log_is_a_missing_value(evaluated, tmp_path):
    """NaN and infinity, which Python writes and JSON does not know: a gap in the curve."""
    root = tmp_path / "cpu-tiny" / "v1"
    shutil.copytree(evaluated, root)
    for stage, key in (("rm", "loss"), ("ppo", "objective/scores"), ("ppo", "eval/kl_per_token")):
        file = root / stage / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows[0][key] = float("nan")
        rows[-1][key] = float("inf")
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = report.page([report.load(root)]).html
    assert "Left out" not in page
    charts = charts_of(page)
    rows = [json.loads(line) for line in (evaluated / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert charts["score"]["data"][0]["y"] == [row["objective/scores"] for row in rows[1:-1]]


Place = tuple[str | int, ...]  # the keys and indexes that lead to a value
GONE = object()
REPLACEMENTS: tuple[object, ...] = (
    GONE,
    None,
    "x",
    -1,
    float("nan"),
    [],
    {},
    1e308,
    10**30,
    True,
    [1, "a"],
    {"a": [None]},
)


def places(content: object, at: Place = ()) -> list[Place]:
    """The way to every value of a record, and to the first two of a list."""
    inner: list[tuple[str | int, object]] = list(content.items()) if isinstance(content, dict) else []
    inner += enumerate(content[:2]) if isinstance(content, list) else []
    return [at, *(place for key, value in inner for place in places(value, (*at, key)))]


def with_value(content: Any, at: Place, value: object) -> Any:
    if not at:
        return value
    changed = content.copy()
    if value is GONE and len(at) == 1:
        del changed[at[0]]
    else:
        changed[at[0]] = with_value(content[at[0]], at[1:], value)
    return changed


def test_no_value_in_a_record_makes_a_traceback(evaluated, tmp_path, monkeypatch):
    """One value at a time is replaced, or its key left out: a page with what could be read, or one line."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", str)
    root = tmp_path / "cpu-tiny" / "v1"
    shutil.copytree(evaluated, root)
    report.page([report.load(root)])  # the data has been checked
    finding = {"check": "nan", "step": 3, "seen": "a", "cause": "b", "remedies": {"ppo.kl_coef": 0.1}}
    (root / "ppo" / "findings.jsonl").write_text(json.dumps(finding) + "\n")
    rng = random.Random(0)
    names = ["manifest.json", "summary.json", "metrics.jsonl", "telemetry.jsonl", "findings.jsonl"]
    files = [root / "ppo" / name for name in (*names, "checkpoints/best.json")]
    files += [root / "evaluate" / name for name in ("summary.json", "details.json", "samples.jsonl")]
    outcomes: Counter[str] = Counter()
    for file in (*files, root / "data" / "quality.json"):
        text = file.read_text()
        first, *others = text.splitlines(keepends=True) if file.suffix == ".jsonl" else [text]
        content = json.loads(first)
        for at in rng.sample(values := places(content)[1:], min(15, len(values))):
            changed = with_value(content, at, rng.choice(REPLACEMENTS))
            file.write_text(json.dumps(changed) + "\n" + "".join(others))
            try:
                outcomes["left out" if "Left out" in report.page([report.load(root)]).html else "whole"] += 1
            except UserError as error:
                assert "\n" not in str(error)
                outcomes["refused"] += 1
        file.write_text(text)
    assert outcomes["left out"] > 15 and outcomes["whole"] > 15, outcomes


def test_a_bug_of_ours_is_not_called_a_damaged_file(evaluated, monkeypatch):
    monkeypatch.setattr(training, "line", lambda *_: dict[str, object]()["no such key"])
    with pytest.raises(KeyError, match="no such key"):
        report.page([report.load(evaluated)])


def test_what_a_template_asks_for_and_does_not_get_is_a_bug_too():
    no_cell: Any = "no cell"
    with pytest.raises(UndefinedError, match="number"):
        render("table.html", section=Section("Title", "table.html", Table([no_cell], [])))


def test_no_template_turns_escaping_off():
    templates = [file.read_text() for file in Path(report.__file__).with_name("templates").glob("*.html")]
    assert len(templates) > 10 and not any(re.search(r"\|\s*safe|autoescape", text) for text in templates)


def test_a_damaged_record_of_one_stage_leaves_the_others(evaluated, tmp_path):
    root = tmp_path / "cpu-tiny" / "v1"
    shutil.copytree(evaluated, root)
    (root / "rm" / "manifest.json").write_text("{")
    (root / "sft" / "summary.json").write_text('{"schema": 99}')
    page = report.page([report.load(root)]).html
    assert "rm/manifest.json: cannot be read" in page and "sft/summary.json: " in page and ">ppo</td>" in page
    assert "summary.json cannot be read: SFT." in page and ">summary unreadable</text>" in page
    assert "state: summary.json cannot be read" in page and "not finished" not in page.lower()
    for stage in ("pretrain", "sft", "ppo", "evaluate"):
        (root / stage / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"pretrain/manifest.json: cannot be read"):
        report.load(root)


def test_a_published_course_is_a_band_and_predicted_memory_lies_in_order(tmp_path):
    """A run of a recipe for a GPU, as far as the page reads one."""
    loaded = recipe.load(RECIPE.parents[1] / "4090-llama2-7b" / "v1")
    root = tmp_path / loaded.name / loaded.version / "rm"
    root.mkdir(parents=True)
    manifest: dict[str, Any] = {"recipe": loaded.name, "version": loaded.version, "recipe_sha256": loaded.sha256}
    manifest |= {"settings": {"hardware": {"memory_gb": 24}}, "device": {"name": "card", "type": "cuda"}}
    ends = [("first.loss", [0.6, 0.7]), ("last.loss", [0.3, 0.4])]
    targets = [{"name": m, "metric": m, "published": r, "unit": "", "measured": 1, "within": False} for m, r in ends]
    write_records(root, manifest, {"targets": targets, "phase_seconds": {"train": 1.0}})
    (root / "metrics.jsonl").write_text('{"step": 10, "loss": 0.5}\n{"step": 50, "loss": 0.4}\n')
    (root / "telemetry.jsonl").write_text('{"step": 10, "memory_bytes": 5000000000}\n')
    charts = charts_of(report.page([report.load(root.parent)]).html)
    band, line = charts["loss"]["data"]
    assert (band["x"], band["y"]) == ([0, 50, 50, 0], [0.6, 0.3, 0.4, 0.7]) and line["y"] == [0.5, 0.4]
    assert charts["peak of the GPU's memory, measured"]["layout"]["shapes"][0]["y0"] == 24
    memory = charts["predicted peak of each phase by component, in order"]
    pinned = json.loads((RECIPE.parents[1] / "4090-llama2-7b/v1/predicted.json").read_text())["stages"]
    at = memory["layout"]["xaxis"]["ticktext"].index("ppo update")
    assert sum(bars["y"][at] for bars in memory["data"]) == pytest.approx(sum(pinned["ppo"]["update"].values()) / 1e9)
    assert memory["layout"]["xaxis"]["ticktext"][:3] == ["sft load", "sft evaluate", "sft train"]
    assert memory["data"][0]["x"] == sorted(memory["data"][0]["x"])


def test_the_page_compares_every_figure_and_those_of_all_stages(tmp_path):
    """A run of a recipe for a GPU, as far as that table reads one."""
    loaded = recipe.load(RECIPE.parents[1] / "h100-mistral-7b" / "v1")
    totals = [f.model_dump(mode="json", exclude_defaults=True) for f in loaded.figures if f.stage == "all"]
    peaks = {"sft": 58.0, "rm": 24.9, "ppo": 84.0}
    summaries = {
        stage: summary_of(
            targets=[
                records.compared(f, peak if f.metric == "peak_vram_gb" else None)
                for f in loaded.figures
                if f.stage == stage
            ],
            all_stages=totals,
            wall_seconds=8 * 3600,
            peak_vram_bytes=peak * 1e9,
            predicted_peak_vram_bytes=58.4e9,
        )
        for stage, peak in peaks.items()
    }
    run = RunRecords("run", tmp_path, {}, summaries, price=1.99)
    (section,) = tables.sections_of_verdicts([run], Charts())
    rows = re.findall(r"<tr>(.*?)</tr>", render("table.html", section=section))
    cells = {tuple(re.findall(r"<td[^>]*>(.*?)</td>", row)) for row in rows}
    name = "peak memory at batch 16 and 512 tokens (Hardware and Cost)"
    good, bad = '<span class="good">{}</span>', '<span class="bad">{}</span>'
    assert ("sft", name, "about 61 GB", "58.40", "58", good.format("met (-4.9 %)")) in cells
    assert ("sft", "peak memory (RLHF Architecture)", "45 GB", "58.40", "58", bad.format("missed (+28.9 %)")) in cells
    assert ("all", "fits the card with LoRA (Overview)", "≤ 80 GB", "", "84", bad.format("missed (+5.0 %)")) in cells
    assert ("all", "cost of a run (Overview)", "47.76 USD", "", "47.76", good.format("met (+0.0 %)")) in cells
    (without,) = tables.sections_of_verdicts([run._replace(price=None)], Charts())
    verdict = "not compared: needs the price of an hour (--price)"
    assert isinstance(without.data, Table)
    assert verdict in [row[-1].text for row in without.data.rows]


def test_predicted_memory_stands_beside_measured_memory_only(tmp_path):
    names = {"peak_vram_gb": "GB", "hours": "h"}
    figures = [
        published.Figure(name=name, stage="sft", metric=name, range=(None, 30), unit=unit, source="ours")
        for name, unit in names.items()
    ]
    summary = summary_of(targets=[records.compared(f, 20.0) for f in figures], predicted_peak_vram_bytes=21.5e9)
    (section,) = tables.sections_of_verdicts([RunRecords("run", tmp_path, {}, {"sft": summary})], Charts())
    assert isinstance(section.data, Table)
    columns = [column.text for column in section.data.columns]
    cells = [dict(zip(columns, (cell.text for cell in row), strict=True)) for row in section.data.rows]
    assert [(cell["measured"], cell["predicted"]) for cell in cells] == [("20", "21.50"), ("20", "")]


@pytest.mark.parametrize(
    ("checked", "watched"),
    [
        ({"sft": [], "rm": []}, True),
        ({"sft": [], "rm": None}, False),  # done before there were checks
        ({"sft": []}, False),  # rm is not finished
    ],
)
def test_a_run_counts_as_checked_when_every_stage_was_checked_to_its_end(tmp_path, checked, watched):
    summaries = {stage: summary_of(stage=stage, findings=lines) for stage, lines in checked.items()}
    run = RunRecords("run", tmp_path, {"sft": MANIFEST, "rm": MANIFEST}, summaries)
    (section,) = tables.sections_of_findings([run], Charts())
    assert isinstance(section.data, tables.Findings)
    assert (section.data.findings, section.data.watched) == ([], watched)
    whole = RunRecords("whole", tmp_path, {"sft": MANIFEST}, {"sft": summary_of(findings=[])})
    (section,) = tables.sections_of_findings([whole, run], Charts())
    assert isinstance(section.data, tables.Findings) and section.data.watched is watched


def test_a_stage_that_was_too_short_for_some_checks_is_named(evaluated, tmp_path):
    """Rows of a validation alone do not count."""
    (section,) = tables.sections_of_findings([report.load(evaluated)], Charts())
    assert isinstance(section.data, tables.Findings)
    short = dict(line.split(": ") for line in section.data.short)
    assert short.keys() == {"pretrain", "sft", "rm", "ppo"} and "flat_reward" in short["ppo"]
    assert short["sft"] == "flat_loss, rising_loss"
    html = render("findings.html", section=section._replace(data=section.data._replace(findings=[])))
    assert "found nothing; some had too few logged rows to tell." in html
    assert "<li>sft: flat_loss, rising_loss</li>" in html
    enough = section.data._replace(findings=[], short=[])
    assert "found nothing.</p>" in render("findings.html", section=section._replace(data=enough))
    (tmp_path / "sft").mkdir()
    rows = [{"step": i, "loss": 1.0} for i in range(19)]
    for more, unused in (
        ({"eval/loss": 1.0}, ["sft: flat_loss"]),
        ({"loss": 1.0}, []),
    ):
        text = "".join(json.dumps(row) + "\n" for row in [*rows, {"step": 19} | more])
        (tmp_path / "sft" / "metrics.jsonl").write_text(text)
        run = RunRecords("run", tmp_path, {"sft": MANIFEST}, {"sft": summary_of(findings=[])})
        (section,) = tables.sections_of_findings([run], Charts())
        assert isinstance(section.data, tables.Findings) and section.data.short == unused


def test_remedies_and_changes_are_written_as_a_recipe_takes_them(tmp_path):
    remedies = {"grpo.resample_groups": 4, "grpo.old_logprobs": "recompute", "sft.gradient_checkpointing": True}
    finding = {"check": "clipping", "step": 3, "seen": "a", "cause": "b", "remedies": remedies}
    (tmp_path / "grpo").mkdir()
    (tmp_path / "grpo" / "findings.jsonl").write_text(json.dumps(finding) + "\n")
    manifest = manifest_of(overrides={"model.quantization": "none", "data.files": ["a b.jsonl"], "sft.packing": False})
    run = RunRecords("run", tmp_path, {"grpo": manifest}, {})
    (section,) = tables.sections_of_findings([run], Charts())
    assert isinstance(section.data, tables.Findings)
    expected = "grpo.resample_groups=4 or grpo.old_logprobs=recompute or sft.gradient_checkpointing=true"
    assert section.data.findings[0].remedies == expected
    (section,) = tables.sections_of_provenance([run], Charts())
    assert 'changed: model.quantization=none, data.files=["a b.jsonl"], sft.packing=false;' in str(section.data)


def test_provenance_names_changed_code_and_parents_of_another_run(tmp_path):
    def told(**values: Any) -> str:
        code = values.pop("code", {"commit": "abc", "dirty": values.pop("dirty", False)})
        run = RunRecords("run", tmp_path, {"ppo": manifest_of(code=code, **values)}, {})
        (section,) = tables.sections_of_provenance([run], Charts())
        assert isinstance(section.data, Table)
        ((*_, cell),) = section.data.rows
        return str(cell.text)

    assert "code: abc;" in told() and "parents from: this run;" in told()
    outside_git = {"commit": None, "dirty": None}
    assert "code: no commit known;" in told(code=outside_git) and "data: none;" in told(data=None)
    changed = told(dirty=True, parents_from={"sft": "../../other/v1/sft"})
    assert "code: abc with changes;" in changed and "parents from: sft: ../../other/v1/sft;" in changed


def test_several_runs_share_the_charts(run):
    page = report.page([report.load(run), report.load(run)]).html
    charts = json.loads(not_none(re.search(r'id="charts">(.*?)</script>', page, re.S))[1])
    assert all(len(chart["data"]) == 2 for chart in charts if chart["layout"]["title"]["text"] == "score")
    assert any("picked: step" in line["name"] for chart in charts for line in chart["data"])
    assert "<th>run</th>" in page and "<th>run</th>" not in text_of(run)
    assert page.count('<p class="headline') == 2


# ---- the top of the page ----


def finished(stage: StageName, measured: float, **metrics: float) -> Summary:
    """A summary of a stage with one target: at least 0.6."""
    figure = published.Figure(name="gain", stage=stage, metric="gain", range=(0.6, None), unit="sd", source="ours")
    return summary_of(targets=[records.compared(figure, measured)], wall_seconds=90.4, metrics=metrics)


MANIFEST = manifest_of(
    device={"name": "cpu", "type": "cpu", "model": "Some CPU", "threads": 2}, started="2026-01-02T03:04"
)


def child_of(*parents: StageName) -> Manifest:
    """The manifest of a stage with these parents."""
    return manifest_of(parents=dict.fromkeys(parents, "0" * 64))


def test_the_headline_says_what_was_reached_and_what_was_not():
    summaries = {"sft": finished("sft", 0.7), "ppo": finished("ppo", 0.5)}
    assert overview.outcome(dict.fromkeys(summaries, MANIFEST), {"sft": summaries["sft"]}) == (
        "1 of 1 targets met. Not finished: PPO.",
        "",
    )
    sentence, kind = overview.outcome(dict.fromkeys(summaries, MANIFEST), summaries)
    assert (sentence, kind) == ("1 of 2 targets met; missed: PPO, gain.", "bad")
    assert overview.outcome({"sft": MANIFEST}, {}) == ("Not finished: SFT.", "")
    without_figures = {"sft": summary_of(stage="sft"), "rm": summary_of(stage="rm")}
    assert overview.outcome({}, without_figures) == ("Finished: SFT, reward model.", "")


def gains_of(**metrics: dict[str, float]) -> list[evidence.Gain]:
    """The gains of stages with these metrics."""
    return evidence.gains_over_start(
        {stage: summary_of(stage=stage, metrics=values) for stage, values in metrics.items()}
    )


UNSURE = {"score_sft": 0.5, "score": 0.1, "score_gain_sd": -0.39}
WORSE = UNSURE | {"score_gain_sd_low": -0.6, "score_gain_sd_high": -0.2}
IS_BETTER = UNSURE | {"score_gain_sd": 0.39, "score_gain_sd_low": 0.2, "score_gain_sd_high": 0.6}


def test_the_headline_says_that_a_policy_is_worse_than_its_start_where_an_interval_does():
    summaries = {"sft": summary_of(), "ppo": summary_of(stage="ppo", metrics=WORSE)}
    assert overview.outcome({}, summaries, gained=gains_of(ppo=WORSE)) == (
        "PPO is worse than SFT. Finished: SFT, PPO.",
        "bad",
    )
    met = {"ppo": finished("ppo", 0.7)}
    both = overview.outcome({}, met, gained=gains_of(ppo=WORSE, dpo=WORSE))
    assert both == ("PPO and DPO are worse than SFT. 1 of 1 targets met.", "bad")
    assert overview.outcome({}, summaries, gained=gains_of(ppo=IS_BETTER)) == ("Finished: SFT, PPO.", "good")
    unknown = "Not known yet: whether DPO is better than SFT. Finished: SFT, PPO."
    for unsure in (UNSURE, UNSURE | {"score_gain_sd": 0.39}, WORSE | {"score_gain_sd_high": 0.2}):
        assert overview.outcome({}, summaries, gained=gains_of(ppo=IS_BETTER, dpo=unsure)) == (unknown, "")
    unfinished = dict.fromkeys(("sft", "ppo", "rm"), MANIFEST)
    assert overview.outcome(unfinished, summaries, gained=gains_of(ppo=IS_BETTER))[1] == ""


def test_what_was_not_measured_is_no_part_of_the_targets_that_were_met():
    """`6 of 6` would hide the seventh, and `6 of 7` call it missed."""
    figure = published.Figure(name="perplexity", stage="sft", metric="p", range=(None, 2), unit="", source="ours")
    unmeasured = summary_of(stage="sft", targets=[records.compared(figure, None)])
    met = finished("ppo", 0.7)
    assert overview.outcome({}, {"sft": unmeasured, "ppo": met})[0] == "1 target met, 1 not measured."
    missed = overview.outcome({}, {"sft": unmeasured, "ppo": finished("ppo", 0.5)})[0]
    assert missed == "0 of 1 targets met, 1 not measured; missed: PPO, gain."


def test_the_main_gain_is_the_truth_and_that_of_the_evaluation_has_an_interval():
    (own,) = gains_of(ppo=UNSURE | {"true_reward_sft": 0.6, "true_reward": 2.3, "true_reward_gain_sd": 1.25})
    assert (own.name, own.start, own.end, own.value, own.low, own.unit) == (
        "true reward",
        0.6,
        2.3,
        1.25,
        None,
        "standard deviations",
    )
    functions = {"reward_right_sft": 0.25, "reward_right": 0.5, "reward_right_gain": 0.25}
    (right,) = gains_of(grpo=UNSURE | functions)
    assert (right.stage, right.name, right.value, right.unit, right.kind) == ("grpo", "right", 0.25, "", "")
    evaluated = {"sft/score": 0.4, "ppo/score": 0.3, "ppo/score_gain_sd": -0.2}
    for low, high, kind in ((-0.3, -0.1, "bad"), (-0.3, 0.1, ""), (0.1, 0.3, "good")):
        ends = {"ppo/score_gain_sd_low": low, "ppo/score_gain_sd_high": high}
        (one,) = gains_of(ppo=WORSE, evaluate=evaluated | ends)
        assert (one.start, one.low, one.high, one.kind) == (0.4, low, high, kind)
    assert gains_of(sft={"loss": 1.0}, dpo={"preference_accuracy": 0.7}) == []


def test_an_evaluation_that_has_changed_does_not_decide_the_headline(evaluated, tmp_path):
    root = tmp_path / "cpu-tiny" / "v1"
    shutil.copytree(evaluated, root)
    assert "evaluate" in trusted_summaries(report.load(root))
    with (root / "evaluate" / "samples.jsonl").open("a") as file:
        file.write("\n")
    assert trusted_summaries(report.load(root)).keys() == {"pretrain", "sft", "rm", "ppo"}


def test_before_and_after_stand_large_at_the_top(tmp_path):
    def top(**metrics: dict[str, float]) -> str:
        summaries = {stage: summary_of(stage=stage, metrics=values) for stage, values in metrics.items()}
        write_records(tmp_path / "evaluate")
        run = RunRecords("run", tmp_path, dict.fromkeys(summaries, MANIFEST), summaries)
        (section,) = overview.sections_of_overview([run], Charts())
        return render("overview.html", section=section)

    alone = top(ppo=UNSURE)
    assert '<div class="large ">0.50 → 0.10</div>' in alone and "score, SFT → PPO" in alone
    assert "-0.39 standard deviations: not known yet; `rlhf run evaluate` measures an interval" in alone
    assert '<div class="large bad">0.50 → 0.10</div>' in top(ppo=WORSE)
    ends = {"ppo/score_gain_sd": 0.2, "ppo/score_gain_sd_low": 0.05, "ppo/score_gain_sd_high": 0.31}
    several = ends | {"ppo/heldout_prompts": 40}
    evaluated = top(ppo=UNSURE, evaluate={"sft/score": 0.4, "ppo/score": 0.6} | several)
    assert '<div class="large good">0.40 → 0.60</div>' in evaluated
    assert "+0.20 standard deviations (95 %: +0.05 to +0.31) on 40 held-out prompts: better" in evaluated
    assert '"large' not in top(sft={"loss": 1.0})


def test_what_was_learned_comes_first_and_provenance_last(run):
    titles = re.findall("<h2>(.*?)</h2>", text_of(run))
    order = ["Targets and what was measured", "Samples", "ppo: curves", "pretrain: curves", "Where the time went"]
    order += ["Memory", "Findings during training", "Provenance"]
    assert [title for title in titles if title in order] == order and titles[-1] == "Provenance"
    first = next(iter(charts_of(text_of(run))))
    assert first.startswith("true reward, PPO (dotted: SFT")


def test_the_gain_and_the_facts_are_those_of_the_summaries():
    metrics = {"true_reward_gain_sd": 1.274, "score_gain_sd": 1.3, "kl_per_token": 0.1868}
    summaries = {"ppo": finished("ppo", 0.7, **metrics)}
    gained = (
        "PPO against SFT: true reward +1.27, score of the reward model +1.30 standard deviations, at a KL of 0.1868"
    )
    assert overview.gains(summaries).startswith(gained)
    assert ", score +1.30 standard" in overview.gains({"grpo": finished("grpo", 0.7, **metrics)})
    right = {"reward_numeric_answer": 0.5625, "reward_numeric_answer_sft": 0.25, "reward_numeric_answer_gain": 0.3125}
    assert overview.gains({"rloo": finished("rloo", 0.7, score_gain_sd=0.13, kl_per_token=0.2, **right)}) == (
        "RLOO against SFT: numeric answer 0.5625 (+0.312); score +0.13 standard deviations, at a KL of 0.2 nats per "
        "token."
    )
    assert (
        overview.gains({"rloo": finished("rloo", 0.7, **right)}) == "RLOO against SFT: numeric answer 0.5625 (+0.312)."
    )
    small_kl = {"ppo": finished("ppo", 0.7, score_gain_sd=0.1, kl_per_token=1.284e-05)}
    assert overview.gains(small_kl).endswith("at a KL below 0.0001 nats per token.")
    facts = overview.facts({"ppo": MANIFEST}, summaries, 36.0)
    assert facts == ["2026-01-02", "Some CPU, 2 threads", "0:01:30 in 1 finished stage", "0.90 USD for each card"]


def test_every_device_of_a_run_is_named_once():
    card = manifest_of(device={"name": "Some card", "type": "cuda"}, started="2026-01-02T03:04")
    facts = overview.facts({"pretrain": MANIFEST, "sft": card, "rm": card, "ppo": MANIFEST}, {})
    assert facts == ["2026-01-02", "Some CPU, 2 threads", "Some card"]


def test_the_picture_has_a_box_for_each_stage_and_an_arrow_for_each_parent():
    summaries = {"sft": finished("sft", 0.7), "rm": finished("rm", 0.5)}
    chain = {"sft": MANIFEST, "rm": child_of("sft"), "ppo": child_of("sft", "rm"), "grpo": child_of("sft")}
    drawn = overview.picture({stage: chain[stage] for stage in ("sft", "rm", "ppo")}, summaries)
    assert [box.kind for box in drawn.boxes] == ["good", "bad", "open"] and drawn.boxes[2].line == "not finished"
    assert len(drawn.arrows) == 3, "SFT to both, reward model to PPO"
    assert drawn.label == "SFT, reward model, PPO (not finished)"
    assert len(overview.picture(chain, summaries).arrows) == 4, "GRPO learned from no reward model"


def test_every_link_of_the_contents_leads_to_a_section(evaluated):
    page = report.page([report.load(evaluated)]).html
    links = re.findall(r'<a href="#([^"]+)">', page)
    assert len(links) >= 12 and links == re.findall(r'<section id="([^"]+)">', page)


def test_samples_show_the_truth_and_the_question_and_no_answer_that_somebody_chose(evaluated):
    page = report.page([report.load(evaluated)]).html.partition('id="samples"')[2]
    table = page.partition("</table>")[0]
    assert re.findall("<th>(.*?)</th>", table) == ["question", "base", "SFT", "PPO"]
    assert re.search(r'<div class="given (good|bad|)">true reward -?[0-9.]+ · score -?[0-9.e-]+</div>', page)
    assert "Human:" not in page[:2000]


def test_many_samples_are_folded(run, tmp_path):
    root = tmp_path / "cpu-tiny" / "v1"
    shutil.copytree(run, root)
    rows = [{"step": 0, "prompt": f"prompt {i}", "sft": {"response": "yes"}} for i in range(30)]
    (root / "evaluate" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = report.page([report.load(root)]).html
    assert page.count('<tr class="sample">') == 30
    assert page.partition('<details class="more">')[0].count('<tr class="sample">') == OPEN
    assert "<summary>18 more</summary>" in page


def tables_of(*runs: RunRecords) -> list[SampleTable]:
    (section,) = sections_of_samples(runs, Charts())
    assert isinstance(section.data, list)
    return section.data


def written(folder: Path, rows: list[dict[str, Any]], stage: str = "evaluate") -> RunRecords:
    """A run with these samples."""
    (folder / stage).mkdir(parents=True)
    (folder / stage / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunRecords(folder.name, folder, {}, {})


def test_without_an_evaluation_the_newest_samples_of_a_policy_come_first(tmp_path):
    rows = [
        {"step": step, "prompt": f"prompt {i}", "response": f"of step {step}"}
        for step in range(1, 61)
        for i in range(4)
    ]
    (table,) = tables_of(written(tmp_path / "one", rows, "grpo"))
    assert table.steps and [row.step for row in table.open] == ["60"] * 4 and table.folded[0].step == "59"
    assert [row.question for row in table.open[:4]] == [f"…{i}" for i in range(4)], "what all prompts share is left out"


def test_an_answer_is_right_or_wrong_or_better_or_worse_than_that_of_the_start(tmp_path):
    def row(**given: Any) -> dict[str, Any]:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]
        said = {name: {"response": name, **values} for name, values in given.items()}
        return {"step": 0, "prompt": "<|system|> …", "messages": messages, "expected": "4"} | said

    right = [row(base={"rewards": {"right": 0.0}}, grpo={"rewards": {"right": 1.0}, "score": 1.0})]
    (table,) = tables_of(written(tmp_path / "right", right))
    (shown,) = table.open
    assert (table.columns, shown.question, shown.expected) == (["base", "GRPO"], "What is 2 + 2?", "4")
    assert [turn.text for turn in shown.before] == ["Be brief."]
    assert [(said.given, said.kind) for said in shown.answers] == [
        ("✗ right 0", "bad"),
        ("✓ right 1 · score 1", "good"),
    ]
    without = [row(base={"score": 0.2}, grpo=right[0]["grpo"])]
    (table,) = tables_of(written(tmp_path / "without", without))
    assert [said.given for said in table.open[0].answers] == ["score 0.2", "✓ right 1 · score 1"], "one has no verdict"
    scores = [row(sft={"score": 0.5}, ppo={"score": -1.0}, dpo={"score": 0.5}, kto={"score": 0.75})]
    (table,) = tables_of(written(tmp_path / "scores", scores))
    assert [said.kind for said in table.open[0].answers] == ["", "bad", "", "good"]
    unjudged = [row(base={}, sft={})]
    (table,) = tables_of(written(tmp_path / "unjudged", unjudged))
    assert [(said.given, said.kind) for said in table.open[0].answers] == [("", "")] * 2


def test_runs_that_answered_the_same_prompts_share_a_table(tmp_path):
    def rows(*prompts: str) -> list[dict[str, Any]]:
        said = {"sft": {"response": "the same"}}
        return [{"step": 0, "prompt": p, **said, "ppo": {"response": f"{prompts} to {p}"}} for p in prompts]

    one, two, other = (written(tmp_path / n, rows(*p)) for n, p in (("one", "ab"), ("two", "ba"), ("other", "abc")))
    (table,) = tables_of(one, two)
    assert table.columns == ["SFT", "PPO (one)", "PPO (two)"] and table.name == "", "one start"
    texts = [[said.text for said in row.answers[1:]] for row in table.open]
    assert texts == [[f"{('a', 'b')} to {p}", f"{('b', 'a')} to {p}"] for p in "ab"]
    apart = [(table.name, table.columns) for table in tables_of(one, other)]
    assert apart == [("one", ["SFT", "PPO"]), ("other", ["SFT", "PPO"])]


def test_several_samples_of_a_prompt_have_a_row_each(tmp_path):
    rows = [{"step": 0, "prompt": "a", "sample": i, "ppo": {"response": str(i)}} for i in range(3)]
    (table,) = tables_of(written(tmp_path / "one", rows))
    assert [row.answers[0].text for row in table.open] == ["0", "1", "2"]


def test_the_chart_of_what_was_learned_has_the_start_s_level_and_the_ends_of_intervals(tmp_path):
    """Function rewards in their own unit; gains in standard deviations are put back into the score's."""
    (tmp_path / "ppo").mkdir()
    of_score = {"score_sft": 1.0, "score": 3.0, "score_gain_sd": 0.5, "response_length_sft": 4.0}
    ends = {"score_gain_sd_low": 0.25, "score_gain_sd_high": 0.75, "heldout_prompts": 64}
    rows = [{"step": 10, "loss": 1.0}, {"step": 20} | {f"eval/{key}": v for key, v in (of_score | ends).items()}]
    later = of_score | ends | {"score": 5.0, "score_gain_sd": 1.0}
    rows += [{"step": 40} | {f"eval/{key}": v for key, v in later.items()}]
    (tmp_path / "ppo" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    charts = Charts()
    learned.sections_of_learned([RunRecords("run", tmp_path, {}, {})], charts)
    (chart,) = charts.all
    band, line = chart["data"]
    assert (line["x"], line["y"], line["name"]) == ([0, 20, 40], [1.0, 3.0, 5.0], "PPO on 64 held-out prompts")
    assert (band["x"], band["y"]) == ([20, 40, 40, 20], [4.0, 4.0, 2.0, 2.0])
    assert chart["layout"]["shapes"][0]["y0"] == 1.0
    summary = summary_of(stage="dpo", metrics=of_score | ends)
    charts = Charts()
    learned.sections_of_learned([RunRecords("run", tmp_path / "none", {}, {"dpo": summary})], charts)
    line, bars = charts.all[0]["data"]
    assert line["y"] == [1.0, 3.0] and (bars["error_y"]["array"], bars["error_y"]["arrayminus"]) == ([1.0], [1.0])


def test_of_several_runs_each_contradicted_pair_names_its_own(tmp_path):
    _, figures = reward_model_figures([0.0, 1.0], [1.0, 0.0], [0, 0])
    pair = {"margin": -1.0, "prompt": "Why?", "chosen": "So.", "rejected": "No.", "source": "a.jsonl:1"}
    runs = [RunRecords(name, tmp_path / name, {}, {}) for name in ("one", "two")]
    for run in runs:
        folder = run.run_directory / "evaluate"
        folder.mkdir(parents=True)
        write_json(folder / "details.json", {"reward_model": figures.plain(), "contradicted": [pair]})
    for some in (runs, runs[:1]):
        model: Any = sections_of_reward_model(some, Charts())[0].data
        firsts = [pair.turns[0] for pair in model.contradicted]
        assert [turn.text for turn in firsts if turn.speaker == "run"] == (["one", "two"] if some == runs else [])


@needs_browser
def test_on_a_phone_every_cell_is_in_sight(evaluated, chromium, tmp_path):
    report.write([evaluated], tmp_path / "report.html")
    phone = open_page(
        chromium, (tmp_path / "report.html").as_uri(), viewport={"width": 390, "height": 844}, is_mobile=True
    )
    outside = (
        "[...document.querySelectorAll('td, svg.chain, nav a')].filter(e => e.getBoundingClientRect().right > 390)"
    )
    assert phone.evaluate(f"{outside}.length") == 0
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    assert phone.evaluate("getComputedStyle(document.querySelector('td'), '::before').content") == '"stage"'
    desk = open_page(chromium, (tmp_path / "report.html").as_uri(), viewport={"width": 1100, "height": 844})
    assert desk.evaluate("getComputedStyle(document.querySelector('td')).display") == "table-cell"


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="no run there; `rlhf run STAGE` makes one: folders named pretrain, sft, rm"):
        report.write([tmp_path], tmp_path / "x.html")


def test_an_arrow_to_a_row_above_ends_below_its_box():
    """That from SFT to the second reward model."""
    low, high = (2, 2 + overview.ROW), (2 + overview.COLUMN, 2)
    start, end = (int(point.split()[1]) for point in overview._arrow(low, high)[1:].split("L"))
    assert (start, end) == (low[1], high[1] + overview.BOX_HEIGHT + 3)
    start, end = (int(point.split()[1]) for point in overview._arrow(high, low)[1:].split("L"))
    assert (start, end) == (high[1] + overview.BOX_HEIGHT, low[1] - 3)
