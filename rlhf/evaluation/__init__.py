"""Evaluation of policies and reward models on held-out data."""
