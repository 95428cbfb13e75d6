"""Benchmarks: how long steps take and what they hold, measured or predicted, and the records of both."""
