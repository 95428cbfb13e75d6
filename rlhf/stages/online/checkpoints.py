"""Choose the best checkpoint of a stage that learns from its own samples, and delete those that are not kept."""

from collections.abc import Iterable

from rlhf.errors import UserError
from rlhf.files import JsonObject, write_json
from rlhf.recipe import Recipe, StageName
from rlhf.recipe.schema_online import MODEL_REWARD, OnlineOptions
from rlhf.run.directory import StageRun
from rlhf.run.layout import METRICS
from rlhf.run.reader import read_lines
from rlhf.run.records import MetricsLine
from rlhf.stages.online.rewards import labels

SCORE, KL = "score", "kl_per_token"
Evaluations = dict[int, dict[str, float | None]]  # held-out metrics by step; None for a number that is not finite


def check_best_by(recipe: Recipe, stage: StageName, options: OnlineOptions) -> None:
    """Raise UserError unless the stage measures on held-out prompts what `best_by` chooses checkpoints by."""
    functions = [name for name in options.reward_funcs if name != MODEL_REWARD]
    measured = {
        SCORE: True,
        "second_score": recipe.second_rm is not None and options.model_scores,
        "true_reward": recipe.data.has_true_reward,
        **{f"reward_{label}": True for label in labels(functions)},
    }
    known = [name for name, is_measured in measured.items() if is_measured]
    if options.best_by is not None and options.best_by not in known:
        raise UserError(f"{stage}.best_by: {options.best_by} is not one of {', '.join(known)}, which {stage} measures")


def update_checkpoints(run: StageRun, options: OnlineOptions) -> int | None:
    """Delete the checkpoints that `keep_checkpoints` does not keep, and write checkpoints/best.json.

    Returns the step of the best checkpoint, None without one.
    """
    by = options.best_by or SCORE
    evaluations = _evaluations(run, dict.fromkeys((SCORE, KL, by)))
    best = best_step(evaluations, options.best_kl_limit, by)
    if options.keep_checkpoints != "all":
        run.checkpoints.keep_newest(keep=options.keep_checkpoints, spare=best)
    kept = [{"step": step} | evaluations[step] for step in run.checkpoints.steps() if step in evaluations]
    chosen: JsonObject = {"kl_limit": options.best_kl_limit, "best_step": best, "checkpoints": kept}
    if options.best_by is not None:
        chosen["best_by"] = options.best_by
    write_json(run.path / "checkpoints" / "best.json", chosen)
    return best


def best_step(evaluations: Evaluations, kl_limit: float | None, by: str = SCORE) -> int | None:
    """Return the step with the most of the held-out metric `by`, the first of equals, among those within the KL limit.

    `kl_limit` is in nats per token. Returns None if no step has a finite number within it.
    """

    def within(kl: float | None) -> bool:
        return kl_limit is None or (kl is not None and kl <= kl_limit)

    numbers = {step: row[by] for step, row in evaluations.items() if within(row[KL])}
    finite = {step: number for step, number in numbers.items() if number is not None}
    return max(finite, key=lambda step: (finite[step], -step), default=None)


def _evaluations(run: StageRun, names: Iterable[str]) -> Evaluations:
    """Return what was logged in each checkpoint's own step: `save_steps` is a multiple of `logging_steps`."""
    rows = {row.step: row.values for row in read_lines(run.path / METRICS, MetricsLine)}
    return {step: {n: rows[step].get(f"eval/{n}") for n in names} for step in run.checkpoints.steps() if step in rows}
