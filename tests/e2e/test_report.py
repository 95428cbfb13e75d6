"""The page about a run, opened in a real browser where there is one, with answers that mean harm."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rlhf import report
from rlhf.run import RunError
from tests.conftest import run_stages, small

pytest.importorskip("plotly", reason="a report needs plotly")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
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
def run(tmp_path_factory) -> Path:
    """A finished chain to PPO, and samples of an evaluation that was not held."""
    out = tmp_path_factory.mktemp("report")
    run_stages(small(), out, "pretrain", "sft", "rm", "ppo")
    root = out / "cpu-tiny" / "v1"
    (root / "evaluate").mkdir()
    rows = [{"step": 0, "prompt": f"prompt {i} {text}", "sft": {"response": text}} for i, text in enumerate(HOSTILE)]
    (root / "evaluate" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    finding = {"check": "nan", "step": 3, "seen": "<b>bold</b>", "cause": "none", "remedies": {"ppo.kl_coef": 0.1}}
    (root / "ppo" / "findings.jsonl").write_text(json.dumps(finding) + "\n")
    report.write([root], out / "report.html")
    return root


def text_of(root: Path) -> str:
    return (root.parents[1] / "report.html").read_text(encoding="utf-8")


def dom(root: Path, fragment: str = "") -> str:
    """The page after its scripts have run."""
    address = (root.parents[1] / "report.html").as_uri() + fragment
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000", "--dump-dom"]
    done = subprocess.run([*command, address], capture_output=True, text=True, timeout=120)
    return done.stdout


def test_the_page_needs_no_network(run):
    page = text_of(run)
    ours = page.replace(re.search(r"<script>/\*.*?</script>", page, re.S)[0], "")
    assert "default-src 'none'" in page
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", ours)


def test_every_part_is_there(run):
    page = text_of(run)
    for title in ("Published, predicted, measured", "What looked wrong", "ppo: curves", "Score against divergence"):
        assert f"<h2>{title}</h2>" in page
    for title in ("Where the time went", "Memory", "Samples", "Provenance"):
        assert f"<h2>{title}</h2>" in page
    charts = json.loads(re.search(r'id="charts">(.*?)</script>', page, re.S)[1])
    (curve,) = (c for c in charts if c["layout"]["title"]["text"] == "KL to the reference, nats per token")
    rows = [json.loads(line) for line in (run / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert curve["data"][0]["y"] == [row["objective/kl_per_token"] for row in rows]
    assert "&lt;b&gt;bold&lt;/b&gt;" in page and "ppo.kl_coef=0.1" in page


def test_what_a_model_says_is_text(run):
    page = text_of(run)
    body = page.partition('id="charts"')[0]
    assert "<script>document" not in body and "<img" not in body
    assert html.escape(HOSTILE[0]) in body
    assert "x" * 2001 not in body and "…" in body
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", body)


@browser
def test_in_a_browser_the_charts_are_drawn_and_nothing_takes_over(run):
    found = dom(run)
    assert "<title>cpu-tiny v1</title>" in found
    assert found.count('class="main-svg"') >= 8
    assert re.search(r'<span id="shown">7</span> of 7 samples', found)


@browser
def test_in_a_browser_samples_are_filtered(run):
    found = dom(run, "#filter=needle")
    assert re.search(r'<span id="shown">1</span> of 7 samples', found)
    assert found.count('<div class="sample" hidden') == 6


def test_several_runs_share_the_charts(run):
    page = report.page([report.load(run), report.load(run)])
    charts = json.loads(re.search(r'id="charts">(.*?)</script>', page, re.S)[1])
    assert all(len(chart["data"]) == 2 for chart in charts if chart["layout"]["title"]["text"] == "score")
    assert any("picked: step" in line["name"] for chart in charts for line in chart["data"])
    assert "<th>run</th>" in page and "<th>run</th>" not in text_of(run)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(RunError, match="no run there; it should hold folders named pretrain, sft, rm"):
        report.write([tmp_path], tmp_path / "x.html")
