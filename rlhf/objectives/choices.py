"""Names of the variants that the functions here offer and recipes choose among. This module needs no torch."""

from typing import Literal

KlEstimator = Literal["k1", "k2", "k3"]  # kl.estimate_kl
Scale = Literal["group", "batch", "none"]  # whose standard deviation divides the rewards of a group
Advantage = Literal["leave_one_out", Scale]  # how rewards become advantages: groups.ADVANTAGES
TokenLevel = Literal["token", "sequence"]
Level = Literal[TokenLevel, "sequence_sum"]  # of the importance ratio: importance.pool_log_ratios
# How tokens are weighted, groups.token_weights, and which loss it is, groups.POLICY_LOSSES
LossType = Literal["grpo", "dapo", "dr_grpo", "cispo", "gmpo"]
# Weights for samples of another distribution: importance.importance_weights
SamplingCorrection = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
DpoLoss = Literal["sigmoid", "ipo", "sigmoid_norm"]  # as in TRL
