"""Learning rates to begin with: of LoRA adapters, by the method and by the width of the base.

LoRA learns fastest at about ten times the rate of full fine-tuning, and the best rate falls with the width of the
model, of Llamas as (2000 / width)^0.781 (Schulman and Thinking Machines Lab, "LoRA Without Regret", 2025). Rates here
are for a width of 4,096, a 7B, and fall as theirs. Two widths of ours agree: GRPO learned at 3e-4 with 576
(cpu-smollm2-sums) and at 2e-3 with 64 (cpu-tiny-sums), reward models at 4e-4 (cpu-smollm2-hh) and 2e-3 (cpu-tiny v2).
"""

from rlhf.recipe.schema import Recipe
from rlhf.recipe.stages import StageName

WIDTH, POWER = 4096, 0.781
AT_WIDTH: dict[StageName, float] = {
    "sft": 2e-4,  # QLoRA (arXiv 2305.14314), which halves it for 33B
    "rm": 1e-4,  # TRL's examples/scripts/reward_modeling.py
    "second_rm": 1e-4,
    "ppo": 6e-5,  # ours, from the widths above
    "rloo": 6e-5,
    "grpo": 6e-5,
    "dpo": 2e-5,  # ours: 1e-4 with 576 (cpu-smollm2-hh), 1e-3 with 64 (cpu-tiny v2)
    "kto": 2e-5,
}
LIGHT = 0.1  # of SFT's rate, for a base that was tuned with the same chat template


def adapter_rate(stage: StageName, width: int) -> float:
    """Return the rate with which a stage's adapter begins on a base of a hidden size, to one digit."""
    return float(f"{AT_WIDTH[stage] * (WIDTH / width) ** POWER:.0e}")


def usual_rate(recipe: Recipe, stage: StageName) -> float | None:
    """Return the same for a recipe; None where it trains no adapter, or the width is not known."""
    shape = recipe.model.architecture
    return adapter_rate(stage, shape.hidden_size) if shape and stage in AT_WIDTH else None
