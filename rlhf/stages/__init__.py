"""Stages of a chain, one file each. A stage takes its directory, started, and returns its metrics and costs."""
