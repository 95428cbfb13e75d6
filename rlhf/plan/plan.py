"""The plan of a recipe: the memory, time and money that its stages take, predicted or projected before they run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf.errors import UserError
from rlhf.plan import hardware as listed
from rlhf.plan import machine, padding, projection, ranks
from rlhf.plan.own_rows import OwnRows, read_rows
from rlhf.plan.phases import ON_HOST, PredictedPhase, PredictedStage
from rlhf.plan.predict import Predictor, card_needed_bytes
from rlhf.plan.reward_models import beside
from rlhf.process import memory
from rlhf.recipe import PinnedRecipe, Recipe, StageName
from rlhf.recipe.choices import Device
from rlhf.recipe.stages import TRAINING_STAGES
from rlhf.terminal.wording import GB

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class StageTime:
    """Hours of a stage; dollars where a price is known."""

    projected_hours: float
    projected_hours_range: tuple[float, float]
    projected_cost: float | None


@dataclass(frozen=True)
class PlannedStage:
    """Memory and time of a stage. `card_needed_bytes` is that of rlhf/plan/predict.py for the whole stage."""

    in_memory_of: Device | Literal["host"]
    peak_bytes: int
    card_needed_bytes: int
    beside_bytes: int  # that a vLLM server and reward models of others take of the same memory
    fits: bool | None  # the card, or on a CPU what is free here; None if neither is known
    phases: dict[str, PredictedPhase]
    time: StageTime | None  # None where rates of the card or the number of rows are not known
    no_time: str | None = None  # why hours of a stage that trains are not projected


@dataclass(frozen=True)
class Plan:
    """The plan of some stages of a recipe."""

    recipe: str
    version: str
    modified: bool
    hardware: str
    card_bytes: int | None
    stages: dict[StageName, PlannedStage]
    row_lengths: str = ""  # where the lengths of rows come from, in words
    free_bytes: int | None = None  # for a recipe on a CPU


def check_type(recipe: Recipe) -> None:
    """Raise UserError if the recipe computes in bfloat16 on a card that does not."""
    reason = listed.lacks_bfloat16(recipe.hardware.name) if recipe.model.dtype == "bfloat16" else None
    if reason:
        raise UserError(f"hardware.name: {recipe.hardware.name}: {reason}: use model.dtype: float32, or another card")


def make_plan(
    predictor: Predictor,
    loaded: PinnedRecipe,
    stages: Sequence[StageName],
    price: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Return the plan of some stages; `price` is in dollars for an hour of one card.

    Hours are those of the rows of the recipe's own files, where it has any. `say` gets a line for each stage that is
    rehearsed. Raises PredictionError, and UserError for files with rows that a run would refuse.
    """
    check_type(loaded.recipe)
    own = read_rows(loaded.recipe, stages)
    predicted = {}
    for number, stage in enumerate(stages, 1):
        say(f"rehearsing {stage} ({number} of {len(stages)})")
        predicted[stage] = predictor.predict(loaded, stage)
    return plan_of(loaded, predicted, price, own)


def plan_of(
    loaded: PinnedRecipe,
    predicted: Mapping[StageName, PredictedStage],
    price: float | None = None,
    own: OwnRows | None = None,
) -> Plan:
    """Return the plan that follows from predictions."""
    hardware = loaded.recipe.hardware
    free = memory.free() if hardware.device == "cpu" else None
    return Plan(
        recipe=loaded.name,
        version=loaded.version,
        modified=loaded.modified,
        hardware=hardware.name,
        card_bytes=None if hardware.memory_gb is None else round(hardware.memory_gb * GB),
        stages={stage: _stage(loaded, stage, found, price, own, free) for stage, found in predicted.items()},
        row_lengths=_row_lengths(loaded.recipe, own),
        free_bytes=free.size if free else None,
    )


def card_bytes(loaded: PinnedRecipe) -> int:
    """Return the bytes of the recipe's card, on a CPU those of a process's tensors. Raises UserError without a card."""
    if loaded.recipe.hardware.device == "cpu":
        return machine.free_bytes(loaded.recipe.hardware.count)
    if loaded.recipe.hardware.memory_gb is None:
        limit = "name a limit: --fit 12GB"
        raise UserError(f"{loaded.directory}: hardware.memory_gb is not given, so the card is unknown; {limit}")
    return round(loaded.recipe.hardware.memory_gb * GB)


def _stage(
    loaded: PinnedRecipe,
    stage: StageName,
    predicted: PredictedStage,
    price: float | None,
    own: OwnRows | None,
    free: memory.Free | None,
) -> PlannedStage:
    hardware = loaded.recipe.hardware
    place: Device | Literal["host"] = "host" if stage in ON_HOST else hardware.device
    whole = predicted.whole
    card = hardware.memory_gb if place == "cuda" else None
    most = free.size if free else card and card * GB
    time, no_time = _time(loaded, stage, predicted, price, own)
    return PlannedStage(
        in_memory_of=place,
        peak_bytes=whole.peak_bytes,
        card_needed_bytes=card_needed_bytes(whole),
        beside_bytes=beside_bytes(loaded.recipe, stage),
        fits=None if most is None else needed_bytes(loaded.recipe, stage, whole) <= most,
        phases=predicted.phases,
        time=time,
        no_time=no_time,
    )


def needed_bytes(recipe: Recipe, stage: StageName, whole: PredictedPhase) -> int:
    """Return what a stage and what runs beside it need of the card, on a CPU with the libraries of each process."""
    if recipe.hardware.device == "cpu":
        own = recipe.processes(stage) * (whole.peak_bytes + machine.LIBRARIES)
    else:
        own = card_needed_bytes(whole)
    return own + beside_bytes(recipe, stage)


def beside_bytes(recipe: Recipe, stage: StageName) -> int:
    """Return the bytes that reward models of others and a vLLM server on the run's own card take beside a stage."""
    options, models = recipe.online().get(stage), beside(recipe, stage)
    if options is None or options.vllm_url is None:
        return models
    from rlhf.rollout.vllm_command import bytes_on_card  # needs torch, which a plan from the cache does without

    return models + bytes_on_card(recipe, options)


def rates_of(recipe: Recipe) -> listed.Rates | None:
    """Return what the recipe's hardware does in a second: its card by name, or this machine, measured."""
    if recipe.hardware.device != "cpu":
        return listed.rates_of(recipe.hardware.name)
    return machine.rates(recipe) if recipe.model.architecture else None


def _row_lengths(recipe: Recipe, own: OwnRows | None) -> str:
    """Return in words where projected hours have the lengths of rows from."""
    if own:
        made = "" if own.unit == "tokens" else ", of which a text has fewer than tokens: the tokenizer is not here"
        return f"from the files of this run, in {own.unit}{made}"
    if padding.as_long_as_hh(recipe):
        return "those of HH-RLHF"
    return "every row as long as the recipe admits"


def _time(
    loaded: PinnedRecipe, stage: StageName, predicted: PredictedStage, price: float | None, own: OwnRows | None
) -> tuple[StageTime | None, str | None]:
    """Return the hours and dollars of a stage that trains, or in words why they are not known.

    Of several cards they are those of one of them. What they send each other is not counted.
    """
    recipe = loaded.recipe
    if stage not in TRAINING_STAGES:
        return None, None
    if own and stage in own.lacking:
        return None, own.lacking[stage]
    rates, processes = rates_of(recipe), recipe.processes(stage)
    if rates is None:
        return None, f"the speed of {recipe.hardware.name} is not known"
    rows = own.stages[stage].of_rank(processes) if own else None
    work = projection.stage_work(ranks.recipe_of_one_rank(loaded, stage).recipe, stage, predicted, rows)
    if work is None:
        way_out = f"--set {stage}.max_samples=N names it, or --data a file that is here"
        return None, f"the number of rows is not known: {way_out}"
    hours = work.seconds(rates) / SECONDS_PER_HOUR
    low, high = projection.SPREAD
    cost = None if price is None else hours * price * processes
    return StageTime(hours, (low * hours, high * hours), cost), None
