"""The fastest settings of a chain of stages that need no more memory than a limit, its results unchanged."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

from rlhf.memory.phases import Phase, Stage
from rlhf.memory.predict import needed
from rlhf.memory.projection import CARDS, row_tokens
from rlhf.memory.strategies import STAGES, divisors, global_batch, micro_batch, with_changes
from rlhf.recipe import ONLINE, PinnedRecipe, Recipe, StageName, as_yaml


class Fit(NamedTuple):
    """One set of changes for the whole chain: stages that build on each other must agree in what they share."""

    changes: dict[str, Any]
    stages: dict[StageName, Stage]  # as predicted with them
    too_large: tuple[StageName, ...]  # the stages that still need more than the limit


class Choice(NamedTuple):
    changes: dict[str, Any]
    seconds: float  # of a row, by which choices of one axis are ranked
    rows: int  # on the card at once


class Axis(NamedTuple):
    """Settings that are chosen together, apart from all others."""

    places: tuple[tuple[StageName, str], ...]  # (stage, phase) whose memory they decide
    ladders: list[list[Choice]]  # each from the choice that needs least to the one that needs most
    others: dict[str, Any]  # settings of other axes that decide the same places, at their smallest


# The share of its rows with which a choice would fit: 1 or more where it fits as it is. Below 1 it is an estimate.
Share = Callable[[Choice], float]
GROWING = ("activations", "logits", "kv_cache", "buffers", "temporaries", "kernels")  # components that grow with rows


def fit(
    predict: Callable[[PinnedRecipe, StageName], Stage],
    loaded: PinnedRecipe,
    stages: Sequence[StageName],
    limit: int,
    say: Callable[[str], None] = lambda text: None,
) -> Fit:
    """Return the fastest settings with which each of `stages` needs at most `limit` bytes of the card.

    Batches of the optimizers stay as they are. More prompts decoded together count as faster; of checkpointing and
    micro-batches `_row_seconds` is the judge. Where a bfloat16 base does not fit, NF4 and paged 8-bit optimizers are
    tried, which change the result. `say` gets a line for each candidate.
    """
    result = _Search(predict, loaded, stages, limit, say)()
    if result.too_large and loaded.recipe.model.quantization == "none":
        compressed = {"model.quantization": "nf4"}
        compressed |= {f"{stage}.optim": "paged_adamw_8bit" for stage in stages if stage in STAGES}
        again = _Search(predict, with_changes(loaded, compressed), stages, limit, say)()
        return again._replace(changes=compressed | again.changes)
    return result


class _Search:
    """One search: the axes one after the other, each with what was chosen on those before it."""

    def __init__(
        self,
        predict: Callable[[PinnedRecipe, StageName], Stage],
        loaded: PinnedRecipe,
        stages: Sequence[StageName],
        limit: int,
        say: Callable[[str], None],
    ):
        self.predict, self.loaded, self.stages, self.limit, self.say = predict, loaded, stages, limit, say
        self.axes = _axes(loaded, stages)
        self.asked_first = {key: value for axis in self.axes for key, value in axis.ladders[-1][-1].changes.items()}
        self.chosen: dict[str, Any] = {}

    def __call__(self) -> Fit:
        for axis in self.axes:
            self.chosen |= _fastest(axis, partial(self._share, axis)).changes
        predictions = {stage: self.predict(with_changes(self.loaded, self.chosen), stage) for stage in self.stages}
        too_large = tuple(stage for stage, phases in predictions.items() if needed(phases[""]) > self.limit)
        before = self.loaded.recipe.model_dump()
        changes = {key: value for key, value in self.chosen.items() if _value(before, key) != value}
        return Fit(changes, predictions, too_large)

    def _share(self, axis: Axis, choice: Choice) -> float:
        """Return the smallest share in the places of an axis; those after one that does not fit are not looked at."""
        least = inf
        for stage, phase in axis.places:
            least = min(least, self._share_in_place(axis, choice, stage, phase))
            if least < 1:
                break
        return least

    def _share_in_place(self, axis: Axis, choice: Choice, stage: StageName, phase: str) -> float:
        """Return the share in one phase, with the settings about which the stage's other axes ask first.

        So one rehearsal answers for all axes of the stage. Only where the phase does not fit with them, they are taken
        at their smallest.
        """
        assumed = {key: value for key, value in self.asked_first.items() if key.startswith(f"{stage}.")} | self.chosen
        share = self._share_with(assumed | choice.changes, stage, phase)
        if share < 1 and axis.others:
            share = max(share, self._share_with(self.chosen | axis.others | choice.changes, stage, phase))
        return share

    def _share_with(self, changes: dict[str, Any], stage: StageName, phase: str) -> float:
        settings = {key.removeprefix(f"{stage}."): value for key, value in changes.items()}
        words = ", ".join(f"{key} {as_yaml(value)}" for key, value in settings.items() if "." not in key)
        self.say(f"looking for settings that fit: {stage} with {words}" if words else f"rehearsing {stage}")
        predicted = self.predict(with_changes(self.loaded, changes), stage).get(phase)
        return _share(predicted, self.limit) if predicted else inf


def _share(phase: Phase, limit: int) -> float:
    """Return the share of its rows with which a phase would fit, if what grows does so in proportion to them."""
    need = needed(phase)
    growing = sum(phase.components.get(name, 0) for name in GROWING)
    if not growing:
        return inf if need <= limit else 0.0
    return max(0.0, (limit - need + growing) / growing)


def _fastest(axis: Axis, share: Share) -> Choice:
    """Return the fastest choice that fits, with few questions; the least demanding one where none does.

    Within a ladder memory grows and time falls. The last ladder needs least for the same place in it: of those before
    it only choices up to the place that fits there, and faster than that, are asked about.
    """
    best, room = None, len(axis.ladders[-1])
    for ladder in axis.ladders[::-1]:
        worthwhile = [c for c in ladder[:room] if best is None or c.seconds < best.seconds]
        choice = _largest_that_fits(worthwhile, share, hopeful=best is None)
        if best is None and choice is None:
            return ladder[0]
        best = choice or best
        room = ladder.index(best) + 1 if best in ladder else room
    assert best
    return best


def _largest_that_fits(choices: Sequence[Choice], share: Share, hopeful: bool) -> Choice | None:
    """Return the last of `choices` that fits, None where none does.

    The first question is about the last choice where `hopeful`, else about the first. The second one is where that
    answer's share points to, and from then on the choices that are left are halved.
    """
    rows = [choice.rows for choice in choices]
    fits, refused = -1, len(choices)  # the last place that is known to fit, and the first that is known not to
    at, guess = (refused - 1 if hopeful else 0), True
    while fits + 1 < refused:
        share_here = share(choices[at])
        fits, refused = (at, refused) if share_here >= 1 else (fits, at)
        pointed_to = bisect_right(rows, share_here * rows[at]) - 1
        at = min(max(pointed_to, fits + 1), refused - 1) if guess else (fits + refused) // 2
        guess = False
    return choices[fits] if fits >= 0 else None


def _axes(loaded: PinnedRecipe, stages: Sequence[StageName]) -> list[Axis]:
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
            decoding = [Choice({f"{stage}.rollout_batch_size": n}, 1 / n, n) for n in sizes]
            axes.append(Axis(((stage, "rollout"), (stage, "evaluate")), [decoding], {}))
    for stage in stages:
        if stage in STAGES:
            ladders = [
                [
                    Choice(
                        {f"{stage}.gradient_checkpointing": checkpointing, **micro_batch(loaded, stage, n)},
                        _row_seconds(recipe, stage, checkpointing, n),
                        n,
                    )
                    for n in divisors(global_batch(loaded, stage))
                ]
                for checkpointing in (False, True)
            ]
            phases = ("score", "update") if stage in ONLINE else ("train", "evaluate")
            axes.append(Axis(tuple((stage, phase) for phase in phases), ladders, {}))
    return axes


def _at_once(key: str, most: int) -> list[Choice]:
    return [Choice({key: n}, 1 / n, n) for n in divisors(most)]


def _value(recipe: dict[str, Any], key: str) -> Any:
    section, name = key.split(".")
    return recipe[section][name]


def _row_seconds(recipe: Recipe, stage: StageName, checkpointing: bool, micro: int) -> float:
    """Return the seconds of a row, which rank settings: operations and weight traffic at the card's nominal rates.

    Each pass multiplies every weight by the row's tokens, and reads it once for a whole micro-batch; NF4 is read,
    unpacked and read again. Backward is one pass (the base has no weight gradients), recomputation another.
    """
    card = CARDS.get(recipe.hardware.name, CARDS["4090"])  # only the ratio of its rates counts
    weight_bytes = 0.5 + 2 + 2 if recipe.model.quantization == "nf4" else 4 if recipe.model.dtype == "float32" else 2
    passes = 3 if checkpointing else 2
    return passes * (2 * row_tokens(recipe, stage, micro) / card.flops + weight_bytes / (micro * card.bandwidth))
