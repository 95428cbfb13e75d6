"""The dress rehearsal of a card's recipe: the changes with which its chain takes a few real steps on a CPU.

Lengths and batches are cut, a small model stands for the recipe's, and made rows for data of the hub. Every other key
stays as the recipe has it: that is what a rehearsal tries.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rlhf.errors import UserError
from rlhf.files import JsonObject, json_lines
from rlhf.recipe import Changes, Recipe
from rlhf.recipe.choices import RowKind
from rlhf.recipe.schema import StageOptions
from rlhf.recipe.schema_evaluate import Evaluate
from rlhf.recipe.schema_model import Model, Tokenizer
from rlhf.recipe.schema_online import GroupOptions, OnlineOptions
from rlhf.recipe.small import few_steps_changes
from rlhf.recipe.stages import FEW_SAMPLES, PRETRAIN, TRAINING_STAGES

STAND_IN = Path("cpu-smollm2-sums") / "v1"  # the recipe whose model and tokenizer stand for a card's
STEPS = 2  # of each stage that trains; a checkpoint and an evaluation follow each
PROMPT, RESPONSE = 64, 8  # tokens, at most
RESPONSES = 4  # responses of a step of PPO, RLOO or GRPO
HELD_OUT = 2  # rows or prompts of an evaluation
MICRO_BATCH = 2  # rows
QUESTIONS = (  # of different lengths, so that rows are padded
    "What is {} + {}?",
    "I have {} apples and get {} more. How many apples do I have now?",
)
READ = 64  # rows to learn from, at most: more would only be tokenized
LARGEST = 15  # number in a question; 225 rows
KEPT = ("dtype", "quantization", "attention", "template", "system_prompt", "chat_template_kwargs")  # beside a stand-in


class Rehearsal(NamedTuple):
    """The changes of a recipe, and in words what they leave untried."""

    changes: Changes
    untried: list[str]


class StandIn(NamedTuple):
    """The model that stands for a recipe's: its name, and the changes that put it there."""

    name: str
    changes: Changes


def small_model(recipe: Recipe) -> StandIn:
    """Return the model and the tokenizer of `recipe` as a stand-in."""
    replaced = (("model", Model, recipe.model), ("tokenizer", Tokenizer, recipe.tokenizer))
    changes: Changes = {}
    for section, kind, values in replaced:
        own = values.model_dump(mode="json", exclude_none=True)
        changes |= {f"{section}.{key}": own.get(key) for key in kind.model_fields if key not in KEPT}
    return StandIn(recipe.model.origin, changes)


def checkpoint(name: str) -> StandIn:
    """Return the checkpoint of a recipe that `--weights` has changed as a stand-in; it has its own architecture."""
    return StandIn(name, {"model.architecture": None})


def of_recipe(recipe: Recipe, stand_in: StandIn, rows: Path) -> Rehearsal:
    """Return the rehearsal of a recipe; `rows` is the file in which `write_rows` puts rows for data of the hub.

    Raises UserError for a recipe that is made for a CPU.
    """
    if recipe.hardware.device == "cpu":
        raise UserError("this recipe is made for a CPU: it needs no rehearsal; train with it: `rlhf run`, `make ppo`")
    changes: Changes = {
        "hardware.device": "cpu",
        "hardware.memory_gb": None,
        "hardware.count": 1,
        "hardware.engine": "ddp",
        **stand_in.changes,
        PRETRAIN: None,
        "evaluate.bertscore_model": None,
    }
    if recipe.model.attention == "flash_attention_2":
        changes["model.attention"] = "sdpa"
    changes |= few_steps_changes(recipe, STEPS, save_steps=1)
    if needs_rows(recipe):
        changes |= _made_data(recipe, rows)
    for stage, options in recipe.sections().items():
        if isinstance(options, Evaluate) or stage in TRAINING_STAGES:
            changes |= {f"{stage}.{key}": value for key, value in _short(options).items()}
    return Rehearsal(changes, _untried(recipe, stand_in))


def needs_rows(recipe: Recipe) -> bool:
    """Return whether made rows stand for a recipe's data, which are on the hub or fit its own tokenizer only."""
    return recipe.data.source in ("hub", "lengths")


def _made_data(recipe: Recipe, rows: Path) -> Changes:
    """Return the changes that put made rows in the place of the data, of the kind that the recipe names."""
    changes: Changes = {f"data.{key}": None for key in recipe.data.own_keys()}
    changes |= {"data.source": "files", "data.files": [str(rows)], "data.heldout_fraction": 0.5, "data.drop": None}
    return changes | ({"data.validation_fraction": 0.25} if recipe.data.validation_fraction else {})


def write_rows(recipe: Recipe, file: Path) -> None:
    """Write rows of the kind that the recipe names: sums, with a right and a wrong answer where there are two."""
    kind: RowKind = "preference"
    if recipe.data.format != "auto":
        kind = recipe.data.format
    elif not any(options.model_scores for options in recipe.online().values()) and recipe.online():
        kind = "question"
    numbers = [(a, b) for a in range(1, LARGEST + 1) for b in range(1, LARGEST + 1)]
    file.write_text(json_lines(_row(kind, a, b) for a, b in numbers), encoding="utf-8")


def _row(kind: RowKind, a: int, b: int) -> JsonObject:
    """Return a question about two numbers as a row of a kind."""
    question, right, wrong = QUESTIONS[(a + b) % 2].format(a, b), f"{a} + {b} = {a + b}", f"It is {a + b + 1}."
    asked = {"role": "user", "content": question}
    rows: Mapping[RowKind, JsonObject] = {
        "text": {"text": f"{question} {right}"},
        "hh": {
            name: f"\n\nHuman: {question}\n\nAssistant: {answer}"
            for name, answer in (("chosen", right), ("rejected", wrong))
        },
        "preference": {
            "prompt": question,
            "chosen": [asked, {"role": "assistant", "content": right}],
            "rejected": [asked, {"role": "assistant", "content": wrong}],
        },
        "instruction": {"instruction": question, "output": right},
        "completion": {"prompt": question, "completion": right, "answer": a + b},
        "labelled": {"prompt": question, "completion": right if a % 2 else wrong, "label": a % 2 == 1},
        "question": {"question": question, "answer": f"{right}\n#### {a + b}"},
        "messages": {"messages": [asked, {"role": "assistant", "content": right}]},
        "prompt": {"prompt": question, "answer": a + b},
    }
    return rows[kind]


def _short(options: StageOptions) -> JsonObject:
    """Return the keys of a section that a rehearsal cuts, with their new values."""
    if isinstance(options, OnlineOptions):
        return _short_online(options)
    if isinstance(options, Evaluate):
        most = {"max_samples": HELD_OUT, "batch_size": FEW_SAMPLES, "num_samples": 2}
        return _at_most(options, most | {"max_prompt_length": PROMPT, "response_length": RESPONSE})
    most = {
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": 2,
        "max_samples": READ,
        "max_eval_samples": HELD_OUT,
        "max_prompt_length": PROMPT,
        "max_length": PROMPT + RESPONSE,
        "max_completion_length": RESPONSE,
        "eval_steps": 1,
    }
    return {"max_samples": READ} | _at_most(options, most)


def _short_online(options: OnlineOptions) -> JsonObject:
    """Return the same for PPO, RLOO or GRPO: two prompts with two responses each, or four with one.

    Where the recipe divides minibatches into micro-batches, or a batch into parts that are sampled one after the other,
    so does the rehearsal.
    """
    mini_batches = min(2, options.num_mini_batches)
    rows = RESPONSES // mini_batches
    is_divided = options.batch_size // options.num_mini_batches > options.per_device_train_batch_size
    section: JsonObject = {
        "batch_size": RESPONSES,
        "num_mini_batches": mini_batches,
        "per_device_train_batch_size": rows // 2 if is_divided else rows,
        "rollout_batch_size": RESPONSES // 2 if options.rollout_batch_size < options.batch_size else RESPONSES,
        "max_samples": READ,
    }
    length = "max_completion_length" if isinstance(options, GroupOptions) else "response_length"
    most = {
        options.passes_key: 2,
        "num_generations": 2,
        "score_batch_size": RESPONSES,
        "norm_responses": RESPONSES,
        "warmup_steps": 1,
        "value_warmup_steps": STEPS - 1,
        "resample_groups": 1,
        "max_samples": READ,
        "max_eval_samples": HELD_OUT,
        "max_prompt_length": PROMPT,
        length: RESPONSE,
        "overlong_buffer": RESPONSE,
    }
    return section | _at_most(options, most)


def _at_most(options: StageOptions, most: Mapping[str, int]) -> JsonObject:
    """Return the keys that a section has and sets, each with its value or the one here, whichever is smaller."""
    values = {key: getattr(options, key, None) for key in most}
    return {key: min(value, most[key]) for key, value in values.items() if value is not None}


def _untried(recipe: Recipe, stand_in: StandIn) -> list[str]:
    """Return in words what a rehearsal leaves untried."""
    model, hardware = recipe.model, recipe.hardware
    paged = sorted({o.optim for o in (*recipe.dialogues().values(), *recipe.online().values()) if "paged" in o.optim})
    lines: list[tuple[object, str]] = [
        (True, f"the model: {stand_in.name} stands for the recipe's, and so does its tokenizer"),
        (recipe.pretrain, "pretrain: the stand-in is trained already"),
        (needs_rows(recipe), "the data: made rows of the same kind stand for them"),
        (True, f"lengths and batches: {STEPS} steps a stage, rows of at most {PROMPT} + {RESPONSE} tokens"),
        (True, "memory and speed of the card, CUDA's kernels and captured graphs"),
        (paged, f"paging of the optimizer's states: {', '.join(paged)} keeps them in memory on a CPU"),
        (model.attention == "flash_attention_2", "flash attention: torch's own stands for it"),
        (hardware.count > 1, f"several processes: one stands for {hardware.count} ({hardware.engine})"),
        (any(o.vllm_url for o in recipe.online().values()), "the vLLM server: the stage samples by itself"),
        (recipe.evaluate.bertscore_model, "BERTScore"),
    ]
    return [line for applies, line in lines if applies]
