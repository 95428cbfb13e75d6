"""The tokens of rows with their padding: most are shorter than the longest row, with which a stage is rehearsed."""

import math
import random
from collections.abc import Sequence
from statistics import mean

from peakmem import cards
from rlhf.data.worlds.lengths import lengths_of_hh
from rlhf.plan.own_rows import Lengths, Rows
from rlhf.recipe import Recipe, TrainingName
from rlhf.recipe.schema import Dialogues
from rlhf.recipe.stages import REWARD_MODELS, STAGE_TABLE

SORTED_BATCHES = 16  # batches that are sorted by length together, as in rlhf/stages/supervised/row_order.py
DRAWN = 2**14  # rows: enough for a mean


def row_tokens(
    recipe: Recipe, stage: TrainingName, micro: int, rows: Rows | None = None, phase: str = "train"
) -> float:
    """Return the mean tokens of a row, with the padding of micro-batches of `micro` rows of SFT, reward model and DPO.

    Responses of a rollout are taken to be as long as the stage admits. `rows` are those of files that were read.
    """
    options = recipe.training_section(stage)
    if not isinstance(options, Dialogues):
        return mean_prompt(recipe, options.max_prompt_length, rows) + options.response_length
    batch = (
        options.per_device_train_batch_size * options.gradient_accumulation_steps if options.group_by_length else None
    )
    share = padded_share(
        recipe,
        options.max_length,
        options.max_prompt_length,
        micro,
        batch,
        pairs=STAGE_TABLE[stage].rows == "pairs",
        rows=rows,
        joined=joins_rows(recipe, stage, phase),
    )
    return options.max_length * share


def share_of_longest(recipe: Recipe, stage: TrainingName, phase: str, rows: Rows | None) -> float:
    """Return the tokens of a row in a phase, with its padding, over those of the longest row that the stage admits.

    Rows of a rollout are sampled as they come, and sorted by length before they are scored and before an update; joined
    ones have no padding.
    """
    options = recipe.training_section(stage)
    if isinstance(options, Dialogues):
        return row_tokens(recipe, stage, options.per_device_train_batch_size, rows, phase) / options.max_length
    together = {  # rows of a pass, and those that are sorted for it
        "rollout/prefill": (options.rollout_batch_size, min(options.rollout_batch_size, options.batch_size)),
        "score": (options.score_rows, options.batch_size),
        "update": (options.per_device_train_batch_size, options.batch_size // options.num_mini_batches),
        "evaluate": (options.rollout_batch_size, min(options.rollout_batch_size, options.max_eval_samples)),
    }
    micro, sorted_rows = (1, 1) if joins_rows(recipe, stage, phase) else together[phase]
    copies = 1 if phase == "evaluate" else options.samples_per_prompt
    prompt = _padded_prompt(recipe, options.max_prompt_length, micro / copies, sorted_rows / copies, rows)
    if phase == "rollout/prefill":
        return prompt / options.max_prompt_length
    return (prompt + options.response_length) / (options.max_prompt_length + options.response_length)


def joins_rows(recipe: Recipe, stage: TrainingName, phase: str) -> bool:
    """Return whether a phase of a stage computes no padding (rlhf/models/lean/packed.py).

    The trainer of reward models wants the states of whole rows. Held-out rows of trainers are padded, because the
    library's layers read them, and so are prompts that are sampled with weights in 4 bits.
    """
    hardware = recipe.hardware
    samples = stage in recipe.online() and recipe.model.quantization == "none"
    return (
        phase in ("train", "score", "update", *(("rollout/prefill", "evaluate") if samples else ()))
        and hardware.trunk == "lean"
        and hardware.device == "cuda"
        and recipe.model.dtype != "float32"
        and cards.gpu_of(hardware.name).capability >= (8, 0)
        and stage not in REWARD_MODELS
    )


def _padded_prompt(recipe: Recipe, longest: int, micro: float, sorted_prompts: float, rows: Rows | None) -> float:
    """Return the mean tokens of a prompt, padded to the longest of `micro` prompts of so many that were sorted."""
    lengths = _lengths(recipe, rows)
    if lengths is None:
        return longest
    table, together = [min(prompt, longest) for prompt, _, _ in lengths], math.ceil(sorted_prompts)
    return _padded(table, min(math.ceil(micro), together), together)


def padded_share(
    recipe: Recipe,
    longest: int,
    longest_prompt: int,
    micro: int,
    grouped: int | None,
    pairs: bool = True,
    rows: Rows | None = None,
    joined: bool = False,
) -> float:
    """Return the tokens of a micro-batch with its padding, over those of rows that are all as long as the stage admits.

    `grouped`: rows of an optimizer's batch, where rows of similar length share one, as in row_order.py.
    `pairs`: both answers are padded to the longer one; otherwise rows have the chosen one. `joined`: nothing is padded.
    """
    lengths = _lengths(recipe, rows)
    if lengths is None:
        return 1.0
    if joined:
        answers = [(c, r) if pairs else (c,) for _, c, r in lengths]
        whole = [min(p, longest_prompt) + 1 for p, _, _ in lengths]
        return mean(min(p + n, longest) for p, row in zip(whole, answers, strict=True) for n in row) / longest
    table = [min(min(p, longest_prompt) + (max(c, r) if pairs else c) + 1, longest) for p, c, r in lengths]
    return _padded(table, micro, grouped * SORTED_BATCHES if grouped else micro) / longest


def _padded(table: Sequence[int], micro: int, sorted_rows: int) -> float:
    """Return the mean tokens of rows whose lengths are drawn from `table`, padded to the longest of their micro-batch.

    So many rows are sorted by length, and then divided into micro-batches.
    """
    most = max(1, DRAWN // sorted_rows) * sorted_rows
    drawn = random.Random(0).choices(table, k=most)
    padded = 0
    for at in range(0, most, sorted_rows):
        ordered = sorted(drawn[at : at + sorted_rows])
        parts = [ordered[first : first + micro] for first in range(0, sorted_rows, micro)]
        padded += sum(len(part) * part[-1] for part in parts)
    return padded / most


def mean_prompt(recipe: Recipe, longest: int, rows: Rows | None) -> float:
    lengths = _lengths(recipe, rows)
    return longest if lengths is None else mean(min(prompt, longest) for prompt, _, _ in lengths)


def _lengths(recipe: Recipe, rows: Rows | None) -> Lengths | None:
    """Return the tokens of rows; None where they are not known, and each is taken to be as long as the stage admits."""
    if rows is not None:
        return rows.lengths
    return lengths_of_hh() if as_long_as_hh(recipe) else None


def as_long_as_hh(recipe: Recipe) -> bool:
    """Return whether rows are as long as those of HH-RLHF."""
    data = recipe.data
    if data.source == "lengths":
        return data.lengths is not None and data.lengths.shape == "hh"
    return data.source == "hub" and "hh-rlhf" in (data.name or "")
