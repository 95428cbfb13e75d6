"""How long a stage would take: what it computes, moves and launches, against what the card can do.

Rates are the card's nominal ones, calibrated on training steps that others timed, with an interval. A phase takes no
less time than the host needs to launch its kernels, which was measured beside an H200 (bench/README.md).

A rehearsal counts the work of a step on the longest rows, without what a stage does only once. A stage does that work
more often, on rows of the usual length.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from rlhf.plan.hardware import Rates
from rlhf.plan.own_rows import Rows
from rlhf.plan.padding import as_long_as_hh, mean_prompt, share_of_longest
from rlhf.plan.phases import MOST_REPEATS, REHEARSED_STEPS, PredictedStage, Work
from rlhf.plan.weights import NUMBER_BYTES, shape_of, unpacked_bytes
from rlhf.recipe import Recipe, StageName, TrainingName
from rlhf.recipe.choices import Trunk
from rlhf.recipe.schema import Dialogues
from rlhf.recipe.schema_online import OnlineOptions
from rlhf.recipe.stages import FEW_SAMPLES, SFT, STAGE_TABLE, TRAINING_STAGES


class TimeFactors(NamedTuple):
    """What multiplies each part of a training step's time at nominal rates; the last is seconds for each launch."""

    products: float
    memory: float
    launch: float


# Fitted to 29 timed runs of others on an L40S and an A100.
CALIBRATED = TimeFactors(products=1.35, memory=1.15, launch=5e-6)
# Factors on projected training time. All 34 runs that the fit never saw took 0.87 to 1.37 times what is projected for
# them; this project's own loops and cards were not among them.
SPREAD = (0.8, 1.5)
# Seconds of the host for an operation that launches a kernel, forward and backward, by trunk. Measured beside an H200
# (bench/README.md), for both passes of 32 layers: 0.177 s for 210 operations in each of the library's, and 0.132 s
# for 108 in each of the lean ones, which launch fewer from as much Python. None of the runs above waited for its host.
HOST_LAUNCH: dict[Trunk, float] = {"library": 26e-6, "lean": 38e-6}
HH_PAIRS = 160_800  # of HH-RLHF's training split
REHEARSED_DECODING = 2  # steps of each batch that is decoded in a rehearsal


# -- a whole stage ----------------------------------------------------------------------------------------------------


class StageWork(NamedTuple):
    """What a whole stage does: its phases but for decoding, and what that reads and launches.

    A CPU launches nothing.
    """

    phases: Sequence[Work]
    decoded_bytes: float
    decoded_launches: float = 0.0  # by the card itself, where a step is a captured graph
    trunk: Trunk = "library"  # what launches the phases

    def seconds(self, rates: Rates) -> float:
        """Return projected seconds. Those of a phase are the host's where the card waits for it.

        The three parts of a phase come one after another. Decoding takes the time of reading and of launches alone.
        """
        host = HOST_LAUNCH[self.trunk]
        on_card = [max(_on_card(phase, rates), phase.launched * host) for phase in self.phases]
        return sum(on_card) + _on_card(Work(0, self.decoded_bytes, self.decoded_launches), rates)


def _on_card(work: Work, rates: Rates) -> float:
    products, memory = work.flops / rates.flops, work.moved / rates.bandwidth
    return products * CALIBRATED.products + memory * CALIBRATED.memory + work.launched * CALIBRATED.launch


def stage_work(
    recipe: Recipe, stage: StageName, predicted: PredictedStage, rows: Rows | None = None
) -> StageWork | None:
    """Return the work of a whole stage; None if it does not train, or the number of rows is not known.

    `rows` are those of the recipe's own files, where they were read.
    """
    if stage not in TRAINING_STAGES or (steps := optimizer_steps(recipe, stage, rows)) is None:
        return None
    times = times_a_step(recipe, stage)
    done = [(name, predicted.phases[name].work, n * steps) for name, n in times.items() if name in predicted.phases]
    done += [("evaluate", work, n) for work, n in _evaluations(recipe, stage, predicted, rows)]
    on_card = recipe.hardware.device == "cuda"  # on a CPU no kernel is launched
    phases = []
    for name, work, n in done:
        # Of the tokens with which the work was rehearsed. A kernel is launched for short rows as for long ones.
        share = share_of_longest(recipe, stage, name, rows)
        phases.append(Work(share * work.flops * n, share * work.moved * n, work.launched * n * on_card))
    decoding = decoding_of(recipe, stage, rows)
    if decoding.phase not in predicted.phases:
        return StageWork(phases, 0.0, 0.0, recipe.hardware.trunk)
    taken = decoding.batches * (decoding.response - 1)
    rehearsed = decoding.rehearsed * min(REHEARSED_DECODING, decoding.response - 1)
    launched = predicted.phases[decoding.phase].work.launched / rehearsed if rehearsed else 0.0
    moved = taken * decoding_step_bytes(recipe, stage, predicted, rows)
    return StageWork(phases, moved, taken * launched * on_card, recipe.hardware.trunk)


def optimizer_steps(recipe: Recipe, stage: TrainingName, rows: Rows | None = None) -> int | None:
    """Return the steps of the whole stage; None if neither recipe nor `rows` say how many rows there are."""
    options = recipe.training_section(stage)
    if not isinstance(options, Dialogues):
        return options.steps
    most = options.max_steps
    known = [n for n in (options.max_samples, rows and rows.train) if n is not None]
    if not known:
        return most
    batch = options.per_device_train_batch_size * options.gradient_accumulation_steps
    steps = math.ceil(min(known) * options.num_train_epochs / batch)
    return min(steps, most) if most else steps


def times_a_step(recipe: Recipe, stage: TrainingName) -> dict[str, float]:
    """Return how many times the work of a rehearsal one step does, by phase; decoding is counted by its own steps.

    All of a phase is multiplied: an optimizer's step, too, where a rehearsal has two micro-batches and a step has more.
    With 16 of them SFT's launches come out 3 % too many, and its hours 0.1 %.
    """
    options = recipe.training_section(stage)
    if isinstance(options, Dialogues):
        accumulation = options.gradient_accumulation_steps
        return {"train": accumulation / min(MOST_REPEATS, accumulation)}
    updates = options.num_mini_batches * options.passes / min(MOST_REPEATS, options.num_mini_batches)
    return {"rollout/prefill": 1.0, "score": 1.0, "update": updates}


def _evaluations(
    recipe: Recipe, stage: TrainingName, predicted: PredictedStage, rows: Rows | None
) -> list[tuple[Work, float]]:
    """Return the work of a rehearsed evaluation beside its decoding, in parts, and how often a stage does each.

    SFT measures its held-out rows before training too. At `eval_steps` rows for validation are measured, as held-out
    ones are. Of DPO and KTO the part also has the KL of samples; it is divided by tokens. In PPO, RLOO and GRPO a
    response that score normalisation samples counts as one of an evaluation.
    """
    work = {name: phase.work for name, phase in predicted.phases.items()}
    if "evaluate" not in work:
        return []
    options, sampling = recipe.training_section(stage), recipe.evaluate
    prefill, decode = (work.get(f"evaluate/{part}", Work()) for part in ("prefill", "decode"))
    if isinstance(options, Dialogues):
        row = STAGE_TABLE[stage]
        rehearsed = min(options.max_eval_samples, MOST_REPEATS * options.per_device_train_batch_size)
        prompts = FEW_SAMPLES if row.samples == "few" else min(sampling.max_samples, sampling.batch_size)
        passes, sampled = 1 + (stage == SFT), _sampled_prompts(recipe, stage, rows) / prompts
        of_rows = rehearsed * (1 + (row.rows == "pairs")) * options.max_length
        of_samples = prompts * (sampling.max_prompt_length + sampling.response_length) * (row.samples == "all")
        share = of_rows / (of_rows + of_samples)
        measured = passes * _heldout(options.max_eval_samples, rows) + _validated(recipe, stage, rows)
        times = share * measured / (passes * rehearsed) + (1 - share) * sampled
        return [(work["evaluate"] - prefill - decode, times), (prefill, sampled)]
    count = _online_evaluations(recipe, options.steps, options.eval_steps, options.save_steps)
    done = count * _heldout(options.max_eval_samples, rows) + _norm_batches(options) * options.batch_size
    rehearsed = _online_evaluations(recipe, REHEARSED_STEPS, REHEARSED_STEPS, REHEARSED_STEPS) * min(
        options.max_eval_samples, options.rollout_batch_size
    )
    rehearsed += min(_norm_batches(options), 1) * options.batch_size
    return [(work["evaluate"] - decode, done / rehearsed)]


def _heldout(most: int, rows: Rows | None) -> int:
    """Return how many held-out rows there are of the `most` that a recipe admits."""
    return most if rows is None else min(most, rows.heldout)


def _validated(recipe: Recipe, stage: TrainingName, rows: Rows | None) -> int:
    """Return the rows for validation that a trainer measures in all: at `eval_steps`, and after the last step."""
    options, steps = recipe.dialogues()[stage], optimizer_steps(recipe, stage, rows)
    if options.eval_steps is None or not steps:
        return 0
    most, share = options.max_eval_samples, recipe.data.validation_fraction
    if rows is None and share is not None and recipe.data.source == "hub" and as_long_as_hh(recipe):
        most = min(most, round(share * HH_PAIRS))
    return len({steps}.union(range(options.eval_steps, steps + 1, options.eval_steps))) * _heldout(most, rows)


def _sampled_prompts(recipe: Recipe, stage: TrainingName, rows: Rows | None) -> int:
    """Return the held-out prompts that SFT, DPO or KTO samples answers to, before as well as after training."""
    most = {"few": FEW_SAMPLES, "all": recipe.evaluate.max_samples, None: 0}[STAGE_TABLE[stage].samples]
    return _heldout(most, rows)


def _online_evaluations(recipe: Recipe, steps: int, eval_steps: int, save_steps: int) -> int:
    """Return the evaluations of a stage: before the first step, after the last, and at each of both intervals.

    Where validation is set apart, reference and policy are evaluated once more, on the prompts for reporting.
    """
    every = (range(n, steps + 1, n) for n in (eval_steps, save_steps))
    reported = 2 if recipe.data.validation_fraction is not None else 0
    return 1 + len({steps}.union(*every)) + reported


def _norm_batches(options: OnlineOptions) -> int:
    """Return the batches of rollouts by which score normalisation is measured; a rehearsal has one of them."""
    return math.ceil(options.norm_responses / options.batch_size) if options.normalize_scores else 0


# -- decoding ---------------------------------------------------------------------------------------------------------


class Decoding(NamedTuple):
    """How a stage samples: in rollouts and evaluations, or in SFT, DPO and KTO before and after training."""

    phase: str  # of a rehearsal, that decodes
    rehearsed: int  # its batches in a rehearsed step or evaluation
    batches: int  # of the whole stage
    together: int  # rows of a batch, at most
    prompt: int  # tokens of the longest prompt
    response: int  # tokens, of which the prefill gives the first


def decoding_of(recipe: Recipe, stage: TrainingName, rows: Rows | None) -> Decoding:
    """Return how a stage samples."""
    options, sampling = recipe.training_section(stage), recipe.evaluate
    if isinstance(options, Dialogues):
        prompts, size = _sampled_prompts(recipe, stage, rows), sampling.batch_size
        batches, together = 2 * math.ceil(prompts / size), min(size, prompts)
        return Decoding("evaluate/decode", 2, batches, together, sampling.max_prompt_length, sampling.response_length)
    size = options.rollout_batch_size
    rollouts = math.ceil(options.batch_size / size)
    evaluations = _online_evaluations(recipe, options.steps, options.eval_steps, options.save_steps)
    batches = (options.steps + _norm_batches(options)) * rollouts
    batches += evaluations * math.ceil(_heldout(options.max_eval_samples, rows) / size)
    together = min(options.batch_size, size)
    return Decoding("rollout/decode", rollouts, batches, together, options.max_prompt_length, options.response_length)


def decoding_step_bytes(
    recipe: Recipe, stage: TrainingName, predicted: PredictedStage, rows: Rows | None = None, longest: bool = False
) -> float:
    """Return the bytes that a mean decoding step of a stage moves: weights, keys and values.

    Weights are those that a rehearsal has loaded; 4-bit ones are written and read again where they are unpacked. Rows
    of the embedding table are looked up, and do not count. Keys and values are those of a mean prompt, or of the
    `longest`, and of half of the response.
    """
    shape, size = shape_of(recipe), NUMBER_BYTES[recipe.model.dtype]
    decoding = decoding_of(recipe, stage, rows)
    mean = decoding.prompt if longest else mean_prompt(recipe, decoding.prompt, rows)
    loaded = predicted.phases["load"].components
    base = loaded.get("base", 0) + loaded.get("quantization", 0)
    table = 0 if shape.tie_word_embeddings else (shape.vocab_size or 0) * shape.hidden_size * size
    cached = decoding.together * shape.cached_per_token * (mean + decoding.response / 2) * size
    return base - table + unpacked_bytes(recipe, decoding.together) + cached
