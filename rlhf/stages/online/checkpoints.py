"""Choose the best checkpoint of a stage that learns from its own samples, and delete those that are not kept."""

from collections.abc import Mapping

from rlhf.recipe.schema_online import OnlineOptions
from rlhf.run.directory import StageRun
from rlhf.run.layout import METRICS
from rlhf.run.reader import read_lines
from rlhf.run.records import MetricsLine

Evaluations = Mapping[int, Mapping[str, float | None]]  # logged metrics by step; None for a number that is not finite


def update_checkpoints(run: StageRun, options: OnlineOptions) -> int | None:
    """Delete the checkpoints that `keep_checkpoints` does not keep. Return the step of the best one, None without."""
    logged = {row.step: row.values for row in read_lines(run.path / METRICS, MetricsLine)}
    best = best_step({step: logged[step] for step in run.checkpoints.steps() if step in logged}, options.best_kl_limit)
    if options.keep_checkpoints != "all":
        run.checkpoints.keep_newest(keep=options.keep_checkpoints, spare=best)
    return best


def best_step(evaluations: Evaluations, kl_limit: float | None) -> int | None:
    """Return the step with the highest held-out score, the first of equals, among those within the KL limit.

    `kl_limit` is in nats per token. Returns None if no step has a finite score within it.
    """
    scores: dict[int, float] = {}
    for step, row in evaluations.items():
        score, kl = row.get("eval/score"), row.get("eval/kl_per_token")
        if score is not None and (kl_limit is None or (kl is not None and kl <= kl_limit)):
            scores[step] = score
    return max(scores, key=lambda step: (scores[step], -step), default=None)
