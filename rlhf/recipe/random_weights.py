"""The overrides with which a recipe of a large model runs without a download."""

from rlhf.errors import UserError
from rlhf.recipe.choices import LengthsShape
from rlhf.recipe.schema import Recipe
from rlhf.recipe.stages import PRETRAIN
from rlhf.recipe.strict import Changes


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
