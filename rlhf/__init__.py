"""Reproducible RLHF on one GPU: SFT, reward model, PPO and DPO from versioned recipes."""

__version__ = "0.2.0"
