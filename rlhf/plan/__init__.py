"""Predicts peak memory of every phase of a recipe on a machine that has no GPU."""
