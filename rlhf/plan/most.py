"""More memory than a stage takes, from a recipe's sizes alone: what is far below a limit needs no rehearsal."""

from rlhf.plan.fit import base_bytes
from rlhf.plan.weights import ADAPTER_BYTES, adapter_parameters, shape_of
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.stages import STAGE_TABLE

# Numbers of four bytes that a token holds at most, by what they are as wide as.
HIDDEN, INNER, SCORES, LOGITS, RANK, CACHE = 32, 12, 4, 24, 32, 8
COPIES_OF_BASE, COPIES_OF_ADAPTER = 4, 32  # with roles, gradients, optimizer states and what loading or merging adds


def at_most_bytes(loaded: PinnedRecipe, stage: StageName) -> int:
    """Return bytes that the tensors of a stage are expected to stay below on a CPU.

    Micro-batches count with all that a backward pass needs, every other batch of the stage and of the evaluation with
    one layer, logits and a cache of keys and values; rows are as long as the longest that the recipe admits. Raises
    PredictionError without an architecture, and for layers that are not known.
    """
    recipe = loaded.recipe
    base = base_bytes(recipe, stage)
    shape, section = shape_of(recipe), recipe.section(stage)
    of_stage = {} if section is None else section.model_dump()
    batches = [rows or 0 for key, rows in of_stage.items() if key.endswith("batch_size")]
    pairs = 1 if STAGE_TABLE[stage].rows in ("texts", "demonstrations", "prompts") else 2
    learned: int = of_stage.get("per_device_train_batch_size", 0) * pairs
    read: int = max([*batches, recipe.evaluate.batch_size]) * pairs
    tokens, vocabulary = recipe.longest(), shape.vocab_size or recipe.tokenizer.vocab_size or 0
    width = max(shape.hidden_size, shape.num_attention_heads * shape.head_width)
    layer = HIDDEN * width + INNER * shape.intermediate_size
    layer += SCORES * shape.num_attention_heads * tokens + RANK * recipe.lora.r
    logits = LOGITS * vocabulary
    of_learned = shape.num_hidden_layers * layer + logits
    of_read = shape.num_hidden_layers * CACHE * width + layer + logits
    base += 2 * 4 * vocabulary * shape.hidden_size  # the tables of a trained tokenizer
    adapters = COPIES_OF_ADAPTER * ADAPTER_BYTES * adapter_parameters(recipe)
    return 4 * tokens * (learned * of_learned + read * of_read) + COPIES_OF_BASE * base + adapters
