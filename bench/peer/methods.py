"""What `python -m bench.peer` compares: for each stage our contenders, TRL's two, and who else runs beside them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlhf.recipe import Changes, StageName

PeerSettings = dict[str, bool | str]  # what the script of a peer is told beside the recipe
Environment = Literal["here", "trl 1.12", "torchtune"]


@dataclass(frozen=True)
class Peer:
    """A trainer of others: a script in this folder, the environment that has its packages, and its settings."""

    script: str
    settings: PeerSettings = field(default_factory=dict)
    environment: Environment = "here"


@dataclass(frozen=True)
class Method:
    """What is compared for a stage, contenders by name. Ratios are to `theirs`, in their order."""

    theirs: Mapping[str, Peer]
    ours: Mapping[str, Changes] = field(default_factory=lambda: {"ours": {}})  # changes of the recipe
    beside: Mapping[str, Peer] = field(default_factory=dict)  # other work, with which nothing is compared


KEPT: PeerSettings = {"gradient_checkpointing": False}
LEAN: Changes = {"hardware.trunk": "lean"}
FORMS: dict[str, Changes] = {
    "ours": {},
    "ours, lean trunk": LEAN,
}


def _trl(tuned: PeerSettings) -> dict[str, Peer]:
    """Return TRL's trainer at its defaults, and tuned as a careful user would."""
    return {"trl": Peer("trl_stages.py"), "trl, tuned": Peer("trl_stages.py", tuned)}


# Pairs have no one length: TRL's trainers of pairs cannot put similar ones together.
METHODS: dict[StageName, Method] = {
    "sft": Method(_trl(KEPT | {"train_sampling_strategy": "group_by_length"})),
    "rm": Method(_trl(KEPT)),
    "dpo": Method(_trl(KEPT)),
    "rloo": Method(_trl(KEPT), FORMS),
    "grpo": Method(_trl(KEPT), FORMS),
    "ppo": Method(
        {
            "trl, value model trained whole": Peer("trl_ppo.py", {"lora_value": False}, "trl 1.12"),
            "trl, value model through LoRA": Peer("trl_ppo.py", {"lora_value": True}, "trl 1.12"),
        },
        FORMS | {"ours, lean trunk, value head on the policy": LEAN | {"ppo.value_model": "head"}},
        {"torchtune, policy and value model trained whole": Peer("torchtune_ppo.py", {}, "torchtune")},
    ),
}
