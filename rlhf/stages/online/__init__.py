"""What the stages that learn from their own samples share: sampling, scoring, checkpoints and the optimizer."""
