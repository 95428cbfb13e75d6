"""The weights of a decoder's layers by recipe: shapes, numbers, and bytes in the form in which they are read."""

from peakmem import cards
from rlhf.plan.hardware import gpu_of
from rlhf.plan.phases import PredictionError
from rlhf.recipe import Recipe, StageName
from rlhf.recipe.model_types import LLAMA_LAYERS
from rlhf.recipe.schema_model import Architecture
from rlhf.recipe.stages import REWARD_MODELS

NUMBER_BYTES = {"float32": 4, "bfloat16": 2}  # by the recipe's model.dtype
# Bytes of a weight in NF4: 4 bits, for each 64 weights a scale of 8 bits, for each 256 scales one of 32 bits.
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)


def shape_of(recipe: Recipe) -> Architecture:
    """Return the architecture. Raises PredictionError for a recipe without one."""
    if recipe.model.architecture is None:
        raise PredictionError(
            "memory is predicted from model.architecture, which this recipe does not have; its stages run without a "
            "prediction (docs/own-model.md)"
        )
    return recipe.model.architecture


def linear_layers(recipe: Recipe) -> dict[str, tuple[int, int]]:
    """Return the linear layers of one decoder layer: (in, out). Raises PredictionError for a type with other layers."""
    shape = shape_of(recipe)
    if shape.model_type not in LLAMA_LAYERS:
        raise PredictionError(f"the linear layers of {shape.model_type} models are not known")
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, cached = shape.head_width * shape.num_attention_heads, shape.head_width * shape.num_key_value_heads
    return {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, cached),
        "v_proj": (hidden, cached),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }


def layers_bytes(recipe: Recipe) -> int:
    """Return the bytes of the frozen layers' linear weights, in 4 bits with their scales; norms are left out."""
    layer = sum(inputs * outputs for inputs, outputs in linear_layers(recipe).values())
    number = NF4_BYTES if recipe.model.quantization == "nf4" else NUMBER_BYTES[recipe.model.dtype]
    return round(layer * shape_of(recipe).num_hidden_layers * number)


def base_bytes(recipe: Recipe, stage: StageName) -> int:
    """Return the bytes of a stage's linear and embedding weights, with the scales of 4-bit ones; norms are left out.

    A reward model has no output layer. Raises PredictionError for a type of model whose layers are not known.
    """
    shape = shape_of(recipe)
    tables = 1 if shape.tie_word_embeddings or stage in REWARD_MODELS else 2
    numbers = tables * (shape.vocab_size or 0) * shape.hidden_size
    return layers_bytes(recipe) + numbers * NUMBER_BYTES[recipe.model.dtype]


def unpacked_bytes(recipe: Recipe, rows: int) -> int:
    """Return the bytes of 4-bit weights that bitsandbytes writes and reads unpacked, to multiply `rows` inputs once."""
    if recipe.model.quantization != "nf4" or shape_of(recipe).model_type not in LLAMA_LAYERS:
        return 0
    from rlhf.process.libraries import import_bitsandbytes

    import_bitsandbytes()
    import torch

    gpu = gpu_of(recipe.hardware.name)
    sizes = [
        inputs * outputs
        for inputs, outputs in linear_layers(recipe).values()
        if cards.unpacks_4bit(gpu, torch.bfloat16, rows, outputs, inputs)
    ]
    return 2 * NUMBER_BYTES[recipe.model.dtype] * shape_of(recipe).num_hidden_layers * sum(sizes)
