"""Tiny models of every type that is tested: their architectures, and checkpoints with a tokenizer beside them."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

from rlhf import recipe
from rlhf.data import tokenize
from rlhf.models.architecture import architecture_of, config_of
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.schema_model import Architecture
from tests.helpers import RECIPE, SMALL, small, toy_pairs

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
# What sets a type apart from a plain Llama, at a size at which it shows: windows shorter than a dialogue, heads that
# are wider than their share, experts, multipliers, biases.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "mistral": {"sliding_window": 16, "head_dim": 16},
    "ministral": {"head_dim": 8, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16, "rope_parameters": YARN_ROPE},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "smollm3": {"tie_word_embeddings": True, "no_rope_layers": [1, 1, 1, 0]},
    "olmo2": {},
    "olmo3": {"sliding_window": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "granite": {
        "logits_scaling": 4.0,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "tie_word_embeddings": True,
    },
}
# Types that transformers' own `generate` samples: keys of their configurations beside OWN_SIZES.
OWN_SIZES: dict[str, Any] = {key: value for key, value in SIZES.items() if key != "tie_word_embeddings"}
WINDOWS = ["sliding_attention", "full_attention"] * 2
MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
OTHER_KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 16,
        "sliding_window": 16,
        "layer_types": WINDOWS,
        "hidden_size_per_layer_input": 8,
        "final_logit_softcapping": 5.0,
    },
    "gemma2": {"head_dim": 16, "sliding_window": 16, "final_logit_softcapping": 5.0},
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": WINDOWS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 64, "block_auto_adjust_ff_dim": False},
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "logits_scaling": 4.0,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*-M",
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
    },
    "qwen3_next": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "cohere2": {"sliding_window": 16, "layer_types": WINDOWS, "logit_scale": 0.25},
    "glm4": {"head_dim": 8},
    "exaone4": {"sliding_window": 16, "layer_types": WINDOWS},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "falcon_h1": {**MAMBA, "head_dim": 8, "mamba_d_ssm": 64},
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "gpt_neox": {"use_parallel_residual": True},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
}
# Checkpoints that read images too: the type of their language model, and keys of the tower beside it.
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": (
        "qwen3_5_text",
        {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32},
    ),
    "gemma4": (
        "gemma4_text",
        {
            "model_type": "gemma4_vision",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "global_head_dim": 8,
        },
    ),
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def architecture(kind: str, **changes: Any) -> dict[str, Any]:
    """Return the section `model.architecture` of a tiny model."""
    return {"model_type": kind, **SIZES, **KINDS[kind], **changes}


def model(kind: str, vocabulary: int, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a tiny model with random weights that are large enough to tell tokens apart."""
    ends: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3}
    config: Any
    if kind in OTHER_KINDS:
        ends["initializer_range"] = 0.2
        config = AutoConfig.for_model(kind, **OWN_SIZES | OTHER_KINDS[kind] | ends | changes, vocab_size=vocabulary)
    else:
        config = config_of(Architecture.model_validate(architecture(kind, vocab_size=vocabulary, **changes)), **ends)
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(config)
    return made.to(dtype).eval()


def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Write a tokenizer with a chat template, and EOS as padding token as base models have it; return it."""
    raw = tokenize.train(["Which word is the opposite of full? A lemon is a kind of fruit."] * 20, 400)._tokenizer
    assert raw is not None
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|fim_pad|>"])
    special = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "additional_special_tokens": ["<|fim_pad|>"]}
    made = PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=TEMPLATE, **special)
    made.save_pretrained(folder)
    return made


def checkpoint(folder: Path, kind: str, **changes: Any) -> str:
    """Write a tiny checkpoint with random weights and its tokenizer; return the folder's name."""
    tokens = tokenizer(folder)
    text, tower = MULTIMODAL.get(kind, (kind, None))
    made = model(text, len(tokens) + 8, **changes)  # real ones have room too: tokenizers of some types add entries
    made.config.eos_token_id = tokens.eos_token_id
    made.config.pad_token_id = None
    if tower is None:
        made.save_pretrained(folder)
        return str(folder)
    whole: Any = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(kind, text_config=made.config.to_dict(), vision_config=tower)
    )
    whole.get_decoder().load_state_dict(made.get_decoder().state_dict())
    whole.lm_head.load_state_dict(made.lm_head.state_dict())
    whole.save_pretrained(folder)
    return str(folder)


def described(folder: str) -> dict[str, Any] | None:
    """Return the section `model.architecture` of a checkpoint; None where a recipe has none."""
    config = AutoConfig.from_pretrained(folder)
    return architecture_of(config) if config.model_type in KINDS else None


def recipe_for(folder: str, trained: Path, **changes: Any) -> PinnedRecipe:
    """Return the small recipe for a checkpoint and the pairs of the toy world, in files."""
    pairs = [str(toy_pairs(trained))]
    return recipe_of(folder, **{"data__source": "files", "data__files": pairs} | changes)


def recipe_of(folder: str, **changes: Any) -> PinnedRecipe:
    """Return the small recipe for a checkpoint, with its architecture and its own chat template."""
    options = {
        "pretrain": None,
        "model__architecture": described(folder),
        "model__source": "local",
        "model__name": folder,
        "tokenizer": {"source": "local", "name": folder, "template": "chat", "pad_token": "<|fim_pad|>"},
        "lora__target_modules": "all-linear",
        "ppo__steps": 2,
        "sft__max_steps": 4,
        "rm__max_steps": 4,
        "dpo__max_steps": 4,
    }
    replaced = ("tokenizer.", "model.architecture.", "pretrain.")
    kept = {key: value for key, value in SMALL.items() if not key.startswith(replaced)}
    return recipe.load(RECIPE, kept | {key.replace("__", "."): value for key, value in (options | changes).items()})


def pretrained(trained: Path, folder: Path, **changes) -> PinnedRecipe:
    """The small recipe without pretraining: base and tokenizer from a folder, data from files."""
    base = str(trained / "cpu-tiny/v1/pretrain/model")
    data = [str(toy_pairs(trained))]
    return small(
        **{
            "pretrain": None,
            "model__architecture": None,
            "model__source": "local",
            "model__name": base,
            "tokenizer__source": "local",
            "tokenizer__name": base,
            "tokenizer__vocab_size": None,
            "data__source": "files",
            "data__files": data,
        }
        | changes
    )
