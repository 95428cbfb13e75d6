"""The fastest settings of a chain of stages that need no more memory than a limit, its results unchanged."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from rlhf.memory.predict import Stage, needed
from rlhf.memory.projection import CARDS, row_tokens
from rlhf.memory.strategies import STAGES, divisors, global_batch, micro_batch, with_changes
from rlhf.recipe import ONLINE, PinnedRecipe, Recipe


class Fit(NamedTuple):
    """One set of changes for the whole chain: stages that build on each other must agree in what they share."""

    changes: dict[str, Any]
    stages: dict[str, Stage]  # as predicted with them
    lacking: tuple[str, ...]  # the stages that still need more than the limit


class Choice(NamedTuple):
    changes: dict[str, Any]
    seconds: float  # of a row, by which choices of one axis are ranked


class Axis(NamedTuple):
    """Settings that are chosen together, apart from all others."""

    places: tuple[tuple[str, str], ...]  # (stage, phase) whose memory they decide
    ladders: list[list[Choice]]  # each from the choice that needs least to the one that needs most
    others: dict[str, Any]  # settings of other axes that decide the same places, at their smallest meanwhile


def fit(
    predict: Callable[[PinnedRecipe, str], Stage],
    loaded: PinnedRecipe,
    stages: Sequence[str],
    limit: int,
    say: Callable[[str], None] = lambda what: None,
) -> Fit:
    """Return the fastest settings with which each of `stages` needs at most `limit` bytes of the card.

    Batches of the optimizers stay as they are. More prompts decoded together count as faster; of checkpointing and
    micro-batches `_row_seconds` is the judge. Where a bfloat16 base does not fit, NF4 and paged 8-bit optimizers are
    tried, which change the result. `say` is told what is being chosen.
    """
    result = _search(predict, loaded, stages, limit, say)
    if result.lacking and loaded.recipe.model.quantization == "none":
        compressed = {"model.quantization": "nf4"}
        compressed |= {f"{stage}.optim": "paged_adamw_8bit" for stage in stages if stage in STAGES}
        again = _search(predict, with_changes(loaded, compressed), stages, limit, say)
        return again._replace(changes=compressed | again.changes)
    return result


def _search(
    predict: Callable[[PinnedRecipe, str], Stage],
    loaded: PinnedRecipe,
    stages: Sequence[str],
    limit: int,
    say: Callable[[str], None],
) -> Fit:
    chosen: dict[str, Any] = {}

    def too_much(axis: Axis, choice: Choice) -> bool:
        changed = with_changes(loaded, chosen | axis.others | choice.changes)
        phases = (predict(changed, stage).get(phase) for stage, phase in axis.places)
        return any(needed(phase) > limit for phase in phases if phase)

    axes = _axes(loaded, stages)
    for at, axis in enumerate(axes, 1):
        say(f"choosing {' and '.join(axis.ladders[0][0].changes)} ({at} of {len(axes)})")
        chosen |= _fastest(axis, partial(too_much, axis)).changes
    predictions = {stage: predict(with_changes(loaded, chosen), stage) for stage in stages}
    lacking = tuple(stage for stage, phases in predictions.items() if needed(phases[""]) > limit)
    as_it_is = loaded.recipe.model_dump()
    return Fit({key: value for key, value in chosen.items() if _value(as_it_is, key) != value}, predictions, lacking)


def _fastest(axis: Axis, refused: Callable[[Choice], bool]) -> Choice:
    """Return the fastest choice that is not refused, with few questions; the least demanding one where all are.

    Within a ladder memory grows and time falls. The last ladder needs least for the same place in it: of those before
    it only choices up to the place that fits there, and faster than that, are asked about.
    """
    best, room = None, len(axis.ladders[-1])
    for ladder in axis.ladders[::-1]:
        worthwhile = [c for c in ladder[:room] if best is None or c.seconds < best.seconds]
        choice = _largest_that_fits(worthwhile, refused, hopeful=best is None)
        if best is None and choice is None:
            return ladder[0]
        best = choice or best
        room = ladder.index(best) + 1 if best in ladder else room
    assert best
    return best


def _largest_that_fits(choices: Sequence[Choice], refused: Callable[[Choice], bool], hopeful: bool) -> Choice | None:
    """Return the last of `choices` that is not refused, None where all are. `hopeful`: ask about the last one first."""
    if not choices:
        return None
    if hopeful and not refused(choices[-1]):
        return choices[-1]
    if not hopeful and refused(choices[0]):
        return None
    fitting = bisect_left(choices, True, lo=0 if hopeful else 1, hi=len(choices) - hopeful, key=refused)
    return choices[fitting - 1] if fitting else None


def _axes(loaded: PinnedRecipe, stages: Sequence[str]) -> list[Axis]:
    recipe = loaded.recipe
    axes = []
    sampling = [stage for stage in stages if stage in ("sft", "dpo", "evaluate")]  # with the settings of evaluate
    if sampling:
        places = tuple((stage, "evaluate") for stage in sampling)
        smallest = {key: n for s in sampling if s in STAGES for key, n in micro_batch(loaded, s, 1).items()}
        axes.append(Axis(places, [_at_once("evaluate.batch_size", recipe.evaluate.batch_size)], smallest))
    for stage, options in recipe.online().items():
        if stage in stages:
            whole = options.samples_per_prompt
            sizes = [n for n in divisors(options.batch_size) if n % whole == 0]
            decoding = [Choice({f"{stage}.rollout_batch_size": n}, 1 / n) for n in sizes]
            axes.append(Axis(((stage, "rollout"), (stage, "evaluate")), [decoding], {}))
    for stage in stages:
        if stage in STAGES:
            ladders = [
                [
                    Choice(
                        {f"{stage}.gradient_checkpointing": checkpointing, **micro_batch(loaded, stage, n)},
                        _row_seconds(recipe, stage, checkpointing, n),
                    )
                    for n in divisors(global_batch(loaded, stage))
                ]
                for checkpointing in (False, True)
            ]
            phases = ("score", "update") if stage in ONLINE else ("train", "evaluate")
            axes.append(Axis(tuple((stage, phase) for phase in phases), ladders, {}))
    return axes


def _at_once(key: str, most: int) -> list[Choice]:
    return [Choice({key: n}, 1 / n) for n in divisors(most)]


def _value(recipe: dict[str, Any], key: str) -> Any:
    section, name = key.split(".")
    return recipe[section][name]


def _row_seconds(recipe: Recipe, stage: str, checkpointing: bool, micro: int) -> float:
    """Time of a row and weight that ranks settings: operations and weight traffic at the card's nominal rates.

    Each pass multiplies every weight by the row's tokens, and reads it once for a whole micro-batch; NF4 is read,
    unpacked and read again. Backward is one pass (the base has no weight gradients), recomputation another.
    """
    card = CARDS.get(recipe.hardware.name, CARDS["4090"])  # only the ratio of its rates counts
    weight_bytes = 0.5 + 2 + 2 if recipe.model.quantization == "nf4" else 4 if recipe.model.dtype == "float32" else 2
    passes = 3 if checkpointing else 2
    return passes * (2 * row_tokens(recipe, stage, micro) / card.flops + weight_bytes / (micro * card.bandwidth))
