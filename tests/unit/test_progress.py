"""What the terminal shows while work goes on."""

import pytest
from rich.console import Console

from rlhf.cli.outcome import summary_table
from rlhf.recipe import published
from rlhf.run import records
from rlhf.terminal import screen
from rlhf.terminal.progress import Bar
from tests.records import summary_of


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests set, as `clock[0]`, and a console that is no terminal."""
    now = [1000.0]
    monkeypatch.setattr("rlhf.terminal.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr(
        screen, "ERR", Console(stderr=True, highlight=False, force_terminal=False, get_time=lambda: now[0])
    )
    return now


def test_without_a_terminal_a_line_now_and_then_has_the_time_left(clock, capsys):
    with Bar("sft") as bar:
        for step in (1, 2, 3):
            clock[0] += 15
            bar.update(step, "loss 1.0", total=10)
    assert capsys.readouterr().err == "sft 2/10, about 0:02:00 left  loss 1.0\n"


def test_a_table_names_no_metric_twice(monkeypatch, capsys):
    monkeypatch.setattr(screen, "OUT", Console(width=100, highlight=False))
    figure = published.Figure(
        name="gain", stage="ppo", metric="score_gain_sd", range=(0.6, None), unit="sd", source="us"
    )
    summary = summary_of(
        recipe="r",
        version="v1",
        stage="ppo",
        seed=0,
        modified=False,
        wall_seconds=3.0,
        tokens_per_second=5.0,
        peak_vram_bytes=None,
        peak_rss_bytes=1e9,
        targets=[records.compared(figure, 0.7)],
        metrics={"score_gain_sd": 0.7, "win_rate_vs_sft": 0.6, "perplexity": 9.0, "score": 1.0},
    )
    summary_table(summary)
    shown = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines() if "│" in line}
    assert "score gain sd" not in shown and "met" in shown["gain"]
    assert {"win rate vs sft", "perplexity", "score"} <= shown.keys()


def test_the_table_of_an_evaluation_has_intervals_below_their_values(monkeypatch, capsys):
    monkeypatch.setattr(screen, "OUT", Console(width=100, highlight=False))
    ends = {"win_rate_vs_sft_low": 0.5, "win_rate_vs_sft_high": 0.7, "win_rate_vs_sft_ci95": 0.1}
    ppo = {"win_rate_vs_sft": 0.6} | ends | {"kl_per_token": 0.25}
    rm = {"rm/accuracy": 0.75, "rm/accuracy_low": 0.625, "rm/accuracy_high": 0.875, "rm/margin": 1.0}
    metrics = {"sft/kl_per_token": 0.0} | {f"ppo/{key}": value for key, value in ppo.items()} | rm
    summary_table(summary_of(stage="evaluate", metrics=metrics))
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    assert "on held-out prompts (brackets: 95 %)" in out
    assert ["win rate vs sft", "", "0.6"] in rows and ["KL per token", "0", "0.25"] in rows
    assert rows[rows.index(["win rate vs sft", "", "0.6"]) + 1] == ["", "", "(0.5 to 0.7)"]
    assert ["accuracy", "0.75"] in rows and ["", "(0.625 to 0.875)"] in rows and ["margin", "1"] in rows
    assert not [row for row in rows if row and row[0].endswith(("low", "high", "ci95"))]
    summary_table(summary_of(stage="evaluate", metrics={"ppo/score": 1.0, "ppo/win_rate_vs_sft_ci95": 0.1}))
    out = capsys.readouterr().out
    assert "win rate vs sft ci95" in out, "of an older run"
