"""Learning rates to begin with: of LoRA adapters, by the method and by the width of the base.

LoRA learns fastest at about ten times the rate of full fine-tuning, and the best rate falls with the width of the
model, of Llamas as (2000 / width)^0.781 (Schulman and Thinking Machines Lab, "LoRA Without Regret", 2025). Rates here
are for a width of 4,096, a 7B, and fall as theirs. Two widths of ours agree: GRPO learned at 3e-4 with 576
(cpu-smollm2-sums) and at 2e-3 with 64 (cpu-tiny-groups), reward models at 4e-4 (cpu-smollm2-hh) and 2e-3 (cpu-tiny v2).

The table of stages has each method's: 2e-4 of SFT is QLoRA's (arXiv 2305.14314), which halves it for 33B; 1e-4 of
reward models is that of TRL's examples/scripts/reward_modeling.py. Those of PPO, RLOO and GRPO are ours, from the
widths above, and so is that of DPO and KTO: 1e-4 with 576 (cpu-smollm2-hh), 1e-3 with 64 (cpu-tiny v2).
"""

from rlhf.recipe.stages import SFT, STAGE_TABLE, StageName

WIDTH, POWER = 4096, 0.781
LIGHT = 0.1  # of SFT's rate, for a base that was tuned with the same chat template


def adapter_rate(stage: StageName, width: int, chat: bool) -> float:
    """Return the rate with which a stage's adapter begins on a base of a hidden size, to one digit.

    chat: the base was tuned with the template in which its rows are written.
    """
    rate = float(f"{STAGE_TABLE[stage].rate * (WIDTH / width) ** POWER:.0e}")
    return rate * LIGHT if chat and stage == SFT else rate
