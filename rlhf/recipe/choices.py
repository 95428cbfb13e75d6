"""Allowed values of recipe keys that other modules name too. This module needs no torch."""

from typing import Literal

Device = Literal["cpu", "cuda"]
Optimizer = Literal["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"]
Schedule = Literal["linear", "cosine", "constant", "constant_with_warmup"]  # of the learning rate
KeptWeights = Literal["last", "best"]  # of the last step, or of the best checkpoint
Trunk = Literal["library", "lean"]  # whose layers compute forward and backward passes
CriticKind = Literal["head", "adapter"]  # a head on the policy's trunk, or a separate adapter
Template = Literal["hh", "plain", "chat"]  # of dialogues: docs/data.md
RowType = Literal["text", "messages", "prompt_only", "prompt_completion", "unpaired_preference", "preference"]  # TRL's
RowSet = Literal[  # public sets and exports by their documented columns
    "hh",
    "alpaca",
    "sharegpt",
    "gsm8k",
    "ultrafeedback",
    "distilabel",
    "argilla",
    "helpsteer3",
    "arena",
    "openorca",
]
Turns = Literal["all", "last"]  # answers of a conversation that are imitated
OnBadRow = Literal["stop", "skip"]
LengthsShape = Literal["hh", "longest"]  # as long as dialogues of HH-RLHF, or as every stage admits
