"""How long a stage would take: its floating-point operations and memory traffic against what the card can do at most.

Nothing here was measured. `limit` is the time at the card's nominal rates, which no program reaches; `projected` takes
the shares of them in ASSUMED.
"""

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from rlhf.data.lengths import lengths_of_hh
from rlhf.memory import STEPS
from rlhf.memory.predict import TRAINING, Phase, Stage
from rlhf.recipe import ONLINE, Recipe

# Shares of the matrix rate in training and of the bandwidth in decoding. HFU counts all that the card computes, and so
# does `Work.flops`; MFU leaves out what checkpointing computes again.
ASSUMED = {"hfu": 0.4, "mbu": 0.5}
WINDOW = 16  # batches that are sorted by length together, as in rlhf/trainer.py


class Card(NamedTuple):
    """Nominal rates of a card, and where they stand."""

    flops: float  # per second, bfloat16 with float32 accumulation, dense
    bandwidth: float  # bytes per second
    source: str
    link: float | None = None  # bytes per second that it can receive from the others of its machine


_RTX_4090 = "NVIDIA Ada GPU architecture white paper, GeForce RTX 4090"
CARDS = {  # by the recipe's hardware.name
    "4090": Card(165.2e12, 1.008e12, _RTX_4090),
    "2x4090": Card(
        165.2e12, 1.008e12, f"{_RTX_4090}; PCIe 4.0 x16 in one direction: 16 lanes of 16 GT/s, 128b/130b", 31.5e9
    ),
    "h100": Card(756e12, 2.0e12, "NVIDIA H100 data sheet, PCIe (half of the rate with sparsity)"),
    "8xh100": Card(
        989.5e12,
        3.35e12,
        "NVIDIA H100 data sheet, SXM (half of the rates with sparsity, NVLink of both directions)",
        450e9,
    ),
}


class Work(NamedTuple):
    """What a whole stage computes and, while it decodes, reads."""

    flops: float
    decoded_bytes: float

    def seconds(self, card: Card, hfu: float = 1.0, mbu: float = 1.0) -> float:
        return self.flops / (card.flops * hfu) + self.decoded_bytes / (card.bandwidth * mbu)


def step_flops(recipe: Recipe, stage: str, predicted: Stage, of_model: bool = False) -> dict[str, float]:
    """Operations of one optimizer step (PPO: one step) on the longest rows, by phase.

    All that the card computes; `of_model` leaves out what it computes a second time for want of memory.
    """
    if stage in ONLINE:
        options = getattr(recipe, stage)
        updates = options.num_mini_batches * options.passes / min(2, options.num_mini_batches)
        times = {"rollout/prefill": 1.0, "rollout/decode": 1.0, "score": 1.0, "update": updates}
    else:
        accumulation = getattr(recipe, stage).gradient_accumulation_steps
        times = {"train": accumulation / min(2, accumulation)}
    found = {name: (predicted[name], n / STEPS) for name, n in times.items() if name in predicted}
    return {name: (phase.flops - phase.recomputed * of_model) * n for name, (phase, n) in found.items()}


def decoding_bytes(recipe: Recipe, predicted: Stage) -> float:
    """Bytes that a decoding step of PPO reads at least: weights, one adapter, keys and values of full responses."""
    return _weights(predicted["rollout"]) + predicted["rollout"].components.get("kv_cache", 0)


def optimizer_steps(recipe: Recipe, stage: str) -> int | None:
    """Steps of the whole stage; None where the recipe does not say how many rows there are."""
    options = getattr(recipe, stage)
    if stage in ONLINE:
        return options.steps
    if options.max_samples is None:
        return options.max_steps
    batch = options.per_device_train_batch_size * options.gradient_accumulation_steps
    steps = math.ceil(options.max_samples * options.num_train_epochs / batch)
    return min(steps, options.max_steps) if options.max_steps else steps


def work(recipe: Recipe, stage: str, predicted: Stage) -> Work | None:
    """Work of a stage whose number of rows the recipe gives; None where it does not, or there is next to none."""
    if stage not in TRAINING:
        return None
    steps = optimizer_steps(recipe, stage)
    if steps is None:
        return None
    options = getattr(recipe, stage)
    per_step = step_flops(recipe, stage, predicted)
    share = row_tokens(recipe, stage, options.per_device_train_batch_size) / longest_row(recipe, stage)
    if stage in ONLINE:
        every = (range(n, options.steps + 1, n) for n in (options.eval_steps, options.save_steps))
        evaluations = 1 + len({options.steps}.union(*every))
        batches = options.steps * math.ceil(options.batch_size / options.rollout_batch_size)
        batches += evaluations * math.ceil(options.max_eval_samples / options.rollout_batch_size)
        cached = predicted["rollout"].components.get("kv_cache", 0)
        read = decoding_bytes(recipe, predicted) - cached * (1 - share)
        computed = sum(flops for phase, flops in per_step.items() if phase != "rollout/decode")
        return Work(computed * steps * share, batches * (options.response_length - 1) * read)
    rehearsed = min(options.max_eval_samples, 2 * options.per_device_train_batch_size)
    evaluated = predicted["evaluate"].flops * options.max_eval_samples / rehearsed
    return Work((per_step["train"] * steps + evaluated) * share, 0.0)


def longest_row(recipe: Recipe, stage: str) -> int:
    """Tokens of the longest row that a training stage admits."""
    options = getattr(recipe, stage)
    return options.max_prompt_length + options.response_length if stage in ONLINE else options.max_length


def row_tokens(recipe: Recipe, stage: str, micro: int) -> float:
    """Tokens of a row on average, with the padding of micro-batches; PPO's responses use their whole budget."""
    options = getattr(recipe, stage)
    if stage in ONLINE:
        prompts = _prompt_lengths(recipe, options.max_prompt_length)
        return sum(prompts) / len(prompts) + options.response_length
    longest = options.max_length
    batch = (
        options.per_device_train_batch_size * options.gradient_accumulation_steps if options.group_by_length else None
    )
    return longest * padded_share(recipe, longest, options.max_prompt_length, micro, batch)


def _weights(phase: Phase) -> int:
    """Bytes of weights that a decoding step reads, near enough: all of them, one role's adapter among the four."""
    parts = phase.components
    return parts.get("base", 0) + parts.get("quantization", 0) + parts.get("adapters", 0) // 4


def padded_share(recipe: Recipe, longest: int, longest_prompt: int, micro: int, grouped: int | None) -> float:
    """Tokens of a micro-batch with its padding, over those of rows that are all as long as the stage admits.

    `grouped`: rows of an optimizer's batch, where rows of similar length share one (rlhf/trainer.py).
    """
    if not lengths_are_known(recipe):
        return 1.0
    table = [min(min(p, longest_prompt) + max(c, r) + 1, longest) for p, c, r in lengths_of_hh()]
    size = (grouped or micro) * WINDOW
    rows = random.Random(0).choices(table, k=size * 16)
    windows = [rows[at : at + size] for at in range(0, len(rows), size)]
    ordered = [row for window in windows for row in (sorted(window) if grouped else window)]
    padded = sum(micro * max(ordered[at : at + micro]) for at in range(0, len(ordered), micro))
    return padded / (len(rows) * longest)


def lengths_are_known(recipe: Recipe) -> bool:
    """Whether rows are as long as those of HH-RLHF; if not, each is taken to be as long as the stage admits."""
    data = recipe.data
    return "hh-rlhf" in (data.name or "") or (data.lengths is not None and data.lengths.shape == "hh")


def _prompt_lengths(recipe: Recipe, longest: int) -> Sequence[int]:
    return [min(p, longest) for p, _, _ in lengths_of_hh()] if lengths_are_known(recipe) else [longest]
