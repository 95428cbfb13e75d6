"""Whether `model.architecture` is the shape of the model that `model.name` names, by the model's config.json alone."""

import json
import shlex
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.recipe import Architecture, Loaded, Model

PREDICTABLE = ("llama", "mistral")  # values of model_type that model.architecture can describe


def differences(architecture: Architecture, config: dict[str, Any]) -> dict[str, Any]:
    """Keys of `architecture` for which a config.json has another value, with that value; absent keys do not count."""
    wanted = architecture.model_dump()
    if architecture.model_type == "llama":
        wanted.pop("sliding_window")  # Llama has none
    if wanted["vocab_size"] is None:
        wanted.pop("vocab_size")
    return {key: config[key] for key, value in wanted.items() if key in config and config[key] != value}


def check(loaded: Loaded) -> str | None:
    """Compare model.architecture with the model's config.json, from its folder or the hub's cache on this machine.

    Returns a warning where `--set model.name` names another model whose shape is not known here. Raises UserError where
    the shape is another one, with the keys to set.
    """
    model = loaded.recipe.model
    if model.architecture is None or model.source not in ("hub", "local"):
        return None
    config = _config(model)
    if config is not None:
        other = differences(model.architecture, config)
        if other.get("model_type", "llama") not in PREDICTABLE:
            raise UserError(f"{model.name} is a {other['model_type']} model: {way_without_architecture()}")
        if other:
            settings = (f"model.architecture.{key}={json.dumps(value)}" for key, value in other.items())
            changes = " ".join(f"--set {shlex.quote(setting)}" for setting in settings)  # the folder may be anyone's
            raise UserError(f"{model.name} has another shape than model.architecture: add {changes}")
        return None
    if "model.name" in loaded.overrides and not any(key.startswith("model.architecture") for key in loaded.overrides):
        return (
            f"model.architecture is still the shape of the recipe's own model, and what follows is predicted for it, "
            f"not for {model.name}, whose config.json is not on this machine: set model.architecture.* too, or "
            "download the model first (`rlhf fetch`)"
        )
    return None


def way_without_architecture() -> str:
    """What to do with a model that model.architecture cannot describe."""
    return (
        f"memory is predicted for {' and '.join(PREDICTABLE)} alone; `--set model.architecture=null` trains it without "
        "a prediction (docs/own-model.md)"
    )


def _config(model: Model) -> dict[str, Any] | None:
    """The content of the model's config.json, None where it is not on this machine or cannot be read."""
    assert model.name
    if model.source == "local":
        file: Any = Path(model.name, "config.json")
    else:
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(model.name, "config.json", revision=model.revision)
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8")) if isinstance(file, str | Path) else None
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
