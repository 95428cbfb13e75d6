"""The tokens of rows with their padding: most are shorter than the longest row, with which a stage is rehearsed."""

import math
import random
from collections.abc import Sequence
from statistics import mean

from rlhf.data.worlds.lengths import lengths_of_hh
from rlhf.plan.own_rows import Lengths, Rows
from rlhf.recipe import Recipe, TrainingName
from rlhf.recipe.schema import Dialogues
from rlhf.recipe.stages import STAGE_TABLE

SORTED_BATCHES = 16  # batches that are sorted by length together, as in rlhf/stages/supervised/row_order.py
DRAWN = 2**14  # rows: enough for a mean


def share_of_longest(recipe: Recipe, stage: TrainingName, phase: str, rows: Rows | None) -> float:
    """Return the tokens of a row in a phase, with its padding, over those of the longest row that the stage admits.

    Rows of a rollout are sampled as they come, and sorted by length before they are scored and before an update.
    Responses of a rollout are taken to be as long as the stage admits. `rows` are those of files that were read. Rows
    that `hardware.joined_rows` joins count with their padding: no card has shown what that gains.
    """
    options, lengths = recipe.training_section(stage), _lengths(recipe, rows)
    if lengths is None:
        return 1.0
    if isinstance(options, Dialogues):
        return _share_of_dialogues(lengths, options, pairs=STAGE_TABLE[stage].rows == "pairs")
    together = {  # rows of a pass, and those that are sorted for it
        "rollout/prefill": (options.rollout_batch_size, min(options.rollout_batch_size, options.batch_size)),
        "score": (options.score_rows, options.batch_size),
        "update": (options.per_device_train_batch_size, options.batch_size // options.num_mini_batches),
        "evaluate": (options.rollout_batch_size, min(options.rollout_batch_size, options.max_eval_samples)),
    }
    micro, sorted_rows = together[phase]
    copies = 1 if phase == "evaluate" else options.samples_per_prompt
    prompts, micro = math.ceil(sorted_rows / copies), math.ceil(micro / copies)
    table = [min(prompt, options.max_prompt_length) for prompt, _, _ in lengths]
    prompt = _padded(table, min(micro, prompts), prompts)
    if phase == "rollout/prefill":
        return prompt / options.max_prompt_length
    return (prompt + options.response_length) / (options.max_prompt_length + options.response_length)


def _share_of_dialogues(lengths: Lengths, options: Dialogues, pairs: bool) -> float:
    """Return the tokens of a micro-batch with its padding, over those of rows that are all as long as the stage admits.

    `pairs`: both answers are padded to the longer one; otherwise rows have the chosen one.
    """
    longest, micro = options.max_length, options.per_device_train_batch_size
    prompts = [min(prompt, options.max_prompt_length) + 1 for prompt, _, _ in lengths]
    answers = [max(chosen, rejected) if pairs else chosen for _, chosen, rejected in lengths]
    table = [min(prompt + answer, longest) for prompt, answer in zip(prompts, answers, strict=True)]
    batch = micro * options.gradient_accumulation_steps  # of which rows of similar length share a micro-batch
    return _padded(table, micro, batch * SORTED_BATCHES if options.group_by_length else micro) / longest


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
    """Return the mean tokens of a prompt."""
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
