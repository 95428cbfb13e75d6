"""Names with a fixed set of values: the roles of adapters on a shared base, and commits."""

import re
from typing import Literal, get_args

from rlhf.recipe.stages import PolicyName

# Of the members of an ensemble of reward models: the first is `reward`.
MemberRole = Literal["reward_2", "reward_3", "reward_4", "reward_5", "reward_6", "reward_7", "reward_8"]
ScoreRole = Literal["reward", "second_reward", MemberRole]  # of the reward model, and of the second one
SharedRole = Literal["policy", "reference", "reward", "second_reward", "value", "base"]  # base: without an adapter
Role = SharedRole | PolicyName | MemberRole  # in an evaluation each policy has a role too

MEMBER_ROLES: tuple[MemberRole, ...] = get_args(MemberRole)


def is_commit(text: str | None) -> bool:
    """Return whether `text` is a commit, 40 hexadecimal digits, and not a branch or tag, which can move."""
    return re.fullmatch(r"[0-9a-f]{40}", text or "") is not None


def is_gguf(name: str) -> bool:
    """Return whether a name is that of a GGUF file."""
    return name.lower().endswith(".gguf")
