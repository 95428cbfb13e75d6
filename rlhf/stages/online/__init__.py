"""Shared parts of the stages that learn from their own samples: sampling, scoring, checkpoints, the optimizer."""
