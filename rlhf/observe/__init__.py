"""What a run shows while it runs: the console, telemetry, trackers, live checks."""
