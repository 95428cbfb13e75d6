"""Choose the best checkpoint of a stage that learns from its own samples, and delete those that are not kept."""

from rlhf.files import write_json
from rlhf.recipe import OnlineOptions
from rlhf.run.directory import StageRun
from rlhf.run.layout import METRICS
from rlhf.run.reader import read_lines
from rlhf.run.records import MetricsLine

Evaluations = dict[int, dict[str, float | None]]  # score and kl_per_token by step; None for a number that is not finite


def update_checkpoints(run: StageRun, options: OnlineOptions) -> int | None:
    """Delete the checkpoints that `keep_checkpoints` does not keep, and write checkpoints/best.json.

    Returns the step of the best checkpoint, None without one.
    """
    evaluations = _evaluations(run)
    best = best_step(evaluations, options.best_kl_limit)
    if options.keep_checkpoints != "all":
        run.checkpoints.keep_newest(keep=options.keep_checkpoints, spare=best)
    kept = [{"step": step} | evaluations[step] for step in run.checkpoints.steps() if step in evaluations]
    chosen = {"kl_limit": options.best_kl_limit, "best_step": best, "checkpoints": kept}
    write_json(run.path / "checkpoints" / "best.json", chosen)
    return best


def best_step(evaluations: Evaluations, kl_limit: float | None) -> int | None:
    """Return the step with the highest held-out score, the first of equals, among those within the KL limit.

    `kl_limit` is in nats per token. Returns None if no step has a finite score within it.
    """

    def within(kl: float | None) -> bool:
        return kl_limit is None or (kl is not None and kl <= kl_limit)

    scores = {step: row["score"] for step, row in evaluations.items() if within(row["kl_per_token"])}
    finite = {step: score for step, score in scores.items() if score is not None}
    return max(finite, key=lambda step: (finite[step], -step), default=None)


def _evaluations(run: StageRun) -> Evaluations:
    """Return what was logged in each checkpoint's own step: `save_steps` is a multiple of `logging_steps`."""
    rows = {row.step: row.values for row in read_lines(run.path / METRICS, MetricsLine)}
    names = ("score", "kl_per_token")
    return {step: {n: rows[step].get(f"eval/{n}") for n in names} for step in run.checkpoints.steps() if step in rows}
