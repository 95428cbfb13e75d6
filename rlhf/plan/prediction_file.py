"""predicted.json: what is predicted for a recipe, kept beside it."""

import json
from dataclasses import asdict, replace
from pathlib import Path

from peakmem.events import Parts
from rlhf.plan.phases import ON_HOST, PredictedPhase, PredictedStage, Work
from rlhf.plan.predict import Predictor, predicted_stages
from rlhf.process.cuda import CONTEXT_BYTES
from rlhf.recipe import PinnedRecipe, StageName
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


def stages_of(pinned: Pinned) -> dict[StageName, PredictedStage]:
    """Return the pinned stages as they were predicted."""
    predicted = {}
    for stage, phases in pinned.stages.items():
        needed = pinned.needed.get(stage, {})
        of_phase = {
            name: PredictedPhase(
                peak_bytes=sum(parts.values()),
                components=parts,
                paged_bytes=0,  # they are in what is needed
                work=Work(**pinned.work[stage][name]),
                needed_bytes=needed.get(name),
            )
            for name, parts in phases.items()
        }
        whole = max(of_phase.values(), key=lambda phase: phase.peak_bytes)
        most = max(needed.values(), default=None)
        predicted[stage] = PredictedStage(replace(whole, needed_bytes=most), of_phase)
    return predicted


def predicted(predictor: Predictor, loaded: PinnedRecipe) -> Pinned:
    """Return what is predicted for a recipe now.

    What a phase needs has gaps between blocks and paged states, and not the driver. What it does is of the last
    rehearsed step.
    """
    stages: Peaks = {}
    needed: Needs = {}
    work: Works = {}
    for stage in predicted_stages(loaded.recipe):
        phases = predictor.predict(loaded, stage).phases
        stages[stage] = {name: phase.components for name, phase in phases.items()}
        work[stage] = {name: asdict(phase.work) for name, phase in phases.items()}
        if needs := {n: p.needed_bytes + p.paged_bytes for n, p in phases.items() if p.needed_bytes is not None}:
            needed[stage] = needs
    return Pinned.model_validate({"unit": "bytes, predicted", "stages": stages, "needed": needed, "work": work})


def write(directory: Path, pinned: Pinned) -> None:
    """Write predicted.json into a recipe's folder."""
    text = json.dumps(pinned.plain(), indent=1) + "\n"
    (directory / PREDICTION_FILE).write_text(text, encoding="utf-8")


def card_needs(needed: Needs) -> dict[StageName, int]:
    """Return the bytes that each stage needs of the card, with the driver's context."""
    return {stage: max(phases.values()) + CONTEXT_BYTES for stage, phases in needed.items() if stage not in ON_HOST}
