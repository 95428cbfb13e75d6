"""Shared parts of the stages that learn from their own samples: sampling, role passes, checkpoints, the optimizer."""
