"""Reproducible RLHF on one GPU: SFT, reward model and PPO, RLOO, GRPO, DPO or KTO from versioned recipes."""

__version__ = "0.3.0"
