"""predicted.json: what is predicted for a recipe, kept beside it."""

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from rlhf.plan.phases import ON_HOST, Parts, PredictedPhase, PredictedStage, Work
from rlhf.plan.predict import Predictor, predicted_stages
from rlhf.plan.strategies import StrategyCost
from rlhf.process.cuda import CONTEXT_BYTES
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.run import reader
from rlhf.run.records import Record
from rlhf.terminal.wording import GB

PREDICTION_FILE = "predicted.json"
WORK = ("flops", "moved", "launched")  # of rlhf.plan.phases.Work: operations of products, bytes, operations

Peaks = dict[StageName, dict[str, Parts]]  # stage -> phase -> component -> bytes
Needs = dict[StageName, dict[str, int]]  # stage -> phase -> bytes of the card that the phase needs beside the driver
Works = dict[StageName, dict[str, dict[str, int]]]  # stage -> phase -> one of WORK -> count, of the last rehearsed step
# role -> "per_layer", "outside" and, where not all layers have adapters, "per_plain_layer" -> operations of a
# decoding step
Step = dict[str, dict[str, int]]
Passes = dict[str, dict[str, int]]  # trunk -> "forward" and "backward" -> operations of a layer in an update


class Pinned(Record):
    """The content of predicted.json. Older files lack newer keys."""

    unit: str
    stages: Peaks
    decoding_step: Step = Field(default_factory=dict)
    update_pass: Passes = Field(default_factory=dict)
    needed: Needs = Field(default_factory=dict)
    work: Works = Field(default_factory=dict)
    strategies: dict[str, StrategyCost] = Field(default_factory=dict)


def read(directory: Path) -> Pinned | None:
    """Return what is pinned beside a recipe; None where nothing is. Raises UserError for a damaged file."""
    return reader.read(directory / PREDICTION_FILE, Pinned)


def stages_of(pinned: Pinned) -> dict[StageName, PredictedStage]:
    """Return the pinned stages as they were predicted, but for what the allocator reserves, which is not pinned."""
    predicted = {}
    for stage, phases in pinned.stages.items():
        counted, needed = pinned.work.get(stage, {}), pinned.needed.get(stage, {})
        of_phase = {
            name: PredictedPhase(
                peak_bytes=sum(parts.values()),
                components=parts,
                paged_bytes=0,  # they are in what is needed
                work=Work(**counted.get(name, {})),
                needed_bytes=needed.get(name),
            )
            for name, parts in phases.items()
        }
        whole = max(of_phase.values(), key=lambda phase: phase.peak_bytes)
        most = max(needed.values(), default=None)
        predicted[stage] = PredictedStage(whole._replace(needed_bytes=most), of_phase)
    return predicted


def peaks(predictor: Predictor, loaded: PinnedRecipe) -> Peaks:
    """Return the components of every phase's peak."""
    return {
        stage: {name: phase.components for name, phase in predictor.predict(loaded, stage).phases.items()}
        for stage in predicted_stages(loaded.recipe)
    }


def needs(predictor: Predictor, loaded: PinnedRecipe) -> Needs:
    """Return what each phase needs of the card: with gaps between blocks and paged states, without the driver."""
    needed = {}
    for stage in predicted_stages(loaded.recipe):
        phases = predictor.predict(loaded, stage).phases
        needed[stage] = {
            name: phase.needed_bytes + phase.paged_bytes
            for name, phase in phases.items()
            if phase.needed_bytes is not None
        }
    return {stage: phases for stage, phases in needed.items() if phases}


def work(predictor: Predictor, loaded: PinnedRecipe) -> Works:
    """Return what each phase computes, moves and launches; one that a step consists of in the last rehearsed step."""
    return {
        stage: {
            name: {key: getattr(phase.work, key) for key in WORK}
            for name, phase in predictor.predict(loaded, stage).phases.items()
        }
        for stage in predicted_stages(loaded.recipe)
    }


def card_needs(needed: Needs) -> dict[StageName, int]:
    """Return the bytes that each stage needs of the card, with the driver's context."""
    return {stage: max(phases.values()) + CONTEXT_BYTES for stage, phases in needed.items() if stage not in ON_HOST}


def needs_table(needed: Needs, card_gb: float) -> str:
    """Return the needs of `card_needs` as Markdown, in GB, beside the memory of the card."""
    needs = card_needs(needed)
    rows = (
        ["predicted, not measured", *needs],
        ["---", *("---:" for _ in needs)],
        [f"needs, GB of {card_gb:g}", *(f"{size / GB:.1f}" for size in needs.values())],
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def decoding_step(predictor: Predictor, loaded: PinnedRecipe) -> tuple[Step, list[str]]:
    """Return the operations of a decoding step by role, and those that a captured graph must not hold."""
    operations = predictor.decoding_step(loaded) or {}
    step = {role: {"per_layer": n.per_layer, "outside": n.outside} for role, n in operations.items()}
    for role, n in operations.items():
        if n.per_plain_layer is not None:
            step[role]["per_plain_layer"] = n.per_plain_layer
    return step, [f"decoding step of {role}: {reason}" for role, n in operations.items() for reason in n.unsafe]


def pin(
    directory: Path,
    stages: Peaks,
    step: Step,
    costs: Mapping[str, StrategyCost] | None,
    needed: Needs,
    worked: Works | None = None,
    passes: Passes | None = None,
) -> None:
    """Write predicted.json into a recipe's folder.

    It has the peaks of the phases of `stages` in bytes by component, the operations of a decoding `step`, the `costs`
    of the strategies if known, what each phase `needed`, what it `worked`, and the operations of an update's `passes`.
    """
    content: dict[str, object] = {"unit": "bytes, predicted", "stages": stages, "decoding_step": step, "needed": needed}
    content |= {"work": worked or {}, "update_pass": passes or {}}
    if costs:
        content["strategies"] = {name: cost._asdict() for name, cost in costs.items()}
    pinned = Pinned.model_validate(content)
    (directory / PREDICTION_FILE).write_text(json.dumps(pinned.plain(), indent=1) + "\n", encoding="utf-8")
