"""Choose the best checkpoint of a stage that learns from its own samples, and delete those that are not kept."""

from rlhf.files import JsonObject, write_json
from rlhf.recipe.schema_online import OnlineOptions
from rlhf.run.directory import StageRun
from rlhf.run.layout import METRICS
from rlhf.run.reader import read_lines
from rlhf.run.records import MetricsLine

SCORE, KL = "score", "kl_per_token"
Evaluations = dict[int, dict[str, float | None]]  # held-out metrics by step; None for a number that is not finite


def update_checkpoints(run: StageRun, options: OnlineOptions) -> int | None:
    """Delete the checkpoints that `keep_checkpoints` does not keep, and write checkpoints/best.json.

    Returns the step of the best checkpoint, None without one.
    """
    rows = {row.step: row.values for row in read_lines(run.path / METRICS, MetricsLine)}
    steps = [step for step in run.checkpoints.steps() if step in rows]  # logged: a multiple of `logging_steps`
    evaluations = {step: {name: rows[step].get(f"eval/{name}") for name in (SCORE, KL)} for step in steps}
    best = best_step(evaluations, options.best_kl_limit)
    if options.keep_checkpoints != "all":
        run.checkpoints.keep_newest(keep=options.keep_checkpoints, spare=best)
    kept = [{"step": step} | evaluations[step] for step in run.checkpoints.steps() if step in evaluations]
    chosen: JsonObject = {"kl_limit": options.best_kl_limit, "best_step": best, "checkpoints": kept}
    write_json(run.path / "checkpoints" / "best.json", chosen)
    return best


def best_step(evaluations: Evaluations, kl_limit: float | None) -> int | None:
    """Return the step with the highest held-out score, the first of equals, among those within the KL limit.

    `kl_limit` is in nats per token. Returns None if no step has a finite score within it.
    """

    def within(kl: float | None) -> bool:
        return kl_limit is None or (kl is not None and kl <= kl_limit)

    scores = {step: row[SCORE] for step, row in evaluations.items() if within(row[KL])}
    finite = {step: score for step, score in scores.items() if score is not None}
    return max(finite, key=lambda step: (finite[step], -step), default=None)
