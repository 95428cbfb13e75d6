"""How long a stage would take: its floating-point operations and memory traffic against what the card can do at most.

Nothing here was measured. `limit` is the time at the card's nominal rates, which no program reaches; `projected` takes
the shares of them in ASSUMED.
"""

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from rlhf.data.lengths import lengths_of_hh
from rlhf.memory.predict import Phase, Stage
from rlhf.memory.rehearse import STEPS
from rlhf.recipe import Recipe

ASSUMED = {"mfu": 0.4, "mbu": 0.5}  # shares of the matrix rate in training, of the bandwidth in decoding
WINDOW = 16  # batches that are sorted by length together, as in rlhf/trainer.py


class Card(NamedTuple):
    """Nominal rates of a card, and where they stand."""

    flops: float  # per second, bfloat16 with float32 accumulation, dense
    bandwidth: float  # bytes per second
    source: str


CARDS = {
    "4090": Card(165.2e12, 1.008e12, "NVIDIA Ada GPU architecture white paper, GeForce RTX 4090"),
    "h100": Card(756e12, 2.0e12, "NVIDIA H100 data sheet, PCIe (half of the rate with sparsity)"),
}


class Work(NamedTuple):
    """What a whole stage computes and, while it decodes, reads."""

    flops: float
    decoded_bytes: float

    def seconds(self, card: Card, mfu: float = 1.0, mbu: float = 1.0) -> float:
        return self.flops / (card.flops * mfu) + self.decoded_bytes / (card.bandwidth * mbu)


def work(recipe: Recipe, stage: str, predicted: Stage) -> Work | None:
    """Work of a stage whose number of rows the recipe gives; None where it does not, or there is next to none."""
    if stage == "ppo":
        return _ppo(recipe, predicted)
    if stage not in ("sft", "rm", "dpo"):
        return None
    options = getattr(recipe, stage)
    if options.max_samples is None and options.max_steps is None:
        return None
    micro = options.per_device_train_batch_size
    per_step = micro * options.gradient_accumulation_steps
    steps = math.ceil((options.max_samples or 0) * options.num_train_epochs / per_step)
    steps = min(steps, options.max_steps) if options.max_samples and options.max_steps else options.max_steps or steps
    rows = steps * per_step
    rehearsed = STEPS * min(2, options.gradient_accumulation_steps) * micro
    share = padded_share(recipe, options.max_length, options.max_prompt_length, micro, options.group_by_length)
    training = predicted["train"].flops / rehearsed * rows * share
    evaluated = predicted["evaluate"].flops * options.max_eval_samples / min(options.max_eval_samples, 2 * micro)
    return Work(training + evaluated * share, 0.0)


def _ppo(recipe: Recipe, predicted: Stage) -> Work:
    options = recipe.ppo
    full = options.max_prompt_length + options.response_length
    prompts = _prompt_lengths(recipe, options.max_prompt_length)
    share = (sum(prompts) / len(prompts) + options.response_length) / full
    minibatches = options.num_mini_batches * options.num_ppo_epochs
    once = predicted["rollout"].flops + predicted["score"].flops
    per_step = (once + predicted["update"].flops * minibatches / min(2, options.num_mini_batches)) / STEPS
    evaluations = 1 + options.steps // math.gcd(options.eval_steps, options.save_steps)
    batches = options.steps * math.ceil(options.batch_size / options.rollout_batch_size)
    batches += evaluations * math.ceil(options.max_eval_samples / options.rollout_batch_size)
    read = _weights(predicted["rollout"]) + predicted["rollout"].components.get("kv_cache", 0) * share
    return Work(per_step * options.steps * share, batches * (options.response_length - 1) * read)


def _weights(phase: Phase) -> int:
    """Bytes of weights that a decoding step reads, near enough: all of them, one role's adapter among the four."""
    parts = phase.components
    return parts.get("base", 0) + parts.get("quantization", 0) + parts.get("adapters", 0) // 4


def padded_share(recipe: Recipe, longest: int, longest_prompt: int, batch: int, grouped: bool) -> float:
    """Tokens of a batch with its padding, over those of rows that are all as long as the stage admits."""
    if not lengths_are_known(recipe):
        return 1.0
    table = [min(min(p, longest_prompt) + max(c, r) + 1, longest) for p, c, r in lengths_of_hh()]
    rows = random.Random(0).choices(table, k=batch * WINDOW * 16)
    windows = [rows[at : at + batch * WINDOW] for at in range(0, len(rows), batch * WINDOW)]
    ordered = [row for window in windows for row in (sorted(window) if grouped else window)]
    padded = sum(batch * max(ordered[at : at + batch]) for at in range(0, len(ordered), batch))
    return padded / (len(rows) * longest)


def lengths_are_known(recipe: Recipe) -> bool:
    """Whether rows are as long as those of HH-RLHF; if not, each is taken to be as long as the stage admits."""
    data = recipe.data
    return "hh-rlhf" in (data.name or "") or (data.lengths is not None and data.lengths.shape == "hh")


def _prompt_lengths(recipe: Recipe, longest: int) -> Sequence[int]:
    return [min(p, longest) for p, _, _ in lengths_of_hh()] if lengths_are_known(recipe) else [longest]
