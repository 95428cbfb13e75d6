"""What loading a base and its tokenizer needs to know; a recipe has all of it, and a program may have no recipe."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from rlhf.recipe.choices import Trunk
from rlhf.recipe.schema_model import Model, Tokenizer


class BaseSpec(NamedTuple):
    """A base with its tokenizer, and what is asked of it."""

    model: Model
    tokenizer: Tokenizer
    pretrained: Path | None = None  # the result of the stage pretrain, for `source: pretrain` and `source: train`
    seed: int = 0  # of random weights
    trunk: Trunk = "library"  # lean: the base must be one that the lean trunk runs
    lengths: Mapping[str, int] = MappingProxyType({})  # longest sequences in tokens, by the keys that set them
