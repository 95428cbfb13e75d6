"""The changes with which a large recipe runs for a moment: random weights, few steps, or a dress rehearsal on a CPU.

In a dress rehearsal its chain takes a few real steps. Lengths and batches are cut, a small model stands for the
recipe's, and made rows for data of the hub. Every other key stays as the recipe has it: that is what a rehearsal tries.
"""

from collections.abc import Mapping
from itertools import product
from pathlib import Path

from rlhf.errors import UserError
from rlhf.files import JsonObject, json_lines
from rlhf.recipe.choices import LengthsShape
from rlhf.recipe.schema import Evaluate, Recipe, StageOptions
from rlhf.recipe.schema_model import Model, Tokenizer
from rlhf.recipe.schema_online import OnlineOptions
from rlhf.recipe.stages import EVALUATE, FEW_SAMPLES, PRETRAIN, TRAINING_STAGES
from rlhf.recipe.strict import Changes

STAND_IN = Path("cpu-smollm2-sums") / "v1"  # the recipe whose model and tokenizer stand for a card's
STEPS = 2  # of each stage that trains; a checkpoint and an evaluation follow each
PROMPT, RESPONSE = 64, 8  # tokens, at most
RESPONSES = 4  # of a step of PPO, RLOO or GRPO: two prompts with two responses each, or four with one
QUESTIONS = ("What is {} + {}?", "I have {} apples and get {} more. How many apples do I have now?")  # two lengths
LARGEST = 15  # number in a question; 225 rows
KEPT = ("dtype", "quantization", "attention", "template", "system_prompt", "chat_template_kwargs")  # beside a stand-in
AT_MOST = {  # of keys that a section has and sets
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "eval_steps": 1,
    "warmup_steps": 1,
    "max_eval_samples": 2,
    "num_samples": 2,
    "value_warmup_steps": STEPS - 1,
    "num_ppo_epochs": 2,
    "num_iterations": 2,
    "num_generations": 2,
    "score_batch_size": RESPONSES,
    "norm_responses": RESPONSES,
    "max_prompt_length": PROMPT,
    "max_length": PROMPT + RESPONSE,
    **dict.fromkeys(("response_length", "max_completion_length"), RESPONSE),
}


def random_weights_changes(recipe: Recipe, pairs: int, shape: LengthsShape) -> Changes:
    """Return the changes with which a recipe needs no download and no files.

    The model has its own architecture and random weights; tokenizer and dialogues are stand-ins. Memory and speed are
    those of the real ones; the results mean nothing. `shape` is as in `data.lengths`. Raises UserError for a recipe
    without `model.architecture`.
    """
    architecture = recipe.model.architecture
    if architecture is None:
        raise UserError("random weights need model.architecture, which this recipe does not have")
    vocabulary = architecture.vocab_size or recipe.tokenizer.vocab_size
    return {
        "model.source": "random",
        **{f"model.{key}": None for key in ("revision", "files", "sha256") if getattr(recipe.model, key)},
        "model.architecture.vocab_size": vocabulary,
        "tokenizer": {"source": "words", "vocab_size": vocabulary, "template": "hh"},
        PRETRAIN: None,
        "data.source": "lengths",
        **({"data.files": []} if recipe.data.files else {}),
        **{f"data.{key}": None for key in recipe.data.own_keys()},
        "data.lengths": {"pairs": pairs, "shape": shape},
    }


def few_steps_changes(
    recipe: Recipe, steps: int, supervised_steps: int | None = None, save_steps: int | None = None
) -> Changes:
    """Return the changes with which every stage that trains takes `steps` steps, logs each, and needs no server.

    A checkpoint and, in stages that sample, an evaluation follow every `save_steps` steps, None: the last step.
    `supervised_steps`: the steps of stages that do not sample, if others.
    """
    changes: Changes = {}
    for stage in recipe.online():
        changes |= {f"{stage}.steps": steps, f"{stage}.save_steps": save_steps or steps, f"{stage}.logging_steps": 1}
        changes |= {f"{stage}.eval_steps": save_steps or steps, f"{stage}.vllm_url": None}
    supervised = supervised_steps or steps
    for stage in recipe.dialogues():
        changes |= {f"{stage}.max_steps": supervised, f"{stage}.save_steps": save_steps or supervised}
        changes[f"{stage}.logging_steps"] = 1
    return changes


def small_model(recipe: Recipe) -> Changes:
    """Return the changes that put the model and the tokenizer of `recipe` in the place of another's."""
    changes: Changes = {}
    for section, kind, values in (("model", Model, recipe.model), ("tokenizer", Tokenizer, recipe.tokenizer)):
        own = values.model_dump(mode="json", exclude_none=True)
        changes |= {f"{section}.{key}": own.get(key) for key in kind.model_fields if key not in KEPT}
    return changes


def changes(recipe: Recipe, stand_in: Changes, rows: Path) -> Changes:
    """Return the changes of a rehearsal; `rows` is the file of made rows, for data that are on the hub or lengths only.

    Raises UserError for a recipe that is made for a CPU.
    """
    if recipe.hardware.device == "cpu":
        raise UserError("this recipe is made for a CPU: it needs no rehearsal; train with it: `rlhf run`")
    found: Changes = {
        "hardware.device": "cpu",
        "hardware.memory_gb": None,
        "hardware.count": 1,
        "hardware.engine": "ddp",
        "model.attention": "auto",
        **stand_in,
        PRETRAIN: None,
        **few_steps_changes(recipe, STEPS, save_steps=1),
    }
    if recipe.data.source in ("hub", "lengths"):
        found |= {f"data.{key}": None for key in recipe.data.own_keys()}
        found |= {"data.source": "files", "data.files": [str(rows)], "data.format": "auto"}
        found |= {"data.heldout_fraction": 0.5}
        found |= {"data.validation_fraction": 0.25} if recipe.data.validation_fraction else {}
    for stage, options in recipe.sections().items():
        if stage in (*TRAINING_STAGES, EVALUATE):
            found |= {f"{stage}.{key}": value for key, value in _short(options).items()}
    return found


def write_rows(recipe: Recipe, file: Path) -> None:
    """Write sums: with a right and a wrong answer, or with the right one alone where no stage learns from pairs."""
    pairs = not recipe.online() or any(options.model_scores for options in recipe.online().values())
    rows: list[JsonObject] = []
    for a, b in product(range(1, LARGEST + 1), repeat=2):
        prompt, right = QUESTIONS[(a + b) % 2].format(a, b), f"{a} + {b} = {a + b}"
        pair: JsonObject = {"chosen": right, "rejected": f"It is {a + b + 1}."}
        rows.append({"prompt": prompt, **(pair if pairs else {"completion": right, "answer": a + b})})
    file.write_text(json_lines(rows), encoding="utf-8")


def _short(options: StageOptions) -> JsonObject:
    """Return the keys of a section that a rehearsal cuts, with their new values.

    A minibatch has two micro-batches, and a batch two parts that are sampled one after the other.
    """
    set_keys: Mapping[str, object] = {key: getattr(options, key) for key in type(options).model_fields.keys() & AT_MOST}
    cut: JsonObject = {key: min(value, AT_MOST[key]) for key, value in set_keys.items() if isinstance(value, int)}
    if isinstance(options, Evaluate):
        return cut | {"batch_size": FEW_SAMPLES, "max_samples": 2}
    cut["max_samples"] = 64
    if not isinstance(options, OnlineOptions):
        return cut
    minibatches = min(2, options.num_mini_batches)
    return cut | {
        "batch_size": RESPONSES,
        "num_mini_batches": minibatches,
        "per_device_train_batch_size": RESPONSES // minibatches // 2,
        "rollout_batch_size": RESPONSES // 2,
    }
