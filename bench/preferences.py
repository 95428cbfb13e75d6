"""The table of cpu-smollm2-hh: what each seed of its newest record learned, as both reward models see it."""

from collections.abc import Mapping
from typing import NamedTuple

from bench.paths import ROOT, newest
from rlhf.recipe import PinnedRecipe, load
from rlhf.run import reader
from rlhf.run.outcomes import Reproduction

RECIPE = ROOT / "recipes/cpu-smollm2-hh/v1"
RECORDS = ROOT / "results/cpu-smollm2-hh/v1"


class Row(NamedTuple):
    """A figure of the evaluation, in its own unit or in per cent."""

    words: str
    metric: str
    aim: str = ""  # stage and metric of the recipe's target
    percent: bool = False


ROWS = (
    Row("held-out pairs ranked rightly by the reward model", "rm/accuracy", "rm accuracy", percent=True),
    Row("the same by the second one", "second_rm/accuracy", "second_rm accuracy", percent=True),
    Row("PPO's gain by the reward model, sd", "ppo/score_gain_sd", "evaluate ppo/score_gain_sd"),
    Row("the same by the second one", "ppo/second_score_gain_sd", "evaluate ppo/second_score_gain_sd"),
    Row("PPO's wins over SFT", "ppo/win_rate_vs_sft", percent=True),
    Row(
        "the same for answers of one length", "ppo/lc_win_rate_vs_sft", "evaluate ppo/lc_win_rate_vs_sft", percent=True
    ),
    Row("PPO's KL per token, nats", "ppo/kl_per_token"),
    Row("DPO's gain by the reward model, sd", "dpo/score_gain_sd"),
    Row("the same by the second one", "dpo/second_score_gain_sd"),
    Row("DPO's wins over SFT for answers of one length", "dpo/lc_win_rate_vs_sft", percent=True),
    Row("DPO's KL per token, nats", "dpo/kl_per_token"),
    Row("tokens of an answer of SFT", "sft/response_length"),
    Row("of PPO", "ppo/response_length"),
    Row("of DPO", "dpo/response_length"),
)


def table() -> str:
    """Return the table of the newest record: a row for each figure, with its 95 % interval, a column for each seed."""
    record = reader.read(newest(RECORDS, "*/*.json"), Reproduction)
    assert record is not None
    aims, seeds = _aims(load(RECIPE)), record.seeds
    lines = [("", "aim", *(f"seed {seed}" for seed in seeds)), ("---",) * (2 + len(seeds))]
    for row in ROWS:
        figures = (_figure(row, stages["evaluate"].metrics) for stages in seeds.values())
        aim = f"≥ {_text(aims[row.aim], row.percent)}" if row.aim else ""
        lines.append((row.words, aim, *figures))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _aims(loaded: PinnedRecipe) -> dict[str, float | None]:
    """Return the least value that each target allows, by its stage and metric."""
    return {f"{figure.stage} {figure.metric}": figure.range[0] for figure in loaded.figures if figure.range}


def _figure(row: Row, metrics: Mapping[str, float | None]) -> str:
    """Return a figure with the ends of its interval, if it has one."""
    low, high = (metrics.get(f"{row.metric}_{end}") for end in ("low", "high"))
    interval = "" if low is None else f" ({_text(low, row.percent)} to {_text(high, row.percent)})"
    return _text(metrics[row.metric], row.percent) + interval


def _text(value: float | None, percent: bool) -> str:
    """Return a number with two digits or more, in per cent if it is a share."""
    if value is None:
        return "–"
    digits = 1 if abs(value) >= 10 else 3 if abs(value) < 0.02 else 2
    return f"{100 * value:.1f} %" if percent else f"{value:.{digits}f}"
