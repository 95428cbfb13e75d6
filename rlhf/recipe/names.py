"""Names with a fixed set of values: the stages of a chain, the policies among them, and the roles on a shared base."""

import re
from typing import Literal, get_args

from rlhf.errors import UserError

StageName = Literal["pretrain", "sft", "rm", "ppo", "rloo", "grpo", "dpo", "evaluate", "merge"]
OnlineName = Literal["ppo", "rloo", "grpo"]  # stages that learn from their own samples
GroupName = Literal["rloo", "grpo"]  # those of them that compare several responses to a prompt
TrainingName = Literal["sft", "rm", "ppo", "rloo", "grpo", "dpo"]  # stages that train an adapter
PolicyName = Literal["ppo", "rloo", "grpo", "dpo"]  # stages whose policy is compared with SFT
PolicyLabel = Literal["base", "sft"] | PolicyName  # what an evaluation measures
SharedRole = Literal["policy", "reference", "reward", "value", "base"]  # base: without an adapter
Role = SharedRole | PolicyName  # in an evaluation each policy has a role too

STAGES: tuple[StageName, ...] = get_args(StageName)
ONLINE: tuple[OnlineName, ...] = get_args(OnlineName)
GROUPS: tuple[GroupName, ...] = get_args(GroupName)
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
TRAINING_STAGES: tuple[TrainingName, ...] = get_args(TrainingName)  # `hardware.count` processes share one of them


def is_commit(text: str | None) -> bool:
    """Return whether `text` is a commit, 40 hexadecimal digits, and not a branch or tag, which can move."""
    return re.fullmatch(r"[0-9a-f]{40}", text or "") is not None


def stage_name(text: str) -> StageName:
    """Return `text` as the name of a stage. Raises UserError if it is none."""
    if text in STAGES:
        return text
    raise UserError(f"{text!r} is not one of {', '.join(STAGES)}")


def is_gguf(name: str) -> bool:
    """Return whether a name is that of a GGUF file."""
    return name.lower().endswith(".gguf")
