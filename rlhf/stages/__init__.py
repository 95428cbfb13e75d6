"""Stages of a chain, one file each. A stage takes a started run directory and returns its metrics and costs."""
