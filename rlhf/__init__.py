"""Reproducible RLHF on one GPU: SFT, reward model and PPO, RLOO, GRPO or DPO from versioned recipes."""

__version__ = "0.2.0"
