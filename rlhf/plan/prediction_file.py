"""predicted.json: what is predicted for a recipe, kept beside it by `bench.memory pinned --write`."""

from pathlib import Path

from peakmem.events import Parts
from rlhf.plan.phases import ON_HOST
from rlhf.process.memory import CONTEXT_BYTES
from rlhf.recipe import StageName
from rlhf.run import reader
from rlhf.run.records import Record

PREDICTION_FILE = "predicted.json"

Peaks = dict[StageName, dict[str, Parts]]  # stage -> phase -> component -> bytes
Needs = dict[StageName, dict[str, int]]  # stage -> phase -> bytes of the card that the phase needs beside the driver
Works = dict[StageName, dict[str, dict[str, int]]]  # stage -> phase -> field of Work -> count


class Pinned(Record):
    """The content of predicted.json."""

    unit: str
    stages: Peaks
    needed: Needs
    work: Works


def read(directory: Path) -> Pinned | None:
    """Return what is pinned beside a recipe; None where nothing is. Raises UserError for a damaged file."""
    return reader.read(directory / PREDICTION_FILE, Pinned)


def card_needs(needed: Needs) -> dict[StageName, int]:
    """Return the bytes that each stage needs of the card, with the driver's context."""
    return {stage: max(phases.values()) + CONTEXT_BYTES for stage, phases in needed.items() if stage not in ON_HOST}
