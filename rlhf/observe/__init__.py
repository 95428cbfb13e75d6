"""Observation of a run while it runs: telemetry, trackers, live checks."""
