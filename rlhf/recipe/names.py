"""Names with a fixed set of values: the roles of adapters on a shared base, and commits."""

import re
from typing import Literal

from rlhf.recipe.stages import PolicyName

ScoreRole = Literal["reward", "second_reward"]  # of the reward model, and of the second one
SharedRole = Literal["policy", "reference", "reward", "second_reward", "value", "base"]  # base: without an adapter
Role = SharedRole | PolicyName  # in an evaluation each policy has a role too


def is_commit(text: str | None) -> bool:
    """Return whether `text` is a commit, 40 hexadecimal digits, and not a branch or tag, which can move."""
    return re.fullmatch(r"[0-9a-f]{40}", text or "") is not None


def is_gguf(name: str) -> bool:
    """Return whether a name is that of a GGUF file."""
    return name.lower().endswith(".gguf")
