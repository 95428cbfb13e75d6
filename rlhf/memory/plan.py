"""A plan: what a recipe would take on its card, before anything runs. All of it is predicted or projected."""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

from rlhf.errors import UserError
from rlhf.memory import projection, ranks
from rlhf.memory.fit import Fit
from rlhf.memory.predict import ON_HOST as ON_HOST
from rlhf.memory.predict import STAGES, PredictionError, Predictor, Stage, needed, reserved
from rlhf.memory.strategies import STAGES as LEARNING
from rlhf.memory.strategies import STEP, effects, one_by_one, operations
from rlhf.observe import console
from rlhf.recipe import PinnedRecipe, Recipe, as_yaml
from rlhf.recipe import published as figures
from rlhf.recipe.published import GB, Verdict, compare
from rlhf.terminal import say

PHASE_KEYS = ("peak_bytes", "reserved_bytes", "needed_bytes", "paged_bytes", "components")  # of a phase in JSON
OTHERS = ("quantization", "heads", "buffers", "kernels", "workspace")  # components that the table adds up


def make(
    predict: Predictor,
    loaded: PinnedRecipe,
    stages: Sequence[str] = STAGES,
    price: float | None = None,
    say: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Return the plan as JSON: bytes, hours, dollars at `price` an hour. `say` is told which stage is rehearsed."""
    card = loaded.recipe.hardware.memory_gb
    found = {}
    for at, stage in enumerate(stages, 1):
        say(f"rehearsing {stage} ({at} of {len(stages)})")
        found[stage] = _stage(loaded, stage, predict(loaded, stage), price)
    if "ppo" in stages and (step := predict.decoding_step(loaded)):
        found["ppo"]["decoding_step"] = {role: operations._asdict() for role, operations in step.items()}
    return {
        "recipe": loaded.name,
        "version": loaded.version,
        "modified": loaded.modified,
        "hardware": loaded.recipe.hardware.name,
        "card_bytes": round(card * GB) if card else None,
        "cards": loaded.recipe.hardware.count,
        "price_per_hour": price,
        "projection": projection.basis(),
        "stages": found,
    }


def _stage(loaded: PinnedRecipe, stage: str, predicted: Stage, price: float | None) -> dict[str, Any]:
    recipe = loaded.recipe
    place = "host" if stage in ON_HOST else recipe.hardware.device
    need = needed(predicted[""])
    card = recipe.hardware.memory_gb
    found: dict[str, Any] = {
        "in_memory_of": place,
        "peak_bytes": predicted[""].peak_bytes,
        "reserved_bytes": reserved(predicted[""]),
        "needed_bytes": need,
        "fits": need <= card * GB if card and place == "cuda" else None,
        "budget_bytes": _budget(loaded, stage),
        "verdict": _peak_verdict(loaded, stage, predicted[""].peak_bytes),
        "phases": {name: {key: getattr(phase, key) for key in PHASE_KEYS} for name, phase in predicted.items() if name},
    }
    rates = projection.CARDS.get(recipe.hardware.name)
    work = projection.work(ranks.of_one(loaded, stage).recipe, stage, predicted)
    if rates and work:
        projected = work.projected(rates)
        found["limit_hours"] = work.limit(rates) / 3600
        found["projected_hours"] = projected.seconds / 3600
        found["projected_hours_range"] = [projected.low / 3600, projected.high / 3600]
        if recipe.processes(stage) > 1 and rates.link:
            found["between_ranks"] = told = _between(recipe, stage, found["projected_hours"], rates.link)
            waiting = told["seconds_per_step"] * told["steps"] / 3600
            found["projected_hours"] += waiting
            found["projected_hours_range"][1] += waiting  # the lower end: all of it hidden behind computing
        if price is not None:
            found["projected_cost"] = found["projected_hours"] * price * recipe.processes(stage)
    return found


def _between(recipe: Recipe, stage: str, hours: float, link: float) -> dict[str, Any]:
    """What each rank receives in a step, how long that takes at the link's nominal rate, and how well ranks scale."""
    told, steps = ranks.traffic(recipe, stage), projection.optimizer_steps(recipe, stage)
    assert steps  # who has hours has steps
    seconds = (told.gradients + told.weights) / link
    return {
        "gradient_bytes_per_step": told.gradients,
        "weight_bytes_per_step": told.weights,
        "steps": steps,
        "seconds_per_step": seconds,
        "projected_scaling": list(ranks.scaling(hours * 3600 / steps, seconds)),
    }


def _budget(loaded: PinnedRecipe, stage: str) -> list[int | None] | None:
    """The published range of a stage's peak, in bytes: from the lowest to the highest figure that is given."""
    ranges = [t.printed for t in loaded.targets if t.stage == stage and t.metric == "peak_vram_gb"]
    if not ranges:
        return None
    lows, highs = [low for low, _ in ranges if low is not None], [high for _, high in ranges if high is not None]
    return [round(min(lows) * GB) if lows else None, round(max(highs) * GB) if highs else None]


def _peak_verdict(loaded: PinnedRecipe, stage: str, peak: int) -> str | None:
    """The most favourable verdict of a predicted peak on the figures of its stage; None where there are none."""
    budgets = [t for t in loaded.targets if t.stage == stage and t.metric == "peak_vram_gb"]
    return figures.best(compare(figure, peak / GB).word for figure in budgets)


SHOWN = ("base", "adapters", "gradients", "optimizer", "activations", "logits", "kv_cache", "temporaries")
PHASE_COLUMNS = ("stage", "phase", "peak", "base", "adapt", "grads", "optim", "activ", "logits", "KV", "temp", "other")
FULL_WIDTH = 112  # of a terminal that has room for all columns
ROOMY = 0.7  # share of a card below which faster settings are worth a look
MOST = 2  # components that a narrow terminal has room for


def phase_rows(plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Stage, phase, peak and its components in GB."""
    rows = []
    for stage, name, phase in _phases(plan):
        parts = phase["components"]
        cells = [_gb(parts.get(part, 0)) for part in SHOWN]
        rows.append((stage, name, _gb(phase["peak_bytes"]), *cells, _gb(sum(parts.get(part, 0) for part in OTHERS))))
    return rows


def narrow_rows(plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Stage, phase, peak and its largest components in GB."""
    rows: list[tuple[str, ...]] = []
    for stage, name, phase in _phases(plan):
        largest = sorted(phase["components"].items(), key=lambda part: -part[1])[:MOST]
        parts = ", ".join(f"{part} {_gb(size)}" for part, size in largest)
        rows.append((stage, name, _gb(phase["peak_bytes"]), parts))
    return rows


def _phases(plan: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Stage (named once), phase, and what is known about it."""
    for stage, found in plan["stages"].items():
        for at, (name, phase) in enumerate(found["phases"].items()):
            yield "" if at else stage, name, phase


STAGE_COLUMNS = (
    "stage",
    "peak",
    "needs",
    "reserved",
    "published",
    "verdict",
    "hours at limit",
    "hours projected",
    "cost",
)


def stage_rows(plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One line for each stage: peak, need, published budget, verdict, hours, cost."""
    rows = []
    for stage, found in plan["stages"].items():
        published = "-".join(dict.fromkeys(_gb(x, 0) for x in found["budget_bytes"] or () if x)) or "-"
        verdict = {True: "fits", False: "DOES NOT FIT", None: f"on {found['in_memory_of']}"}[found["fits"]]
        verdict += f", {found['verdict']}" if found["verdict"] else ""
        limit = f"{found['limit_hours']:.1f}" if "limit_hours" in found else "-"
        hours = [limit, _hours([found]) if "projected_hours" in found else "-"]
        cost = f"${found['projected_cost']:.2f}" if "projected_cost" in found else "-"
        sizes = [_gb(found[f"{size}_bytes"]) for size in ("peak", "needed", "reserved")]
        rows.append((stage, *sizes, published, verdict, *hours, cost))
    chain = [plan["stages"].get(stage, {}) for stage in figures.CHAIN]
    if all("projected_hours" in found for found in chain):
        hours = [f"{sum(found['limit_hours'] for found in chain):.1f}", _hours(chain)]
        cost = f"${sum(found['projected_cost'] for found in chain):.2f}" if "projected_cost" in chain[0] else "-"
        rows.append((", ".join(figures.CHAIN), "", "", "", "", "", *hours, cost))
    return rows


def _hours(stages: Sequence[Mapping[str, Any]]) -> str:
    """Projected hours of stages together, and their interval: `3.2 (2.4-5.1)`."""
    low, high = (sum(found["projected_hours_range"][end] for found in stages) for end in (0, 1))
    return f"{sum(found['projected_hours'] for found in stages):.1f} ({low:.1f}-{high:.1f})"


BETWEEN_COLUMNS = ("stage", "gradients, GB", "layers, GB", "at the link's limit", "scaling")


def between_rows(plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """What each rank receives in a step, the seconds at the link's nominal rate, and what n cards reach of n times the
    speed: with nothing of the messages hidden behind computing, and with all that can be."""
    rows = []
    for stage, found in plan["stages"].items():
        if told := found.get("between_ranks"):
            sizes = [_gb(told[f"{what}_bytes_per_step"], 3) for what in ("gradient", "weight")]
            scaling = " to ".join(f"{share:.0%}" for share in told["projected_scaling"])
            rows.append((stage, *sizes, f"{told['seconds_per_step']:.3f} s", scaling))
    return rows


def step_lines(plan: Mapping[str, Any]) -> list[str]:
    """What a decoding step of PPO launches, and what of it no graph can hold."""
    roles = plan["stages"].get("ppo", {}).get("decoding_step")
    if not roles:
        return []
    counts = ", ".join(f"{role} {n['total']:,} ({n['per_layer']} a layer)" for role, n in roles.items())
    unsafe = dict.fromkeys(reason for n in roles.values() for reason in n["unsafe"])
    return [f"operations of a decoding step, each at least one kernel: {counts}"] + [
        f"a captured graph cannot hold {reason}" for reason in unsafe
    ]


def hints(plan: Mapping[str, Any]) -> list[str]:
    """What else could be asked: faster settings where the card is far from full, the cost where no price was given."""
    needs = [found["needed_bytes"] for found in plan["stages"].values() if found["in_memory_of"] == "cuda"]
    lines = []
    if plan["card_bytes"] and needs and max(needs) < ROOMY * plan["card_bytes"]:
        lines.append(
            f"at most {_gb(max(needs))} of {_gb(plan['card_bytes'])} GB are needed: --fastest (make: FIT=card) looks "
            "for settings that use the rest"
        )
    if plan["price_per_hour"] is None and any("projected_hours" in found for found in plan["stages"].values()):
        lines.append("--price (make: PRICE=), dollars for an hour of a card, adds the cost")
    return lines


def show(plan: Mapping[str, Any], as_json: bool) -> None:
    """Print a plan, as tables or as one JSON object."""
    if as_json:
        click.echo(json.dumps(plan, indent=2))
        return
    name = f"{plan['recipe']} {plan['version']}" + (", modified" if plan["modified"] else "")
    wide = console.OUT.width >= FULL_WIDTH
    columns, rows = (PHASE_COLUMNS, phase_rows) if wide else (("stage", "phase", "peak", "most of it"), narrow_rows)
    console.rows_table(f"{name}: predicted peak of each phase, GB", columns, rows(plan))
    cards = f"each of {plan['cards']} cards" if plan["cards"] > 1 else "card"
    card = f", {cards} {_gb(plan['card_bytes'])} GB" if plan["card_bytes"] else ""
    console.rows_table(f"{name}: predicted memory in GB, projected time{card}", STAGE_COLUMNS, stage_rows(plan))
    for line in hints(plan):
        console.OUT.print(line, markup=False)
    if between := between_rows(plan):
        console.rows_table(f"{name}: between {plan['cards']} cards, projected", BETWEEN_COLUMNS, between)
    for line in step_lines(plan):
        console.OUT.print(line, markup=False)
    console.OUT.print(
        "peak: what torch allocates. needs: what the card must have for it, with gaps between blocks, paged states and "
        "the driver. reserved: what the process is seen to hold. hours at limit: at the card's nominal rates. "
        "hours projected (from-to): training at rates calibrated on other people's runs, decoding at an assumed share "
        "of the bandwidth (docs/memory.md). No GPU of ours has measured any of it yet.",
        style="dim",
        markup=False,
    )


def ablation(predict: Predictor, loaded: PinnedRecipe, stage: str) -> dict[str, Any]:
    """Each strategy alone on the stage without any, and all together: bytes of its learning phase, operations."""
    found: dict[str, Any] = {}
    for name, changed in one_by_one(loaded, stage).items():
        after = predict(changed, stage)
        found[name] = {"peak_bytes": after[STEP[stage]].peak_bytes, "operations": operations(changed, stage, after)}
    for row in reversed(found.values()):
        row["operations"] /= found["none"]["operations"]
    return found


def show_ablation(loaded: PinnedRecipe, found: Mapping[str, Mapping[str, Any]], as_json: bool) -> None:
    """Print what `ablation` found for each stage, beside what is published."""
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    rows = []
    for stage, strategies in found.items():
        before = strategies["none"]["peak_bytes"]
        for at, (name, effect) in enumerate(strategies.items()):
            saved = before - effect["peak_bytes"]
            saves = f"{_gb(saved)} ({saved / before:.0%})" if name != "none" else ""
            claim = "; ".join(claims(loaded, name))
            rows.append(
                ("" if at else stage, name, _gb(effect["peak_bytes"]), saves, f"x {effect['operations']:.2f}", claim)
            )
    columns = ("stage", "strategy alone", "peak, GB", "saves", "operations", "published")
    console.rows_table(f"{loaded.name} {loaded.version}: predicted effect of each strategy", columns, rows)


def claims(loaded: PinnedRecipe, strategy: str, measured: Mapping[str, float] | None = None) -> list[str]:
    """What is published about a strategy's effect, in its own units; with the verdict of what was `measured`.

    Keys of `measured`: memory_gb, memory_percent, time_percent, time_factor.
    """
    said = []
    for figure in loaded.targets:
        start, _, what = (figure.metric or "").rpartition(".")
        if start == f"effect.{strategy}":
            verdict = f": {compare(figure, measured[what])}" if measured else ""
            said.append(f"{what} {console.span(*figure.printed)}{verdict}")
    return said


def show_fits(loaded: PinnedRecipe, found: Fit, limit: int, as_json: bool) -> None:
    """Print the settings that were found. Raises UserError where a stage needs more than `limit` bytes with any."""
    needs = {stage: needed(phases[""]) for stage, phases in found.stages.items()}
    if as_json:
        stages = {
            stage: {"peak_bytes": phases[""].peak_bytes, "needed_bytes": needs[stage], "fits": needs[stage] <= limit}
            for stage, phases in found.stages.items()
        }
        click.echo(json.dumps({"limit_bytes": limit, "set": found.changes, "stages": stages}, indent=2))
    else:
        rows = [
            (stage, _gb(phases[""].peak_bytes), _gb(needs[stage]), "DOES NOT FIT" if stage in found.lacking else "fits")
            for stage, phases in found.stages.items()
        ]
        title = f"{loaded.name} {loaded.version}: fastest settings predicted to need at most {_gb(limit)} GB"
        console.rows_table(title, ("stage", "peak, GB", "needs, GB", ""), rows)
    if found.lacking:
        raise UserError(
            f"{', '.join(found.lacking)}: nothing fits {_gb(limit)} GB; shorter rows are left to you: max_length, "
            "max_prompt_length, response_length"
        )
    if not as_json:
        chain = "for every stage alike, so that they build on each other" if len(found.stages) > 1 else "to be set"
        console.OUT.print(f"{chain}:")
        console.OUT.print(_assignments(loaded.overrides | found.changes), soft_wrap=True, markup=False)


def _assignments(changes: Mapping[str, Any]) -> str:
    """Changes as they are given to make and to rlhf."""
    pairs = [f"{key}={as_yaml(value).replace(', ', ',')}" for key, value in changes.items()]
    options = " ".join(f"--set {shlex.quote(pair)}" for pair in pairs)
    return f"  make: SET='{' '.join(pairs)}'\n  rlhf: {options}"


def size(text: str) -> int:
    """`12GB` -> bytes. Raises UserError for anything else, a number without a unit too."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(GB|GiB)", text, re.IGNORECASE)
    if not match or not float(match[1]):
        raise UserError(f"--fit {text}: write a size with its unit, for example 12GB")
    return round(float(match[1]) * (2**30 if match[2].lower() == "gib" else GB))


def card_bytes(loaded: PinnedRecipe) -> int:
    """Memory of the recipe's card. Raises UserError where it names none."""
    if loaded.recipe.hardware.memory_gb is None:
        raise UserError(f"{loaded.directory}: hardware.memory_gb is not given; use --fit 12GB")
    return round(loaded.recipe.hardware.memory_gb * GB)


def preflight(
    predict: Callable[[PinnedRecipe, str], Stage], loaded: PinnedRecipe, stage: str, given: str = ""
) -> int | None:
    """Bytes at the stage's predicted peak, None where nothing can be predicted.

    Raises UserError, with what would help, when the stage needs more than the recipe's card has. `given`: the options
    that the recipe was named by.
    """
    hardware = loaded.recipe.hardware
    card = hardware.memory_gb
    if card is None or hardware.device != "cuda" or stage not in STAGES or stage in ON_HOST:
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
        f"{stage} would need {_gb(need)} GB ({_gb(predicted[''].peak_bytes)} GB allocated) and the "
        f"card has {_gb(card * GB)} GB; nothing was started."
    )
    advice = []
    if stage in LEARNING:
        advice.append("What each change would do alone (--set KEY=VALUE for each; make: SET='KEY=VALUE …'):")
        for effect in effects(predict, loaded, stage):
            if effect.after is not None and effect.changes:
                keys = " ".join(f"{key}={as_yaml(value)}" for key, value in effect.changes.items())
                other = "; another result" if effect.strategy.changes_result else ""
                advice.append(f"- {_gb(effect.after)} GB  {effect.strategy.words}{other}: {keys}")
    advice.append(
        f"`rlhf plan {given or f'--recipe {loaded.directory}'} --fastest` looks for settings with which the chain fits"
    )
    raise UserError(message, *advice)


def published(loaded: PinnedRecipe, plan: Mapping[str, Any], effects_of: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every published figure of the recipe compared with what is predicted or projected for it.

    `basis` says which of the two the value is; None where only a measurement can tell.
    """
    rows = []
    for figure in loaded.targets:
        value = None if figure.metric is None else predicted(plan, effects_of, figure.stage, figure.metric)
        basis = None if value is None else "projected" if figure.metric in ("hours", "cost_usd") else "predicted"
        verdict = _unpredicted(figure, plan, effects_of) if value is None else compare(figure, value)
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
    """The verdict of a figure that has no prediction: why it cannot be compared, or what measures it."""
    metric = figure.metric
    if metric is None:
        return compare(figure, None)
    if metric == "cost_usd" and plan["price_per_hour"] is None:
        return Verdict(figures.NOT_MEASURED, "projected with --price")
    if metric.startswith("effect."):
        counted = effects_of.get(metric.split(".")[1])
        operations = f"; {counted['operations']:.2f} times the operations are counted" if counted else ""
        return Verdict(figures.NOT_MEASURED, figures.why_not_measured(metric) + operations)
    return Verdict(figures.NOT_MEASURED, f"known after {'the chain' if figure.stage == 'all' else figure.stage}")


def show_published(loaded: PinnedRecipe, rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """Print what `published` found."""
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    titles = {(figure.stage, figure.source, figure.name): figure for figure in loaded.targets}
    cells = []
    for row in rows:
        figure = titles[row["stage"], row["source"], row["name"]]
        verdict = Verdict(row["verdict"], row["detail"])
        value = "" if row["predicted"] is None else console.number(float(f"{row['predicted']:.3g}"))
        said = f"{row['basis']}: {verdict}" if row["basis"] else str(verdict)
        cells.append((row["stage"], figure.title, console.figure_text(figure, in_full=True), value, said))
    columns = ("stage", "figure", "published", "predicted", "verdict")
    console.rows_table(f"{loaded.name} {loaded.version}: published figures, nothing of it measured", columns, cells)


def predicted(plan: Mapping[str, Any], effects_of: Mapping[str, Any], stage: str, metric: str) -> float | None:
    """What is predicted or projected for a published figure's `metric`; None where only a run can tell.

    `peak_vram_gb`, `hours`, `cost_usd` of a stage or of SFT, reward model and PPO together (`all`);
    `component_gb.<name>`, the most that a component takes in any phase; `adapter_gb`, `base_model_gb`,
    `merged_model_gb`; `effect.<strategy>.<memory_gb|memory_percent>`, of a strategy alone on SFT's step without any.
    Its times (`time_percent`, `time_factor`) are not predicted: operations are counted, and they are not time.
    """
    stages = plan["stages"]
    if metric == "peak_vram_gb":
        chosen = [found for name, found in stages.items() if stage in ("all", name) and name not in ON_HOST]
        return float(max(found["peak_bytes"] for found in chosen) / GB)
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
        _, strategy, what = metric.split(".")
        return _effect(effects_of, strategy, what)
    return None


def _most(phases: Mapping[str, Any], component: str) -> float:
    return float(max(phase["components"].get(component, 0) for phase in phases.values()) / GB)


def _effect(effects_of: Mapping[str, Any], strategy: str, what: str) -> float | None:
    if strategy not in effects_of:
        return None
    before, after = effects_of["none"]["peak_bytes"], effects_of[strategy]["peak_bytes"]
    return {"memory_gb": (after - before) / GB, "memory_percent": 100 * (after / before - 1)}.get(what)


def _gb(size: float, digits: int = 2) -> str:
    return f"{size / GB:.{digits}f}" if size else "-"
