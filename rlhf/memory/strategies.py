"""Ways to need less memory: what each would save on a recipe, and which settings fit a card.

The six are those of the published H100 guide. All but two leave the result alone: quantisation rounds the base, and a
shorter context cuts dialogues.
"""

from typing import Any, NamedTuple

from rlhf import recipe as recipes
from rlhf.memory import projection
from rlhf.memory.predict import Predictor, Stage, reserved
from rlhf.recipe import Loaded

STAGES = ("sft", "rm", "ppo", "dpo")
STEP = {"sft": "train", "rm": "train", "dpo": "train", "ppo": "update"}  # the phase that learns


class Strategy(NamedTuple):
    name: str
    words: str
    changes_result: bool


STRATEGIES = (
    Strategy("gradient_checkpointing", "recompute activations in the backward pass", False),
    Strategy("quantization", "4-bit base (NF4)", True),
    Strategy("flash_attention", "attention without its matrix of scores", False),
    Strategy("batch_size", "half the micro-batch, twice the accumulation", False),
    Strategy("context_length", "half the tokens of a sequence", True),
    Strategy("distributed", "two GPUs", False),
)


def switched_on(loaded: Loaded, stage: str, name: str) -> dict[str, Any] | None:
    """The keys that switch a strategy on for a stage; None where it is on already, or there is nothing to halve."""
    recipe = loaded.recipe
    options = getattr(recipe, stage)
    if name == "gradient_checkpointing":
        return None if options.gradient_checkpointing else {f"{stage}.gradient_checkpointing": True}
    if name == "quantization":
        return None if recipe.model.quantization == "nf4" else {"model.quantization": "nf4"}
    if name == "flash_attention":
        return None if recipe.model.attention != "eager" else {"model.attention": "auto"}
    if name == "batch_size":
        half = [n for n in _divisors(_global_batch(loaded, stage)) if 2 * n <= options.per_device_train_batch_size]
        return _micro_batch(loaded, stage, half[0]) if half else None
    if name == "context_length":
        return _halved(loaded, stage)
    return None  # one process sees one card


def switched_off(loaded: Loaded, stage: str) -> dict[str, Any]:
    """The recipe as it would be with no strategy: the base as it is published, eager attention, one whole batch."""
    return {
        "model.quantization": "none",
        "model.attention": "eager",
        f"{stage}.gradient_checkpointing": False,
        **_micro_batch(loaded, stage, _global_batch(loaded, stage)),
    }


def one_by_one(loaded: Loaded, stage: str) -> dict[str, Loaded]:
    """The recipe without any strategy ("none"), with each alone, and with all that apply to one card ("combined")."""
    off = with_changes(loaded, switched_off(loaded, stage))
    alone = {s.name: switched_on(off, stage, s.name) for s in STRATEGIES}
    changes: dict[str, dict[str, Any]] = {"none": {}} | {name: keys for name, keys in alone.items() if keys}
    changes["combined"] = {key: value for keys in changes.values() for key, value in keys.items()}
    return {name: with_changes(off, keys) for name, keys in changes.items()}


def with_changes(loaded: Loaded, changes: dict[str, Any]) -> Loaded:
    return recipes.load(loaded.directory, loaded.overrides | changes, loaded.recipe.seed)


class Effect(NamedTuple):
    """A strategy's predicted effect on the peak of one phase; None where it is on already, or does not apply."""

    strategy: Strategy
    changes: dict[str, Any] | None
    before: int
    after: int | None
    flops: float | None  # after / before


def effects(predict: Predictor, loaded: Loaded, stage: str, phase: str) -> list[Effect]:
    """Each strategy alone, on the recipe as it is, the one that saves most first."""
    before = predict(loaded, stage)
    peak = before[phase].peak_bytes
    found = []
    for strategy in STRATEGIES:
        changes = switched_on(loaded, stage, strategy.name)
        if changes is None:
            found.append(Effect(strategy, None, peak, None, None))
            continue
        changed = with_changes(loaded, changes)
        after = predict(changed, stage)
        ratio = operations(changed, stage, after) / operations(loaded, stage, before)
        found.append(Effect(strategy, changes, peak, after[phase].peak_bytes, ratio))
    return sorted(found, key=lambda e: e.after if e.after is not None else 2**62)


def operations(loaded: Loaded, stage: str, predicted: Stage) -> float:
    """Floating-point operations of one step of a stage, decoding left out."""
    per_phase = projection.step_flops(loaded.recipe, stage, predicted)
    return sum(flops for phase, flops in per_phase.items() if phase != "rollout/decode")


class Fit(NamedTuple):
    changes: dict[str, Any]
    stage: Stage


def fit(predict: Predictor, loaded: Loaded, stage: str, limit: int) -> Fit | None:
    """The fastest settings of a stage that need at most `limit` bytes, with its batches and so its result unchanged.

    Fastest first: more prompts decoded together; no checkpointing before checkpointing (a quarter fewer operations);
    then larger micro-batches. Where nothing fits, NF4 and a paged 8-bit optimizer are tried too; the result changes.
    """
    device = loaded.recipe.hardware.device
    compressed = {"model.quantization": "nf4", f"{stage}.optim": "paged_adamw_8bit"}
    for start in ({}, compressed) if loaded.recipe.model.quantization == "none" else ({},):
        chosen: dict[str, Any] = dict(start)
        for phases, choices in _axes(loaded, stage):
            fitting = None
            for choice in choices:
                found = predict(with_changes(loaded, chosen | choice), stage)
                if all(reserved(found[phase], device) <= limit for phase in phases if phase in found):
                    fitting = choice
                    break
            if fitting is None:
                break
            chosen |= fitting
        else:
            return Fit(chosen, predict(with_changes(loaded, chosen), stage))
    return None


def _axes(loaded: Loaded, stage: str) -> list[tuple[tuple[str, ...], list[dict[str, Any]]]]:
    """Settings that can be chosen apart from each other: the phases that they decide, and choices, fastest first."""
    recipe = loaded.recipe
    learning = [
        {f"{stage}.gradient_checkpointing": checkpointing, **_micro_batch(loaded, stage, micro)}
        for checkpointing in (False, True)
        for micro in _divisors(_global_batch(loaded, stage))
    ]
    if stage == "ppo":
        decoding = [{"ppo.rollout_batch_size": n} for n in _divisors(recipe.ppo.batch_size)]
        return [(("rollout", "evaluate"), decoding), (("score", "update"), learning)]
    if stage == "rm":
        return [(("train", "evaluate"), learning)]
    smallest = _micro_batch(loaded, stage, 1)  # held-out rows go through in micro-batches too
    decoding = [{"evaluate.batch_size": n, **smallest} for n in _divisors(recipe.evaluate.batch_size)]
    return [(("evaluate",), decoding), (("train", "evaluate"), learning)]


def _global_batch(loaded: Loaded, stage: str) -> int:
    options = getattr(loaded.recipe, stage)
    if stage == "ppo":
        return options.batch_size // options.num_mini_batches
    return options.per_device_train_batch_size * options.gradient_accumulation_steps


def _micro_batch(loaded: Loaded, stage: str, micro: int) -> dict[str, Any]:
    if stage == "ppo":
        return {"ppo.per_device_train_batch_size": micro}
    return {
        f"{stage}.per_device_train_batch_size": micro,
        f"{stage}.gradient_accumulation_steps": _global_batch(loaded, stage) // micro,
    }


def _halved(loaded: Loaded, stage: str) -> dict[str, Any]:
    options = getattr(loaded.recipe, stage)
    keys = ("max_prompt_length", "response_length" if stage == "ppo" else "max_length")
    return {f"{stage}.{key}": max(2, getattr(options, key) // 2) for key in keys}


def _divisors(n: int) -> list[int]:
    return [d for d in range(n, 0, -1) if n % d == 0]
