"""The plan of a recipe: the memory, time and money that its stages take, predicted or projected before they run."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rlhf.errors import OptionError, UserError
from rlhf.memory import cards, projection, ranks
from rlhf.memory.phases import ON_HOST, TRAINING_STAGES, PredictedStage, PredictionError, gb
from rlhf.memory.predict import PREDICTED_STAGES, Predictor, needed, reserved
from rlhf.memory.strategies import STEP, effects, one_by_one, operations
from rlhf.observe import console
from rlhf.recipe import PinnedRecipe, Recipe, StageName, as_yaml
from rlhf.recipe import published as figures
from rlhf.recipe.published import GB, Verdict, verdict_of
from rlhf.terminal import say

PHASE_KEYS = ("peak_bytes", "reserved_bytes", "needed_bytes", "paged_bytes", "components")  # of a phase in JSON


def make(
    predict: Predictor,
    loaded: PinnedRecipe,
    stages: Sequence[StageName] = PREDICTED_STAGES,
    price: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Return the plan of some stages as JSON: bytes, hours, and dollars at `price` an hour of one card.

    `say` gets a line for each stage that is rehearsed. Raises PredictionError.
    """
    card = loaded.recipe.hardware.memory_gb
    plans = {}
    for number, stage in enumerate(stages, 1):
        say(f"rehearsing {stage} ({number} of {len(stages)})")
        plans[stage] = _stage(loaded, stage, predict(loaded, stage), price)
    if "ppo" in stages and (step := predict.decoding_step(loaded)):
        plans["ppo"]["decoding_step"] = {role: operations._asdict() for role, operations in step.items()}
    return {
        "recipe": loaded.name,
        "version": loaded.version,
        "modified": loaded.modified,
        "hardware": loaded.recipe.hardware.name,
        "card_bytes": round(card * GB) if card else None,
        "cards": loaded.recipe.hardware.count,
        "price_per_hour": price,
        "projection": projection.basis(),
        "stages": plans,
    }


def _stage(loaded: PinnedRecipe, stage: StageName, predicted: PredictedStage, price: float | None) -> dict[str, Any]:
    recipe = loaded.recipe
    place = "host" if stage in ON_HOST else recipe.hardware.device
    need = needed(predicted[""])
    card = recipe.hardware.memory_gb
    summary: dict[str, Any] = {
        "in_memory_of": place,
        "peak_bytes": predicted[""].peak_bytes,
        "reserved_bytes": reserved(predicted[""]),
        "needed_bytes": need,
        "fits": need <= card * GB if card and place == "cuda" else None,
        "budget_bytes": _budget(loaded, stage),
        "verdict": _peak_verdict(loaded, stage, predicted[""].peak_bytes),
        "phases": {name: {key: getattr(phase, key) for key in PHASE_KEYS} for name, phase in predicted.items() if name},
    }
    rates = cards.NOMINAL_RATES.get(recipe.hardware.name)
    work = projection.work(ranks.recipe_of_one_rank(loaded, stage).recipe, stage, predicted)
    if rates and work:
        projected = work.projected(rates)
        summary["limit_hours"] = work.limit(rates) / 3600
        summary["projected_hours"] = projected.seconds / 3600
        summary["projected_hours_range"] = [projected.low / 3600, projected.high / 3600]
        if recipe.processes(stage) > 1 and rates.link:
            summary["between_ranks"] = messages = _between(recipe, stage, summary["projected_hours"], rates.link)
            waiting = messages["seconds_per_step"] * messages["steps"] / 3600
            summary["projected_hours"] += waiting
            summary["projected_hours_range"][1] += waiting  # the lower end: all of it hidden behind computing
        if price is not None:
            summary["projected_cost"] = summary["projected_hours"] * price * recipe.processes(stage)
    return summary


def _between(recipe: Recipe, stage: StageName, hours: float, link: float) -> dict[str, Any]:
    """Return the bytes that each rank receives in a step, the seconds at the link's nominal rate, and the scaling."""
    traffic, steps = ranks.traffic(recipe, stage), projection.optimizer_steps(recipe, stage)
    assert steps  # stages with projected hours have optimizer steps
    seconds = (traffic.gradients + traffic.weights) / link
    return {
        "gradient_bytes_per_step": traffic.gradients,
        "weight_bytes_per_step": traffic.weights,
        "steps": steps,
        "seconds_per_step": seconds,
        "projected_scaling": list(ranks.scaling(hours * 3600 / steps, seconds)),
    }


def _budget(loaded: PinnedRecipe, stage: StageName) -> list[int | None] | None:
    """Return the published range of a stage's peak in bytes, from the lowest to the highest figure that is given."""
    ranges = [t.printed for t in loaded.targets if t.stage == stage and t.metric == "peak_vram_gb"]
    if not ranges:
        return None
    lows, highs = [low for low, _ in ranges if low is not None], [high for _, high in ranges if high is not None]
    return [round(min(lows) * GB) if lows else None, round(max(highs) * GB) if highs else None]


def _peak_verdict(loaded: PinnedRecipe, stage: StageName, peak: int) -> str | None:
    """Return the most favourable verdict on a predicted peak by the figures of its stage; None if there are none."""
    budgets = [t for t in loaded.targets if t.stage == stage and t.metric == "peak_vram_gb"]
    return figures.best(verdict_of(figure, peak / GB).word for figure in budgets)


def ablation(
    predict: Predictor, loaded: PinnedRecipe, stage: StageName, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Return the effect of each strategy alone on the stage without any, and of all together.

    Of each: the peak of the learning phase in bytes, and the operations of a step relative to those without any. `say`
    gets a line for each strategy.
    """
    effects_by_name: dict[str, Any] = {}
    for name, changed in one_by_one(loaded, stage).items():
        say(f"rehearsing {stage} with strategies: {name}")
        predicted = predict(changed, stage)
        effects_by_name[name] = {
            "peak_bytes": predicted[STEP[stage]].peak_bytes,
            "operations": operations(changed, stage, predicted),
        }
    for row in reversed(effects_by_name.values()):
        row["operations"] /= effects_by_name["none"]["operations"]
    return effects_by_name


def claims(loaded: PinnedRecipe, strategy: str, measured: Mapping[str, float] | None = None) -> list[str]:
    """Return what is published about a strategy's effect, in its own units, with the verdict on what was `measured`.

    Keys of `measured`: memory_gb, memory_percent, time_percent, time_factor.
    """
    texts = []
    for figure in loaded.targets:
        start, _, quantity = (figure.metric or "").rpartition(".")
        if start == f"effect.{strategy}":
            verdict = f": {verdict_of(figure, measured[quantity])}" if measured else ""
            texts.append(f"{quantity} {console.span(*figure.printed)}{verdict}")
    return texts


def size(text: str) -> int:
    """Return the bytes of a size such as `12GB`. Raises OptionError for all else, as a number without a unit."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(GB|GiB)", text, re.IGNORECASE)
    if not match or not float(match[1]):
        raise OptionError(f"--fit {text}: write a size with its unit, for example 12GB")
    return round(float(match[1]) * (2**30 if match[2].lower() == "gib" else GB))


def card_bytes(loaded: PinnedRecipe) -> int:
    """Return the bytes of the recipe's card. Raises UserError if it names none."""
    if loaded.recipe.hardware.memory_gb is None:
        raise UserError(f"{loaded.directory}: hardware.memory_gb is not given; use --fit 12GB")
    return round(loaded.recipe.hardware.memory_gb * GB)


def preflight(
    predict: Callable[[PinnedRecipe, StageName], PredictedStage],
    loaded: PinnedRecipe,
    stage: StageName,
    given: str = "",
) -> int | None:
    """Return the bytes at the stage's predicted peak; None if nothing can be predicted.

    Raises UserError, with what would help, when the stage needs more than the recipe's card has. `given`: the options
    that the recipe was named by.
    """
    hardware = loaded.recipe.hardware
    card = hardware.memory_gb
    if card is None or hardware.device != "cuda" or stage not in PREDICTED_STAGES or stage in ON_HOST:
        return None
    try:
        predicted = predict(loaded, stage)
    except PredictionError as error:
        say(f"{error}; going on without")
        return None
    need = needed(predicted[""])
    if need <= card * GB:
        return predicted[""].peak_bytes
    message = (
        f"{stage} would need {gb(need)} GB ({gb(predicted[''].peak_bytes)} GB allocated) and the "
        f"card has {gb(card * GB)} GB; nothing was started."
    )
    advice = []
    if stage in TRAINING_STAGES:
        advice.append("What each change would do alone (--set KEY=VALUE for each; make: SET='KEY=VALUE …'):")
        for effect in effects(predict, loaded, stage):
            if effect.after is not None and effect.changes:
                keys = " ".join(f"{key}={as_yaml(value)}" for key, value in effect.changes.items())
                other = "; another result" if effect.strategy.changes_result else ""
                advice.append(f"- {gb(effect.after)} GB  {effect.strategy.words}{other}: {keys}")
    advice.append(
        f"`rlhf plan {given or f'--recipe {loaded.directory}'} --fastest` looks for settings with which the chain fits"
    )
    raise UserError(message, *advice)


def published(loaded: PinnedRecipe, plan: Mapping[str, Any], effects_of: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare every published figure of the recipe with what is predicted or projected for it.

    `basis` says which of the two the value is; None if only a measurement can tell.
    """
    rows = []
    for figure in loaded.targets:
        value = None if figure.metric is None else predicted(plan, effects_of, figure.stage, figure.metric)
        basis = None if value is None else "projected" if figure.metric in ("hours", "cost_usd") else "predicted"
        verdict = _unpredicted(figure, plan, effects_of) if value is None else verdict_of(figure, value)
        rows.append(
            {
                "stage": figure.stage,
                "name": figure.name,
                "source": figure.source,
                "metric": figure.metric,
                "published": list(figure.printed),
                "accepted": list(figure.accepted),
                "unit": figure.unit,
                "predicted": value,
                "basis": basis,
                "verdict": verdict.word,
                "detail": verdict.detail,
            }
        )
    return rows


def _unpredicted(figure: figures.Figure, plan: Mapping[str, Any], effects_of: Mapping[str, Any]) -> Verdict:
    """Return the verdict on a figure that has no prediction: why it cannot be compared, or what measures it."""
    metric = figure.metric
    if metric is None:
        return verdict_of(figure, None)
    if metric == "cost_usd" and plan["price_per_hour"] is None:
        return Verdict(figures.NOT_MEASURED, "projected with --price")
    if metric.startswith("effect."):
        counted = effects_of.get(metric.split(".")[1])
        operations = f"; {counted['operations']:.2f} times the operations are counted" if counted else ""
        return Verdict(figures.NOT_MEASURED, figures.why_not_measured(metric) + operations)
    return Verdict(figures.NOT_MEASURED, f"known after {'the chain' if figure.stage == 'all' else figure.stage}")


def predicted(
    plan: Mapping[str, Any], effects_of: Mapping[str, Any], stage: StageName | Literal["all"], metric: str
) -> float | None:
    """Return what is predicted or projected for a published figure's `metric`; None if only a run can tell.

    `peak_vram_gb`, `hours`, `cost_usd` of a stage or of SFT, reward model and PPO together (`all`);
    `component_gb.<name>`, the most that a component takes in any phase; `adapter_gb`, `base_model_gb`,
    `merged_model_gb`; `effect.<strategy>.<memory_gb|memory_percent>`, of a strategy alone on SFT's step without any.
    Its times (`time_percent`, `time_factor`) are not predicted: operations are counted, and they are not time.
    """
    stages = plan["stages"]
    if metric == "peak_vram_gb":
        chosen = [summary for name, summary in stages.items() if stage in ("all", name) and name not in ON_HOST]
        return float(max(summary["peak_bytes"] for summary in chosen) / GB)
    if key := {"hours": "projected_hours", "cost_usd": "projected_cost"}.get(metric):
        wanted = figures.CHAIN if stage == "all" else (stage,)
        values = [stages[name].get(key) for name in wanted]
        return None if None in values else sum(values)
    if metric.startswith("component_gb."):
        return _most(stages[stage]["phases"], metric.removeprefix("component_gb."))
    if metric == "adapter_gb":
        return _most(stages["sft"]["phases"], "adapters")
    if metric == "base_model_gb" or metric == "merged_model_gb":
        return _most(stages["merge"]["phases"], "base")
    if metric.startswith("effect."):
        _, strategy, quantity = metric.split(".")
        return _effect(effects_of, strategy, quantity)
    return None


def _most(phases: Mapping[str, Any], component: str) -> float:
    return float(max(phase["components"].get(component, 0) for phase in phases.values()) / GB)


def _effect(effects_of: Mapping[str, Any], strategy: str, quantity: str) -> float | None:
    if strategy not in effects_of:
        return None
    before, after = effects_of["none"]["peak_bytes"], effects_of[strategy]["peak_bytes"]
    return {"memory_gb": (after - before) / GB, "memory_percent": 100 * (after / before - 1)}.get(quantity)
