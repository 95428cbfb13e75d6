"""The fastest settings of a chain of stages that need no more memory than a limit.

They do not change what is learned, with two exceptions: 4 bits, which are tried where nothing else fits, and the
micro-batch of KTO, whose loss compares its rows.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import NamedTuple

from peakmem import cards
from rlhf.errors import UserError
from rlhf.plan.padding import row_tokens
from rlhf.plan.phases import Component, Predict, PredictedPhase, PredictedStage, PredictionError
from rlhf.plan.predict import card_needed_bytes
from rlhf.plan.strategies import divisors, four_bit_changes, global_batch, micro_batch
from rlhf.plan.weights import NUMBER_BYTES, layers_bytes
from rlhf.recipe import Changes, PinnedRecipe, Recipe, StageName, TrainingName, as_yaml
from rlhf.recipe.schema import Dialogues
from rlhf.recipe.schema_online import OnlineOptions
from rlhf.recipe.stages import EVALUATE, REWARD_MODELS, STAGE_TABLE, TRAINING_STAGES
from rlhf.terminal.wording import GB


def base_bytes(recipe: Recipe, stage: StageName) -> int:
    """Return the bytes of a stage's linear and embedding weights, with the scales of 4-bit ones; norms are left out.

    A reward model has no output layer. Raises PredictionError for a type of model whose layers are not known.
    """
    shape = recipe.model.architecture
    if shape is None:
        raise PredictionError("the base's size is computed from model.architecture, which this recipe does not have")
    tables = 1 if shape.tie_word_embeddings or stage in REWARD_MODELS else 2
    numbers = tables * (shape.vocab_size or 0) * shape.hidden_size
    return layers_bytes(recipe) + numbers * NUMBER_BYTES[recipe.model.dtype]


def refuse_less_than_the_base(loaded: PinnedRecipe, stages: Sequence[StageName], limit: int) -> None:
    """Raise UserError if `limit` bytes are too few for the smallest base that a search may choose, the one in 4 bits.

    Without an architecture or for unknown layers nothing is refused here.
    """
    with suppress(PredictionError):
        if all(base_bytes(loaded.recipe, stage) <= limit for stage in stages):
            return
        smallest = loaded.with_changes(four_bit_changes(stages)).recipe
        needs = {stage: base_bytes(smallest, stage) for stage in stages}
        too_large = [stage for stage, least in needs.items() if least > limit]
        if too_large:
            raise UserError(
                f"{', '.join(too_large)}: the base alone needs {max(needs.values()) / GB:.3g} GB in 4 bits, more than "
                f"{limit / GB:.3g} GB; allow more memory with --fit, or choose a smaller model"
            )


class Fit(NamedTuple):
    """One set of changes for the whole chain: stages that build on each other must agree in what they share."""

    changes: Changes
    stages: dict[StageName, PredictedStage]  # as predicted with them
    too_large: tuple[StageName, ...]  # the stages that still need more than the limit


class Candidate(NamedTuple):
    """Values for the settings of one group."""

    changes: Changes
    seconds: float  # of a row, by which the candidates of one group are ranked
    rows: int  # on the card at once


class SettingGroup(NamedTuple):
    """Settings that are chosen together and apart from all others, with the values to try.

    `candidates` has one list, or one without and one with gradient checkpointing. Within a list memory grows and time
    falls (`_faster_with_more_rows`); the last list needs least memory for the same number of rows.
    """

    phases: tuple[tuple[StageName, str], ...]  # (stage, phase) whose memory they decide
    candidates: list[list[Candidate]]
    smallest_of_other_groups: Changes  # settings of other groups that decide the same phases


# The share of a candidate's rows that fits: 1 or more if all do; below 1 an estimate.
FractionThatFits = Callable[[Candidate], float]
# Share of a card that chosen settings may need. In 95 % of the runs that others measured on a T4, reserved memory was
# at most 4.8 % above its prediction, in all but one at most 7 % (studies/outside).
USABLE = 0.93
# Components that grow with rows.
GROWING: tuple[Component, ...] = ("activations", "logits", "kv_cache", "buffers", "temporaries", "kernels")


def fit(
    predict: Predict,
    loaded: PinnedRecipe,
    stages: Sequence[StageName],
    limit: int,
    say: Callable[[str], None] = lambda text: None,
    compress: bool = True,
) -> Fit:
    """Return the fastest settings with which each of `stages` needs at most `limit` bytes of the card.

    Batches of the optimizers stay as they are. More prompts decoded together count as faster; `_row_seconds` ranks
    checkpointing and micro-batch sizes. If a bfloat16 base does not fit, NF4 and paged 8-bit optimizers are tried,
    which change the result, unless `compress` is False. `say` gets a line for each set of settings.
    """
    result = _Search(predict, loaded, stages, limit, say)()
    if result.too_large and compress and loaded.recipe.model.quantization == "none":
        compressed = four_bit_changes(stages)
        again = _Search(predict, loaded.with_changes(compressed), stages, limit, say, "a base in 4 bits, ")()
        return again._replace(changes=compressed | again.changes)
    return result


class _Search:
    """A search through the groups of settings in turn, each with the settings that were chosen before it."""

    def __init__(
        self,
        predict: Predict,
        loaded: PinnedRecipe,
        stages: Sequence[StageName],
        limit: int,
        say: Callable[[str], None],
        base: str = "",
    ):
        """`base` says in which form the base is, where that is not the recipe's own."""
        self.predict, self.loaded, self.stages, self.limit = predict, loaded, stages, limit
        self.say, self.base, self.said = say, base, set[str]()
        self.groups = _setting_groups(loaded, stages)
        largest = [group.candidates[-1][-1] for group in self.groups]
        self.tried_first = {key: value for candidate in largest for key, value in candidate.changes.items()}
        self.chosen: Changes = {}

    def __call__(self) -> Fit:
        for group in self.groups:
            self.chosen |= _fastest(group, partial(self._fraction_that_fits, group)).changes
        predictions = {stage: self.predict(self.loaded.with_changes(self.chosen), stage) for stage in self.stages}
        needs = {stage: card_needed_bytes(predicted.whole) for stage, predicted in predictions.items()}
        too_large = tuple(stage for stage, need in needs.items() if need > self.limit)
        changes = {key: value for key, value in self.chosen.items() if _value(self.loaded.recipe, key) != value}
        return Fit(changes, predictions, too_large)

    def _fraction_that_fits(self, group: SettingGroup, candidate: Candidate) -> float:
        """Return the smallest fraction over the phases of a group; phases after one that does not fit are skipped."""
        least = inf
        for stage, phase in group.phases:
            least = min(least, self._fraction_in_phase(group, candidate, stage, phase))
            if least < 1:
                break
        return least

    def _fraction_in_phase(self, group: SettingGroup, candidate: Candidate, stage: StageName, phase: str) -> float:
        """Return the fraction for one phase.

        Settings of the stage that are not chosen yet are first taken at the values that are tried first for them, so
        that one rehearsal serves all groups of the stage. If the phase does not fit with those, they are taken at their
        smallest.
        """
        tried_first = {key: value for key, value in self.tried_first.items() if key.startswith(f"{stage}.")}
        fraction = self._fraction_with(tried_first | self.chosen | candidate.changes, stage, phase)
        if fraction < 1 and group.smallest_of_other_groups:
            smallest = self.chosen | group.smallest_of_other_groups | candidate.changes
            fraction = max(fraction, self._fraction_with(smallest, stage, phase))
        return fraction

    def _fraction_with(self, changes: Changes, stage: StageName, phase: str) -> float:
        """Return the fraction for one phase with these changes, which are said unless they were before."""
        settings = {key.removeprefix(f"{stage}."): value for key, value in changes.items() if _decides(key, stage)}
        words = ", ".join(f"{key} {as_yaml(value)}" for key, value in settings.items())
        line = f"looking for settings that fit: {self.base}{stage}" + (f" with {words}" if words else "")
        if line not in self.said:
            self.say(line)
            self.said.add(line)
        predicted = self.predict(self.loaded.with_changes(changes), stage).phases.get(phase)
        return _fraction_of_rows(predicted, self.limit) if predicted else inf


def _decides(key: str, stage: StageName) -> bool:
    """Return whether a key decides what a stage needs: one of its own, or of the sampling that it shares."""
    section = key.partition(".")[0]
    return section == stage or (section == EVALUATE and STAGE_TABLE[stage].samples is not None)


def _fraction_of_rows(phase: PredictedPhase, limit: int) -> float:
    """Return the fraction of its rows with which a phase would fit, if the growing components are proportional to them.

    Above 1 there is memory left. `limit` is in bytes.
    """
    need = card_needed_bytes(phase)
    growing = sum(phase.components.get(name, 0) for name in GROWING)
    if not growing:
        return inf if need <= limit else 0.0
    return max(0.0, (limit - need + growing) / growing)


def _fastest(group: SettingGroup, fraction: FractionThatFits) -> Candidate:
    """Return the fastest candidate that fits, with few predictions; the one that needs least if none does.

    The last list needs least memory for the same index: of the lists before it, only candidates up to the index that
    fits there and faster than that one are tried.
    """
    best, index_limit = None, len(group.candidates[-1])
    for candidates in group.candidates[::-1]:
        faster = [c for c in candidates[:index_limit] if best is None or c.seconds < best.seconds]
        candidate = _largest_that_fits(faster, fraction, try_largest_first=best is None)
        if best is None and candidate is None:
            return candidates[0]
        best = candidate or best
        index_limit = candidates.index(best) + 1 if best in candidates else index_limit
    assert best
    return best


def _largest_that_fits(
    candidates: Sequence[Candidate], fraction: FractionThatFits, try_largest_first: bool
) -> Candidate | None:
    """Return the last of `candidates` that fits, None if none does.

    The last candidate is tried first if `try_largest_first`, else the first one. The second try is where the fraction
    of the first points to. After that, each try halves the candidates that are left.
    """
    rows = [candidate.rows for candidate in candidates]
    fits, too_large = -1, len(candidates)  # the last index that is known to fit, and the first that is known not to
    at, estimated = (too_large - 1 if try_largest_first else 0), False
    while fits + 1 < too_large:
        fraction_here = fraction(candidates[at])
        fits, too_large = (at, too_large) if fraction_here >= 1 else (fits, at)
        estimate = bisect_right(rows, fraction_here * rows[at]) - 1
        at = (fits + too_large) // 2 if estimated else min(max(estimate, fits + 1), too_large - 1)
        estimated = True
    return candidates[fits] if fits >= 0 else None


def _setting_groups(loaded: PinnedRecipe, stages: Sequence[StageName]) -> list[SettingGroup]:
    """Return what is searched: rows decoded or scored together, then checkpointing and micro-batch of each stage."""
    recipe = loaded.recipe
    groups = []
    sampling = [stage for stage in stages if STAGE_TABLE[stage].samples]
    if sampling:
        phases = tuple((stage, "evaluate") for stage in sampling)
        training = [stage for stage in sampling if stage in TRAINING_STAGES]
        smallest = {k: n for s in training for k, n in micro_batch(loaded, s, STAGE_TABLE[s].least_rows).items()}
        decoding = _batch_sizes("evaluate.batch_size", divisors(recipe.evaluate.batch_size))
        groups.append(SettingGroup(phases, [decoding], smallest))
    for stage, options in recipe.online().items():
        if stage in stages:
            groups += _rollout_groups(stage, options)
    groups += [_training_group(loaded, stage) for stage in stages if stage in TRAINING_STAGES]
    return groups


def _rollout_groups(stage: StageName, options: OnlineOptions) -> Iterator[SettingGroup]:
    """Yield rows decoded together, and rows scored together where that is not the micro-batch."""
    sizes = [n for n in divisors(options.batch_size) if n % options.samples_per_prompt == 0]
    decoding = [_batch_sizes(f"{stage}.rollout_batch_size", sizes)]
    yield SettingGroup(((stage, "rollout"), (stage, "evaluate")), decoding, {})
    if options.score_batch_size is not None:
        scoring = [_batch_sizes(f"{stage}.score_batch_size", divisors(options.batch_size))]
        yield SettingGroup(((stage, "score"),), scoring, {})


def _training_group(loaded: PinnedRecipe, stage: TrainingName) -> SettingGroup:
    """Return the micro-batch sizes of a stage, without and with gradient checkpointing."""
    recipe = loaded.recipe
    options = recipe.training_section(stage)
    training = [
        _faster_with_more_rows(
            Candidate(
                {f"{stage}.gradient_checkpointing": checkpointing, **micro_batch(loaded, stage, n)},
                _row_seconds(recipe, stage, checkpointing, n),
                n,
            )
            for n in divisors(global_batch(loaded, stage))
            if n >= STAGE_TABLE[stage].least_rows
        )
        for checkpointing in (False, True)
    ]
    if isinstance(options, Dialogues):
        names = ["train", "evaluate"]
    else:
        names = ["update"] if options.score_batch_size is not None else ["score", "update"]
    return SettingGroup(tuple((stage, name) for name in names), training, {})


def _faster_with_more_rows(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates that are faster than all with fewer rows, which come first; the others need more for less.

    Where rows of any length share a micro-batch, more rows have more padding.
    """
    kept: list[Candidate] = []
    for candidate in candidates:
        if not kept or candidate.seconds < kept[-1].seconds:
            kept.append(candidate)
    return kept


def _batch_sizes(key: str, sizes: Sequence[int]) -> list[Candidate]:
    return [Candidate({key: n}, 1 / n, n) for n in sizes]


def _value(recipe: Recipe, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(recipe, section), name)


def _row_seconds(recipe: Recipe, stage: TrainingName, checkpointing: bool, micro: int) -> float:
    """Return the seconds of a row, which rank settings: operations and weight traffic at the card's nominal rates.

    Each pass multiplies every weight by the row's tokens, and reads it once for a whole micro-batch; NF4 is read,
    unpacked and read again. Backward is one pass (the base has no weight gradients), recomputation another.
    """
    card = cards.rates_of(recipe.hardware.name) or cards.RATES_4090  # only the ratio of its rates counts
    weight_bytes = 0.5 + 2 + 2 if recipe.model.quantization == "nf4" else 4 if recipe.model.dtype == "float32" else 2
    passes = 3 if checkpointing else 2
    return passes * sum(card.seconds(2 * row_tokens(recipe, stage, micro), weight_bytes / micro))
