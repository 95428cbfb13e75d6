"""What the page of cpu-smollm2-hh says of its record."""

from statistics import fmean

from bench import preferences
from bench.paths import newest
from rlhf.recipe import load
from rlhf.run import reader
from rlhf.run.outcomes import Reproduction
from rlhf.run.records import MetricsLine

PAGE = (preferences.RECIPE / "README.md").read_text()
RECORD = reader.read(newest(preferences.RECORDS, "*/*.json"), Reproduction)


def test_the_targets_that_the_page_calls_met_are_met_on_every_seed():
    assert RECORD is not None and "All five targets are met on every seed" in PAGE
    figures = load(preferences.RECIPE).figures
    assert len(figures) == 5
    for stages in RECORD.seeds.values():
        for figure in figures:
            assert figure.stage != "all" and figure.range and figure.range[0] is not None
            measured = stages[figure.stage].metrics[figure.metric or ""]
            assert measured is not None and measured >= figure.range[0], figure.name


def test_the_page_names_the_shares_of_the_second_gain():
    assert RECORD is not None
    evaluations = [stages["evaluate"].metrics for stages in RECORD.seeds.values()]
    first, second = (
        fmean(metrics[f"ppo/{name}"] or 0.0 for metrics in evaluations)
        for name in ("score_gain_sd", "second_score_gain_sd")
    )
    assert f"({second:.2f} of {first:.2f} sd)" in PAGE and round(10 * second / first) == 8


def test_the_logs_beside_the_record_end_where_the_page_says_that_gains_were_highest():
    file = newest(preferences.RECORDS, "*/*.json")
    best = {}
    for folder in sorted(file.with_suffix("").iterdir()):
        lines = reader.read_lines(folder / "metrics.jsonl", MetricsLine)
        gains = {
            name: {line.step: line.values[key] or 0.0 for line in lines if (key := f"eval/{name}") in line.values}
            for name in ("score_gain_sd", "second_score_gain_sd")
        }
        best[folder.name] = {name: max(of, key=of.__getitem__) for name, of in gains.items()}
    both = {"score_gain_sd": 16, "second_score_gain_sd": 16}
    assert best == {"seed-0": {"score_gain_sd": 8, "second_score_gain_sd": 8}, "seed-1": both, "seed-2": both}
