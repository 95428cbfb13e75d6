"""The page about a run, opened in a real browser where there is one, with answers that mean harm."""

import json
import re
import shutil
from collections.abc import Iterable
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from rlhf import recipe
from rlhf.errors import UserError
from rlhf.report import charts, learned, page, records, tables
from rlhf.run.records import compared
from tests.browser import chromium as chromium
from tests.browser import complaints, needs_browser, open_page
from tests.helpers import RECIPE, content_of, not_none, rlhf
from tests.records import write_records

HOSTILE = [
    "<script>document.title = 'taken over'</script>",
    '"><img src=x onerror="document.title = 1">',
    "x" * 1_000_000,
    "bell \x07 escape \x1b[31m null \x00 delete \x7f",
]
# PPO's gain in the true reward on eight prompts, as an evaluation writes it.
GAIN: dict[str, Any] = {
    "sft/true_reward": 0.5,
    "ppo/true_reward": 1.5,
    "ppo/true_reward_gain_sd": 1.0,
    "ppo/true_reward_gain_sd_low": 0.5,
    "ppo/true_reward_gain_sd_high": 1.5,
    "ppo/heldout_prompts": 8,
}


def lines_of(answers: Iterable[tuple[str, float, str, float]]) -> str:
    """Lines of samples: SFT's answer and PPO's to a prompt each, with their true rewards."""
    rows = [
        {
            "step": 0,
            "prompt": f"\n\nHuman: question {i}?\n\nAssistant:",
            "sft": {"response": a, "true_reward": x},
            "ppo": {"response": b, "true_reward": y},
        }
        for i, (a, x, b, y) in enumerate(answers)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def made(folder: Path, metrics: dict[str, Any], samples: str = "", **stages: dict[str, Any]) -> records.RunRecords:
    """A run of PPO with an evaluation that has these metrics and samples; `stages` are keys of further summaries."""
    root = folder / "cpu-tiny" / "v1"
    (root / "evaluate").mkdir(parents=True)
    (root / "evaluate" / "samples.jsonl").write_text(samples)
    for stage in ("ppo", *stages):
        write_records(root / stage, {}, stages.get(stage))
    write_records(root / "evaluate", {}, {"metrics": metrics})
    return records.load(root)


def text_of(html: str) -> str:
    """What a reader sees of a page."""
    return " ".join(unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", html, flags=re.S)).split())


def test_the_page_of_a_real_run_has_its_sections_and_needs_no_network(evaluated):
    run = records.load(evaluated)
    html = page.page(run)
    headings = ["Answers", "Learning", "Memory and time", "Findings", "In detail", "Provenance"]
    assert re.findall(r"<h2>(.*?)</h2>", html) == headings and not run.problems
    assert "default-src 'none'" in html and not re.findall(r"""(?:src|href)=(?!["']?data:)|<script""", html)
    shown = text_of(html)
    summary = content_of(evaluated / "evaluate" / "summary.json")
    assert f"{summary['metrics']['ppo/true_reward']:.3g}" in shown and "at most 3" in shown
    curves = dict(charts.training(run))["PPO"]
    rows = [json.loads(line) for line in (evaluated / "ppo" / "metrics.jsonl").read_text().splitlines()]
    (kl,) = (chart for chart in curves if chart.title.startswith("KL to the reference"))
    assert kl.title.endswith("nats per token") and kl.line.count("L") == len(rows) - 1
    (of_ppo,) = charts.learned(run)
    assert of_ppo.line.count("L") == sum("eval/true_reward" in row for row in rows) and of_ppo.level is not None
    costs = not_none(tables.costs(run))
    stages = [row[0].text for row in costs.rows if row[0].text]
    assert stages == ["pretraining", "SFT", "reward model", "PPO", "evaluation"]


@pytest.mark.parametrize(
    ("low", "high", "kind", "word"),
    [(0.5, 1.5, "good", "raised"), (-1.5, -0.5, "bad", "lowered"), (-0.5, 1.5, "", "not known")],
)
def test_the_first_sentence_says_what_was_learned_with_its_interval(tmp_path, low, high, kind, word):
    """The ends of the gain, in standard deviations, are those of the reward: 0.5 a deviation here."""
    ends = {"ppo/true_reward_gain_sd_low": low, "ppo/true_reward_gain_sd_high": high}
    value = (low + high) / 2
    metrics = GAIN | ends | {"ppo/true_reward_gain_sd": value, "ppo/true_reward": 0.5 + 0.5 * value}
    ((text, found),) = learned.sentences(made(tmp_path, metrics))
    assert (found, word in text) == (kind, True)
    assert "8 held-out prompts" in text and f"{0.5 + 0.5 * low:.3g} to {0.5 + 0.5 * high:.3g}" in text


def test_a_finding_a_figure_and_what_is_unfinished_are_on_the_page(tmp_path):
    target = next(figure for figure in recipe.load(RECIPE).figures if figure.metric == "kl_per_token")
    run = made(tmp_path, GAIN, ppo={"targets": [compared(target, 9.0)]})
    finding = {"check": "nan", "step": 3, "seen": "<b>bold</b>", "cause": "lower ppo.kl_coef"}
    (run.directory / "ppo" / "findings.jsonl").write_text(json.dumps(finding) + "\n")
    write_records(run.directory / "dpo")
    (run.directory / "dpo" / "summary.json").unlink()
    html = page.page(records.load(run.directory), price=2.0)
    assert "&lt;b&gt;bold&lt;/b&gt;" in html and "lower ppo.kl_coef" in html
    shown = text_of(html)
    assert target.title in shown and "missed" in shown and "Not finished: DPO." in shown and "USD" in shown


def test_what_a_model_says_is_text(tmp_path):
    html = page.page(made(tmp_path, GAIN, lines_of((text, 0.0, text, 1.0) for text in HOSTILE)))
    assert "<script" not in html and "<img" not in html and "&lt;script&gt;" in html
    assert "x" * 2001 not in html and "…" in html
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", html)


def copied(evaluated: Path, out: Path) -> Path:
    shutil.copytree(evaluated, out / "cpu-tiny" / "v1")
    return out / "cpu-tiny" / "v1"


@pytest.mark.parametrize("content", ["{", '{"schema": 99}', "[1]", "\x00"])
@pytest.mark.parametrize("file", ["sft/manifest.json", "ppo/summary.json", "evaluate/manifest.json"])
def test_a_damaged_record_is_left_out_and_named(evaluated, tmp_path, file, content):
    root = copied(evaluated, tmp_path)
    (root / file).unlink()
    (root / file).write_text(content)
    run = records.load(root)
    assert run.problems and str(root / file) in " ".join(run.problems)
    assert "Left out" in page.page(run)


def test_an_evaluation_that_has_changed_is_left_out(evaluated, tmp_path, monkeypatch, capsys):
    root = copied(evaluated, tmp_path)
    samples = root / "evaluate" / "samples.jsonl"
    samples.write_text(samples.read_text().replace("Human", "Humans", 1))
    code, out, err = rlhf(monkeypatch, capsys, "report", root)
    assert code == 0 and "samples.jsonl has changed" in err and str(root / "report.html") in out
    assert records.load(root).problems and "evaluate" not in records.load(root).summaries


def test_the_page_of_a_run_is_in_its_directory(tmp_path, monkeypatch, capsys):
    run = made(tmp_path / "a", GAIN).directory
    code, out, _ = rlhf(monkeypatch, capsys, "report", run)
    assert code == 0 and (run / "report.html").is_file() and str(run / "report.html") in out
    with pytest.raises(UserError, match="no run there"):
        records.load(tmp_path)


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_everything_is_in_sight(evaluated, chromium, tmp_path, width):
    page.write(evaluated, tmp_path / "report.html")
    shown = open_page(chromium, (tmp_path / "report.html").as_uri(), viewport={"width": width, "height": 844})
    shown.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert shown.title() == "cpu-tiny v1" and shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert shown.locator("svg").count() >= 8 and not complaints(shown)
