"""The weights of a decoder's layers by recipe: shapes, numbers, and bytes in the form in which they are read."""

import functools

from peakmem import cards
from rlhf.plan.phases import PredictionError
from rlhf.process.libraries import import_bitsandbytes
from rlhf.recipe import Recipe
from rlhf.recipe.model_types import LLAMA_LAYERS
from rlhf.recipe.schema_model import Architecture

NUMBER_BYTES = {"float32": 4, "bfloat16": 2}  # by the recipe's model.dtype
# Bytes of a weight in NF4: 4 bits, for each 64 weights a scale of 8 bits, for each 256 scales one of 32 bits.
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)
ADAPTER_BYTES = 4  # float32


def shape_of(recipe: Recipe) -> Architecture:
    """Return the architecture that every prediction needs."""
    assert recipe.model.architecture is not None  # without one nothing is predicted
    return recipe.model.architecture


def llama_layer(hidden: int, inner: int, queries: int, cached: int) -> dict[str, tuple[int, int]]:
    """Return the linear layers of one layer of a Llama: (in, out). Arguments are widths; `cached` is that of keys."""
    attention = {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, cached),
        "v_proj": (hidden, cached),
        "o_proj": (queries, hidden),
    }
    return attention | {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}


def linear_layers(recipe: Recipe) -> dict[str, tuple[int, int]]:
    """Return the linear layers of one decoder layer: (in, out). Raises PredictionError for a type with other layers."""
    shape = shape_of(recipe)
    if shape.model_type not in LLAMA_LAYERS:
        raise PredictionError(f"the linear layers of {shape.model_type} models are not known")
    queries, cached = shape.head_width * shape.num_attention_heads, shape.head_width * shape.num_key_value_heads
    return llama_layer(shape.hidden_size, shape.intermediate_size, queries, cached)


def layers_bytes(recipe: Recipe) -> int:
    """Return the bytes of the frozen layers' linear weights, in 4 bits with their scales; norms are left out."""
    layer = sum(inputs * outputs for inputs, outputs in linear_layers(recipe).values())
    number = NF4_BYTES if recipe.model.quantization == "nf4" else NUMBER_BYTES[recipe.model.dtype]
    return round(layer * shape_of(recipe).num_hidden_layers * number)


def adapter_parameters(recipe: Recipe) -> int:
    """Return the numbers of one LoRA adapter: r · (in + out) for each linear layer that has one."""
    linear, targets = linear_layers(recipe), recipe.lora.target_modules
    names = linear if targets == "all-linear" else [name.split(".")[-1] for name in targets]
    return recipe.lora.r * shape_of(recipe).num_hidden_layers * sum(sum(linear[name]) for name in names)


def bytes_of_product(inputs: int, outputs: int, rows: int, size: int, packed: bool, gpu: cards.Gpu) -> float:
    """Return the bytes of a weight for one product with `rows` inputs; `size` is that of a number of 16 or 32 bits.

    A packed weight is read packed; where bitsandbytes unpacks it, it is also written and read in full.
    """
    if not packed:
        return inputs * outputs * size
    return inputs * outputs * (NF4_BYTES + 2 * size * _unpacked(gpu, rows, outputs, inputs))


@functools.cache
def _unpacked(gpu: cards.Gpu, rows: int, outputs: int, inputs: int) -> bool:
    """Return whether bitsandbytes unpacks a weight for these rows. Its import waits until it is asked."""
    import_bitsandbytes()
    import torch

    return cards.unpacks_4bit(gpu, torch.bfloat16, rows, outputs, inputs)
