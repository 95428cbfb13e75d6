"""Measures of policies and reward models on held-out data, and comparisons of runs."""
