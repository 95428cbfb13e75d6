"""Which stages a stage builds on, and the settings on which its result depends."""

from collections.abc import Collection

from rlhf.files import JsonObject
from rlhf.recipe.published import CHAIN, Figure, is_cost
from rlhf.recipe.schema import Recipe
from rlhf.recipe.schema_online import OnlineOptions
from rlhf.recipe.stages import (
    EVALUATE,
    MERGE,
    ONLINE,
    POLICIES,
    PRETRAIN,
    REWARD_MODELS,
    SFT,
    STAGE_TABLE,
    STAGES,
    StageName,
)


def parents(recipe: Recipe, stage: StageName) -> list[StageName]:
    """Return the stages that must be finished before `stage`, in order."""
    needed = {*STAGE_TABLE[stage].parents}
    if stage == MERGE and recipe.merge is not None:
        needed.add(recipe.merge.stage)
    section = recipe.section(stage)
    if isinstance(section, OnlineOptions) and not section.model_scores:
        needed -= {*REWARD_MODELS}
    needed |= {name for parent in needed for name in parents(recipe, parent)}
    return [name for name in STAGES if name in needed and recipe.section(name) is not None]


def deciding_settings(recipe: Recipe, stage: StageName) -> JsonObject:
    """Return the part of a recipe that decides what `stage` and its parents produce.

    A run continues, or builds on another, only if these settings agree.
    """
    sections = {"hardware", "seed", "model", "tokenizer", "data", stage, *parents(recipe, stage)}
    sections |= {*STAGE_TABLE[stage].also_decided_by}
    if stage != PRETRAIN:
        sections.add("lora")
    relevant = {key: value for key, value in recipe.model_dump(mode="json").items() if key in sections}
    if EVALUATE in relevant and stage != EVALUATE:
        relevant[EVALUATE].pop("num_samples")  # a training stage samples one answer
    for key in ("count", "engine", "trunk", "joined_rows"):
        relevant["hardware"].pop(key)  # affects only rounding: a run may continue with another
    for name in (name for name in ONLINE if relevant.get(name)):
        relevant[name]["vllm_url"] = relevant[name]["vllm_url"] is not None  # the server's address decides nothing
        relevant[name].pop("reward_timeout", None)  # patience: no result depends on it
    return relevant


def changed_settings(made: object, recipe: Recipe, stage: StageName) -> dict[str, tuple[object, object]]:
    """Return the deciding settings in which a stage was made with other values than the recipe's, as `differences`.

    `made` are such settings, of a manifest. The memory of the card, which reports read there, does not count, nor does
    a key of a section that had no such key yet when the stage was made.
    """
    changed = differences(made, deciding_settings(recipe, stage))
    return {key: ends for key, ends in changed.items() if key != "hardware.memory_gb" and not _is_newer(made, key)}


def _is_newer(made: object, key: str) -> bool:
    """Return whether settings have the section of a dotted key, and not the key."""
    *sections, name = key.split(".")
    for section in sections:
        made = made.get(section) if isinstance(made, dict) else None
    return bool(sections) and isinstance(made, dict) and name not in made


def comparable(figure: Figure, recipe: Recipe, overrides: Collection[str]) -> bool:
    """Return whether a run of `recipe` with changes of the keys `overrides` can be compared with a figure of it.

    Data, model or settings that the figure depends on must be the recipe's own. With random weights costs are compared.
    """
    if recipe.model.source == "random":
        return is_cost(figure.metric)
    stages = CHAIN if figure.stage == "all" else (figure.stage,)
    if figure.stage == EVALUATE:
        stages += POLICIES
    sections = {section for stage in stages for section in deciding_settings(recipe, stage)} - {"hardware", "seed"}
    if stages != (PRETRAIN,):
        sections.add(SFT)  # without it policies start elsewhere
    return sections.isdisjoint(key.partition(".")[0] for key in overrides)


def differences(a: object, b: object, prefix: str = "") -> dict[str, tuple[object, object]]:
    """Return the dotted keys in which two nested dictionaries differ, with both values; None where a key is absent."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return {} if a == b else {prefix.rstrip("."): (a, b)}
    found: dict[str, tuple[object, object]] = {}
    for key in sorted({*a, *b}):
        found |= differences(a.get(key), b.get(key), f"{prefix}{key}.")
    return found
