"""Observation of a run while it runs: the console, telemetry, trackers, live checks."""
