"""README opens with a recorded run: its table, its picture and its minutes are those of the record and its logs."""

from pathlib import Path
from statistics import fmean

import pytest

from bench import sums
from rlhf.run import reader
from rlhf.run.outcomes import Reproduction

ROOT = Path(__file__).parents[2]


def test_the_logs_beside_the_record_are_of_its_runs():
    record = reader.read(sums.newest(), Reproduction)
    assert record is not None and list(record.seeds) == ["0", "1", "2"]
    rows = sums.samples(sums.newest())
    for policy in ("base", "grpo"):
        share = fmean(row[policy]["rewards"]["numeric_answer"] for row in rows)
        assert share == pytest.approx(record.seeds["0"]["evaluate"].metrics[f"{policy}/{sums.REWARD}"])
    for seed, stages in record.seeds.items():
        last = sums.logged(sums.newest())[seed][-1].values
        assert last[f"eval/{sums.REWARD}"] == stages["grpo"].metrics[sums.REWARD]
        assert 0.1 < sums.cpu_minutes(sums.newest(), seed) * 60 / stages["grpo"].wall_seconds <= 1


def test_the_readme_shows_the_picture_and_the_minutes_of_the_record():
    page = (ROOT / "README.md").read_text()
    assert sums.IMAGE.read_text() == sums.chart(), "run `make docs-tables`"
    assert f"]({sums.newest().relative_to(ROOT)})" in page and "](docs/images/sums.svg)" in page
    minutes = round(fmean(sums.cpu_minutes(sums.newest(), seed) for seed in ("0", "1", "2")))
    assert f"learns sums: {minutes} minutes of one CPU core" in page


def test_signs_of_markdown_in_an_answer_stay_signs():
    assert sums._cell("a|b\n* <br>") == r"a\|b \* \<br>"
