"""Folders of the studies: each has its code, its data, its page and its records."""

from pathlib import Path

OUTSIDE = Path(__file__).parent / "outside"
LAYERS = Path(__file__).parent / "layers"
TASKS = Path(__file__).parent / "tasks"
EXPERIMENTS = Path(__file__).parent / "experiments"
OVEROPTIMISATION = Path(__file__).parent / "overoptimisation"
