"""The best checkpoint of a stage, by what was logged of it on held-out rows."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping

from rlhf.recipe.schema import Dialogues
from rlhf.recipe.schema_online import OnlineBase
from rlhf.run.directory import StageRun
from rlhf.run.evidence import CHOSEN_AMONG
from rlhf.run.layout import METRICS
from rlhf.run.reader import read_lines
from rlhf.run.records import MetricsLine

Logged = Mapping[str, float | None]  # metrics of a step by name; None for a number that is not finite


def best_step(run: StageRun, figure: Callable[[Logged], float | None]) -> int | None:
    """Return the step of the checkpoint with the highest figure, the first of equals; None where none has a figure."""
    logged: dict[int, dict[str, float | None]] = defaultdict(dict)
    for line in read_lines(run.path / METRICS, MetricsLine):
        logged[line.step] |= line.values
    figures = {step: value for step in run.checkpoints.steps() if (value := figure(logged[step])) is not None}
    return max(figures, key=lambda step: (figures[step], -step), default=None)


def choice(run: StageRun, best: int | None) -> dict[str, float]:
    """Return the metrics of a choice: the best step, NaN without one; and among how many, if the figures' rows chose.

    Without `data.validation_fraction` the held-out rows that `adapter: best` compares checkpoints on are those of the
    figures: the largest of several noisy numbers is too large.
    """
    recipe = run.loaded.recipe
    options = recipe.section(run.stage)
    assert isinstance(options, Dialogues | OnlineBase)
    metrics: dict[str, float] = {"best_step": math.nan if best is None else best}
    among = math.ceil(run.total_steps / options.save_steps)
    if options.adapter == "best" and among > 1 and recipe.data.validation_fraction is None:
        metrics[CHOSEN_AMONG] = among
    return metrics
