"""What the terminal shows while work goes on."""

import pytest
from rich.console import Console

from rlhf.cli.outcome import show_stage
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


def test_the_table_of_an_evaluation_has_intervals_beside_their_values(monkeypatch, capsys):
    monkeypatch.setattr(screen, "OUT", Console(width=100, highlight=False))
    ends = {"win_rate_vs_sft_low": 0.5, "win_rate_vs_sft_high": 0.7, "win_rate_vs_sft_ci95": 0.1}
    ppo = {"win_rate_vs_sft": 0.6} | ends | {"kl_per_token": 0.25}
    rm = {"rm/accuracy": 0.75, "rm/accuracy_low": 0.625, "rm/accuracy_high": 0.875, "rm/margin": 1.0}
    metrics = {"sft/kl_per_token": 0.0} | {f"ppo/{key}": value for key, value in ppo.items()} | rm
    show_stage(summary_of(stage="evaluate", metrics=metrics))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["win rate vs sft", "", "0.6 (0.5 to 0.7)", ""] in rows and ["KL per token", "0", "0.25", ""] in rows
    assert ["accuracy", "", "", "0.75 (0.625 to 0.875)"] in rows and ["margin", "", "", "1"] in rows
    assert not [row for row in rows if row and row[0].endswith(("low", "high", "ci95"))]
