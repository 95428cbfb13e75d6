"""What a new recipe says: the sections of the nearest recipes, with another model, other rows, lengths and rates."""

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.data.source import read_tasks
from rlhf.errors import OptionError, no_such
from rlhf.files import JsonObject
from rlhf.new.learning_rates import adapter_rate
from rlhf.new.model import ModelFacts, ModelFiles
from rlhf.new.options import NewOptions
from rlhf.packages import package_version
from rlhf.recipe import TrainingName
from rlhf.recipe.context import context_length
from rlhf.recipe.folders import available, default_root
from rlhf.recipe.model_types import LEAN_TYPES
from rlhf.recipe.pinned import spread
from rlhf.recipe.plain_yaml import read_yaml
from rlhf.recipe.schema_data import ReasoningGym
from rlhf.recipe.schema_online import MODEL_REWARD
from rlhf.recipe.stages import ONLINE, PPO
from rlhf.recipe.strict import with_overrides

BATCH = 16  # rows of an optimizer's step of the stages that learn from rows
TOKENS, CPU_TOKENS = 1024, 256  # of a sequence, unless --max-length or shorter rows say otherwise
TASK_ROWS = 1_000  # questions of a task: seconds for most generators
DATA_SETS: dict[str, JsonObject] = {
    "hh": {"name": "Anthropic/hh-rlhf", "revision": "09be8c5bbc57cb3887f3a9732ad6aa7ec602a1fa", "format": "hh"},
    "ultrafeedback": {
        "name": "HuggingFaceH4/ultrafeedback_binarized",
        "revision": "3949bf5f8c17c394422ccfab0c31ea9c20bdeb85",
        "split": "train_prefs",
        "format": "preference",
    },
}


def initial(options: NewOptions, model: ModelFiles, facts: ModelFacts) -> JsonObject:
    """Return the content of recipe.yaml, before its rows are counted. Raises OptionError."""
    chat = facts.tokenizer_settings["template"] == "chat"
    width = int(facts.architecture["hidden_size"])
    recipes = [*_nearest(options, width)]
    content: JsonObject = {
        "status": "draft",
        "default": False,
        "description": f"{Path(model.name).name}: {', '.join(options.trained)}, for {options.card.name}",
        "seed": 0,
        "hardware": _hardware(options, facts),
        "model": _model(options, model, facts),
        "tokenizer": {**_origin(model), **facts.tokenizer_settings},
        "data": data_section(options, chat),
        "lora": recipes[0]["lora"],
    }
    content |= {stage: _stage(options, stage, recipes, width, chat) for stage in options.trained}
    like = [recipe for recipe in recipes if recipe.get(options.trained[-1])]
    content |= {"evaluate": _section(like, "evaluate"), "merge": {"stage": options.stages[-1]}}
    usual = CPU_TOKENS if options.card.is_cpu else TOKENS
    return with_lengths(content, min(usual, context_length(facts.architecture) or usual) // 2, None)


def _nearest(options: NewOptions, width: int) -> Iterator[JsonObject]:
    """Yield the recipes for the same kind of device, those of a model and a card of nearly this size first."""

    def distance(content: Any) -> float:
        architecture, memory = content["model"].get("architecture"), content["hardware"].get("memory_gb")
        of_width = abs(math.log2(architecture["hidden_size"] / width)) if architecture else math.inf
        return of_width + (abs(math.log2(memory / options.card.memory_gb)) if memory else 0.0)

    folders = [folder / "recipe.yaml" for folder in available(default_root())]
    contents: list[Any] = [spread(read_yaml(file), file) for file in folders]
    device = "cpu" if options.card.is_cpu else "cuda"
    yield from sorted((each for each in contents if each["hardware"]["device"] == device), key=distance)


def _section(recipes: list[JsonObject], name: str) -> dict[str, Any]:
    """Return the section of the nearest recipe that has it."""
    found = next((recipe[name] for recipe in recipes if recipe.get(name)), None)
    if not isinstance(found, dict):
        raise OptionError(f"--stages {name}: no recipe for such a device has this stage to copy")
    return found


def _hardware(options: NewOptions, facts: ModelFacts) -> JsonObject:
    card = options.card
    if not card.is_cpu:
        return {"name": card.name, "device": "cuda", "memory_gb": card.memory_gb}
    trunk = "lean" if facts.architecture["model_type"] in LEAN_TYPES else "library"
    return {"name": card.name, "device": "cpu", "threads": card.threads, "trunk": trunk}


def _origin(model: ModelFiles) -> JsonObject:
    """Return the keys that say where a model and its tokenizer are from."""
    return {"source": model.source, "name": model.name, **({"revision": model.revision} if model.revision else {})}


def _model(options: NewOptions, model: ModelFiles, facts: ModelFacts) -> JsonObject:
    dtype = "float32" if options.card.is_cpu else "bfloat16"
    shape = {"architecture": facts.architecture} if facts.predicted else {}
    return {**_origin(model), "dtype": dtype, **shape}


def data_section(options: NewOptions, chat: bool) -> JsonObject:
    """Return the section `data`. Raises OptionError for a file that is not there, and for --task with --data."""
    heldout: JsonObject = {"on_bad_row": "stop", "heldout_fraction": 0.1}
    if options.task and options.data:
        raise OptionError("--task makes the data itself: give --task or --data, not both")
    if options.task:
        return heldout | {"source": "reasoning_gym", "reasoning_gym": _task(options.task), "heldout_fraction": 0.2}
    names = options.data or ("ultrafeedback" if chat else "hh",)
    if names[0] in DATA_SETS and not names[1:]:
        return {"source": "hub", **DATA_SETS[names[0]], "on_bad_row": "skip", "heldout_fraction": 0.05}
    if missing := next((name for name in names if not Path(name).exists()), None):
        raise OptionError(no_such("file", f"--data {missing}", f"{' or '.join(DATA_SETS)} names a set of the hub"))
    own = heldout | {"source": "files", "files": [str(Path(name).resolve()) for name in names]}
    section = with_overrides({"data": own}, dict(options.changes))["data"]
    assert isinstance(section, dict)
    return section


def _task(task: str) -> JsonObject:
    """Return the keys of a task of reasoning-gym, with as many questions as it has, at most TASK_ROWS."""
    keys: JsonObject = {"version": package_version("reasoning-gym") or "0", "task": task, "size": TASK_ROWS}
    with tempfile.TemporaryDirectory(prefix="rlhf-task-") as folder:
        made = read_tasks(ReasoningGym.model_validate(keys), 0, Path(folder), complete=False)
    return keys | {"size": len(made.rows)}


def _stage(
    options: NewOptions, stage: TrainingName, recipes: list[JsonObject], width: int, chat: bool
) -> dict[str, Any]:
    """Return the section of a stage that trains: the nearest one, with a rate and a micro-batch by the width."""
    rate = adapter_rate(stage, width, chat)
    section = dict(_section(recipes, stage))
    section = {key: value for key, value in section.items() if key not in ("max_steps", "max_samples", "every")}
    section |= {"learning_rate": rate, "optim": "adamw_torch_fused", "gradient_checkpointing": False}
    rows = BATCH if width <= 1024 else BATCH // 2 if width <= 2048 else BATCH // 4
    if stage not in ONLINE:
        steps = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": BATCH // rows}
        return section | steps | {"num_train_epochs": 1} | every(section, 50)
    rows = min(rows, section["batch_size"] // section["num_mini_batches"])
    section |= {"per_device_train_batch_size": rows, "rollout_batch_size": section["batch_size"]}
    section |= {"value_learning_rate": rate} if stage == PPO else {}
    section.pop("reward_funcs", None)
    section |= {"reward_funcs": [*options.rewards]} if options.rewards else {}
    if options.rewards and MODEL_REWARD not in options.rewards:
        section["normalize_scores"] = False
    return section | every(section, section["steps"])


def every(section: dict[str, Any], steps: int) -> JsonObject:
    """Return the keys about logs, checkpoints and evaluations: ten of these in so many steps, and every step logged."""
    between = max(1, steps // 10)
    return {"logging_steps": 1, "save_steps": between, "eval_steps": between}


def with_lengths(content: JsonObject, prompt: int, response: int | None) -> JsonObject:
    """Return the content with so many tokens of a prompt, and of a response (None: as many)."""
    response = response or prompt
    changed: JsonObject = {}
    for name, section in content.items():
        if isinstance(section, dict) and name in ("sft", "rm", "dpo", "kto", "evaluate", *ONLINE):
            lengths: JsonObject = {"max_prompt_length": prompt}
            if name in ("rloo", "grpo"):
                lengths["max_completion_length"] = response
            else:
                lengths |= (
                    {"response_length": response} if name in ("ppo", "evaluate") else {"max_length": prompt + response}
                )
            section = {key: v for key, v in section.items() if key != "max_completion_length"} | lengths
        changed[name] = section
    return changed
