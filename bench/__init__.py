"""Benchmarks: how long steps take and what they hold, measured or predicted, and the records of both."""

from rlhf.process import libraries  # noqa: F401  # keeps bitsandbytes quiet, whoever imports it
