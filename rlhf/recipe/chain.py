"""Which stages a stage builds on, and the settings on which its result depends."""

from collections.abc import Collection

from rlhf.files import JsonObject
from rlhf.recipe import published, totals
from rlhf.recipe.names import ONLINE, POLICIES, STAGES, StageName
from rlhf.recipe.published import Figure
from rlhf.recipe.schema import Recipe
from rlhf.recipe.schema_online import GroupOptions

_PARENTS: dict[StageName, tuple[StageName, ...]] = {
    "pretrain": (),
    "sft": ("pretrain",),
    "rm": ("pretrain", "sft"),
    **dict.fromkeys(ONLINE, ("pretrain", "sft", "rm")),  # without the reward model where it scores nothing
    "dpo": ("pretrain", "sft"),
    "evaluate": ("pretrain", "sft", "rm"),  # a recipe may lack rm; and every trained policy that exists
    "merge": ("pretrain", "sft"),  # and the stage whose adapter is merged
}


def parents(recipe: Recipe, stage: StageName) -> list[StageName]:
    """Return the stages that must be finished before `stage`, in order."""
    needed = {*_PARENTS[stage]}
    if stage == "merge" and recipe.merge is not None:
        needed |= {recipe.merge.stage, *parents(recipe, recipe.merge.stage)}
    section = recipe.section(stage)
    if isinstance(section, GroupOptions) and not section.model_scores:
        needed.discard("rm")
    return [name for name in STAGES if name in needed and recipe.section(name) is not None]


def stages_before(recipe: Recipe, stage: StageName) -> list[StageName]:
    """Return the stages to run before `stage`, in order.

    These are its parents; before an evaluation also one policy: PPO's, or the first that the recipe has.
    """
    policies = recipe.policies() if stage == "evaluate" else []
    return [*parents(recipe, stage), *policies[:1]]


def deciding_settings(recipe: Recipe, stage: StageName) -> JsonObject:
    """Return the part of a recipe that decides what `stage` and its parents produce.

    A run continues, or builds on another, only if these settings agree.
    """
    sections = {"hardware", "seed", "model", "tokenizer", "data", stage, *parents(recipe, stage)}
    if stage != "pretrain":
        sections.add("lora")
    if stage == "dpo":
        sections.add("evaluate")  # DPO measures its gains with these keys
    relevant = {key: value for key, value in recipe.model_dump(mode="json").items() if key in sections}
    if "evaluate" in relevant and (stage == "dpo" or recipe.evaluate.num_samples == 1):
        relevant["evaluate"].pop("num_samples")  # DPO always samples one answer; older runs did too and lack this key
    for key in ("count", "engine", "deterministic", "trunk"):
        relevant["hardware"].pop(key)  # affects only rounding: a run may continue with another
    if relevant.get("lora", {}).get("layers") == "all":
        relevant["lora"].pop("layers")  # runs from before this key lack it
    for name in (name for name in ONLINE if relevant.get(name)):
        relevant[name]["vllm_url"] = relevant[name]["vllm_url"] is not None  # the server's address decides nothing
        for key in ("reward_timeout", "reward_retries"):  # a run may continue with more patience
            relevant[name].pop(key, None)
    return relevant


def changed_settings(made: object, recipe: Recipe, stage: StageName) -> list[str]:
    """Return the dotted keys of the deciding settings in which a stage was made with other values than the recipe's.

    `made` are such settings, of a manifest. The memory of the card, which reports read there, does not count.
    """
    return [key for key in differences(made, deciding_settings(recipe, stage)) if key != "hardware.memory_gb"]


def comparable(figure: Figure, recipe: Recipe, overrides: Collection[str]) -> bool:
    """Return whether a run of `recipe` with changes of the keys `overrides` can be compared with a figure of it.

    Data, model or settings that the figure depends on must be the recipe's own. With random weights costs are compared.
    """
    if recipe.model.source == "random":
        return published.is_cost(figure.metric)
    stages = totals.CHAIN if figure.stage == "all" else (figure.stage,)
    if figure.stage == "evaluate":
        stages += POLICIES
    sections = {section for stage in stages for section in deciding_settings(recipe, stage)} - {"hardware", "seed"}
    return sections.isdisjoint(key.partition(".")[0] for key in overrides)


def differences(a: object, b: object, prefix: str = "") -> list[str]:
    """Return the dotted names of the keys in which two nested dictionaries differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [d for key in sorted({*a, *b}) for d in differences(a.get(key), b.get(key), f"{prefix}{key}.")]
    return [] if a == b else [prefix.rstrip(".")]
