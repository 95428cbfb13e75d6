"""What both sides of the comparison read: a model with random weights, a tokenizer, prompts."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar
from typing_extensions import TypedDict

from rlhf import recipe as recipes
from rlhf.files import write_json
from rlhf.recipe import TrainingName

PEER_SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
    },
    "7b": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}
PEER_RECIPE = Path(__file__).parent / "recipe" / "v1"
BATCH = 32  # responses of a step in RECIPE
GROUP = 8  # responses to a prompt in RECIPE, of RLOO and GRPO


SETTINGS = "settings.json"  # in the folder of the inputs


class InputSettings(TypedDict):
    """What the inputs were made for, as both sides read it: the scripts of the peers take no setting from elsewhere."""

    device: str  # cpu or cuda
    dtype: str  # of torch: float32 or bfloat16
    lora: dict[str, Any]  # peft's arguments for the recipe's adapters
    options: dict[str, Any]  # the section of the method in RECIPE


def settings_of(method: TrainingName, device: str) -> InputSettings:
    """Return the settings with which a method is compared on a device."""
    recipe = recipes.load(PEER_RECIPE).recipe
    return {
        "device": device,
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "lora": recipe.lora.model_dump(include={"r", "lora_alpha", "lora_dropout", "target_modules"}),
        "options": recipe.training_section(method).model_dump(mode="json"),
    }


def make_inputs(folder: Path, size: str, method: TrainingName, device: str, steps: int) -> None:
    """Write a Llama with random weights, a tokenizer whose every word is one token, and prompts as text and as ids."""
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(PEER_SIZES[size]["vocab_size"] - 4))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder / "base")
    disable_progress_bar()
    settings = settings_of(method, device)
    dtype = getattr(torch, settings["dtype"])
    sizes: dict[str, Any] = {**PEER_SIZES[size]}
    config = LlamaConfig(
        **sizes, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=2, dtype=dtype
    )
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(dtype)
        LlamaForCausalLM(config).save_pretrained(folder / "base")
        torch.set_default_dtype(torch.float32)
    draw = random.Random(0)

    def text(low: int, high: int) -> str:
        return " ".join(f"w{draw.randrange(len(words) - 4)}" for _ in range(draw.randint(low, high)))

    rows = [
        {"prompt": text(47, 79), "chosen": text(64, 64), "rejected": text(64, 64)}
        for _ in range(2 * BATCH * (steps + 1))
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [[1, *tokenizer(row["prompt"])["input_ids"]] for row in rows]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    write_json(folder / SETTINGS, settings)
