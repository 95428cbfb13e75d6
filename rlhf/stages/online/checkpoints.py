"""Choose the best checkpoint of a stage that learns from its own samples, and delete those that are not kept."""

from rlhf.files import write_json
from rlhf.recipe import OnlineOptions
from rlhf.run.directory import Run
from rlhf.run.reader import read_lines
from rlhf.run.records import MetricsLine


def choose_online_checkpoints(run: Run, options: OnlineOptions) -> int | None:
    """Name the best checkpoint in checkpoints/best.json, and delete those that `keep_checkpoints` does not keep.

    The best has the highest held-out score among those within the KL limit. Both were logged in the checkpoint's own
    step: `save_steps` is a multiple of `logging_steps`. Returns its step, None without one.
    """
    rows = {row.step: row.values for row in read_lines(run.path / "metrics.jsonl", MetricsLine)}

    def fact(step: int, name: str) -> float | None:
        return rows[step].get(f"eval/{name}")  # null where it was not finite

    def within(step: int) -> bool:
        kl, limit = fact(step, "kl_per_token"), options.best_kl_limit
        return fact(step, "score") is not None and (limit is None or (kl is not None and kl <= limit))

    candidates = [step for step in run.checkpoints.steps() if step in rows and within(step)]
    best = max(candidates, key=lambda step: (fact(step, "score"), -step), default=None)
    if options.keep_checkpoints != "all":
        run.checkpoints.drop(options.keep_checkpoints, spare=best)
    facts = [
        {"step": step, "score": fact(step, "score"), "kl_per_token": fact(step, "kl_per_token")}
        for step in run.checkpoints.steps()
        if step in rows
    ]
    chosen = {"kl_limit": options.best_kl_limit, "best_step": best, "checkpoints": facts}
    write_json(run.path / "checkpoints" / "best.json", chosen)
    return best
