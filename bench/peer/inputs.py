"""What the comparison reads: a made-up model with rows of one length, and files for peers that cannot read a recipe."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar
from typing_extensions import TypedDict

from rlhf import recipe as recipes
from rlhf.data.load import divide_rows
from rlhf.data.source import read_source
from rlhf.files import write_json
from rlhf.models.loading import load_base, load_tokenizer
from rlhf.process.torch_setup import device_of
from rlhf.recipe import Changes, PinnedRecipe, StageName
from rlhf.recipe.schema_online import Ppo
from rlhf.run.directory import StageRun

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
ROWS = 640
SETTINGS = "settings.json"  # in the folder of the files


class Asked(TypedDict):
    """What the script of a peer is told, as JSON in its first argument."""

    recipe: str  # folder
    overrides: Changes
    stage: StageName
    out: str  # folder of our run, which has the rows and the weights
    files: str  # folder of what `write_files` writes
    settings: dict[str, Any]  # of `Peer.settings`
    warm_up: int  # steps that do not count


class FileSettings(TypedDict):
    """What a peer of PPO reads in SETTINGS: it takes no setting from elsewhere."""

    device: str  # cpu or cuda
    threads: int | None  # of torch, on a CPU
    dtype: str  # of torch: float32 or bfloat16
    lora: dict[str, Any]  # peft's arguments for the recipe's adapters
    options: dict[str, Any]  # the section of the stage
    tokens: dict[str, int]  # ids of padding, begin and end


def make_model(folder: Path, size: str, loaded: PinnedRecipe) -> Changes:
    """Write a Llama with random weights, a tokenizer whose every word is one token, and rows; return where they are.

    A prompt has 47 to 79 tokens, a response 64.
    """
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(PEER_SIZES[size]["vocab_size"] - 4))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    base, pairs = folder / "base", folder / "pairs.jsonl"
    tokenizer.save_pretrained(base)
    disable_progress_bar()
    dtype = getattr(torch, loaded.recipe.model.dtype)
    sizes: dict[str, Any] = {**PEER_SIZES[size]}
    config = LlamaConfig(
        **sizes, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=2, dtype=dtype
    )
    torch.manual_seed(0)
    with torch.device(device_of(loaded.recipe)):
        torch.set_default_dtype(dtype)
        LlamaForCausalLM(config).save_pretrained(base)
        torch.set_default_dtype(torch.float32)
    draw = random.Random(0)

    def text(low: int, high: int) -> str:
        return " ".join(f"w{draw.randrange(len(words) - 4)}" for _ in range(draw.randint(low, high)))

    rows = [{"prompt": text(47, 79), "chosen": text(64, 64), "rejected": text(64, 64)} for _ in range(ROWS)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"model.name": str(base), "tokenizer.name": str(base), "data.files": [str(pairs)]}


def write_files(asked: Asked) -> None:
    """Write base, prompts as token ids and settings of PPO below `files`, from the run of ours below `out`."""
    loaded, folder = recipes.load(Path(asked["recipe"]), asked["overrides"]), Path(asked["files"])
    recipe, run = loaded.recipe, StageRun(Path(asked["out"]), loaded, asked["stage"])
    tokenizer, options = load_tokenizer(run.base), recipe.options(Ppo)
    corpus, _ = divide_rows(read_source(recipe, run.run_directory / "data"), recipe)
    prompts, _ = tokenizer.encode_prompts(corpus.prompts("ppo").train[: options.max_samples], options.max_prompt_length)
    load_base(run.base, torch.device("cpu"), quantize=False).save_pretrained(folder / "base")
    tokenizer.hf.save_pretrained(folder / "base")
    settings: FileSettings = {
        "device": device_of(recipe).type,
        "threads": recipe.hardware.threads,
        "dtype": recipe.model.dtype,
        "lora": recipe.lora.model_dump(include={"r", "lora_alpha", "lora_dropout", "target_modules"}),
        "options": options.model_dump(mode="json"),
        "tokens": {"pad": tokenizer.pad_id, "bos": tokenizer.hf.bos_token_id, "eos": tokenizer.eos_id},
    }
    (folder / "prompts.json").write_text(json.dumps(prompts))
    write_json(folder / SETTINGS, settings)


if __name__ == "__main__":
    write_files(json.loads(sys.argv[1]))
