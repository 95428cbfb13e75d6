"""Run directories: their layout, records, checkpoints and results."""
