"""What `python -m bench.peer` compares: our contenders and the peers' for each method."""

from dataclasses import dataclass, field

from rlhf.recipe import Changes


@dataclass(frozen=True)
class Method:
    """What is compared for one method: contenders by name."""

    ours: dict[str, Changes]  # overrides of the recipe
    theirs: dict[str, list[str]]  # arguments of the script that runs TRL's trainer
    epochs: int  # of both sides, over one batch of responses
    torchtune: dict[str, list[str]] = field(default_factory=dict)  # arguments of the script that runs its recipe


LEAN: Changes = {"hardware.trunk": "lean"}
FORMS: dict[str, Changes] = {  # of each of our contenders for PPO
    "": {},
    ", lean trunk": LEAN,
    ", lean trunk, adapters in the upper half": LEAN | {"lora.layers": "upper_half"},
    ", lean trunk, adapters in the upper third": LEAN | {"lora.layers": "upper_third"},
}


def _without_critic(stage: str) -> Method:
    """Return the contenders of RLOO or GRPO."""
    return Method(
        ours={
            "ours, activations kept": {},
            "ours, activations recomputed": {f"{stage}.gradient_checkpointing": "true"},
            "ours, lean trunk": LEAN,
            "ours, lean trunk, adapters in the upper half": LEAN | {"lora.layers": "upper_half"},
        },
        theirs={
            "TRL, activations kept": ["--method", stage],
            "TRL, activations recomputed": ["--method", stage, "--checkpointing"],
        },
        epochs=1,
    )


METHODS = {
    "ppo": Method(
        ours={
            f"ours, {critic}{form}": changes | more
            for critic, changes in {
                "critic with an adapter": {"ppo.old_logprobs": "recompute", "ppo.value_model": "adapter"},
                "value head on the policy": {},
            }.items()
            for form, more in FORMS.items()
        },
        theirs={"TRL, value model trained whole": [], "TRL, value model through LoRA": ["--lora-value"]},
        epochs=4,
        torchtune={"torchtune, policy and value model trained whole": []},
    ),
    "rloo": _without_critic("rloo"),
    "grpo": _without_critic("grpo"),
}

# Contenders that are the same design on both sides: ours, TRL's. Headlines compare no others, and the ratios of
# the pages are to TRL's of these.
ALIKE = (
    ("ours, critic with an adapter", "TRL, value model through LoRA"),
    ("ours, activations kept", "TRL, activations kept"),
    ("ours, activations recomputed", "TRL, activations recomputed"),
)
