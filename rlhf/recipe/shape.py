"""Comparison of a recipe with the config.json of the model that `model.name` names: its shape, and its context."""

import json
import shlex
from pathlib import Path

from rlhf.errors import UserError
from rlhf.files import JsonObject, read_json
from rlhf.recipe.context import context_length, too_long
from rlhf.recipe.pinned import PinnedRecipe
from rlhf.recipe.schema import Recipe
from rlhf.recipe.schema_model import Model


def check(loaded: PinnedRecipe) -> str | None:
    """Compare a recipe with the model's config.json, from its folder or the hub's cache on this machine.

    Keys that the config.json lacks do not count, nor do nested ones, which files of older versions write in another
    way: the loaded model is compared again. Returns a warning if `--set model.name` names another model whose shape is
    not known here. Raises UserError if the shape differs from model.architecture, with the keys to set, and for
    sequences beyond the model's context.
    """
    check_context(loaded.recipe)
    model = loaded.recipe.model
    if model.architecture is None or model.source not in ("hub", "local"):
        return None
    config = _config(model)
    if config is None:
        if "model.name" in loaded.overrides and not any(key.startswith("model.arch") for key in loaded.overrides):
            return (
                f"model.architecture, for which memory is predicted, is still that of the recipe's own model: "
                f"{model.name} is not on this machine: `rlhf fetch` it first, or set model.architecture.* too"
            )
        return None
    differing = {
        key: config[key]
        for key, value in model.architecture.config_keys().items()
        if key in config and config[key] != value and not isinstance(value, dict | list)
    }
    if "model_type" in differing:
        raise UserError(f"{model.name} is a {differing['model_type']} model: {way_out()}")
    if differing:
        settings = (f"model.architecture.{key}={json.dumps(value)}" for key, value in differing.items())
        changes = " ".join(f"--set {shlex.quote(setting)}" for setting in settings)  # the file may be hostile
        raise UserError(f"{model.name} has another shape than model.architecture: add {changes}")
    return None


def check_context(recipe: Recipe) -> None:
    """Raise UserError where a stage admits sequences beyond the context of the model, if its config.json is here."""
    model = recipe.model
    config = _config(model) if model.source in ("hub", "local") else None
    if config and (problem := too_long(recipe.lengths(), context_length(config))):
        raise UserError(f"{problem} ({model.name}/config.json)")


def way_out() -> str:
    """Return advice for a model of another type than model.architecture has."""
    return (
        "make a recipe for it with `rlhf new`, or train it without a prediction of memory: "
        "`--set model.architecture=null` (docs/own-model.md)"
    )


def _config(model: Model) -> JsonObject | None:
    """Return the model's config.json; None if it is not on this machine or cannot be read."""
    assert model.name
    if model.source == "local":
        return read_json(Path(model.name, "config.json"))
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(model.name, "config.json", revision=model.revision)
    return read_json(Path(file)) if isinstance(file, str) else None
