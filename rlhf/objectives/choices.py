"""Names of the variants that the functions here offer and recipes choose among. This module needs no torch."""

from typing import Literal, get_args

KlEstimator = Literal["k1", "k2", "k3"]  # kl.estimate_kl
Scale = Literal["group", "batch", "none"]  # whose standard deviation divides: groups.group_relative
Advantage = Literal["leave_one_out", Scale]  # how rewards become advantages: groups.compared_in_groups
TokenLevel = Literal["token", "sequence"]
Level = Literal[TokenLevel, "sequence_sum"]  # of the importance ratio: groups.pool_log_ratios
# How tokens are weighted, groups.token_weights, and which loss it is, groups.policy_loss
LossType = Literal["grpo", "dapo", "dr_grpo", "cispo", "gmpo"]
# Weights for samples of another distribution: importance.importance_weights
SamplingCorrection = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
DpoLoss = Literal["sigmoid", "ipo", "sigmoid_norm"]  # as in TRL

KL_ESTIMATORS: tuple[KlEstimator, ...] = get_args(KlEstimator)
SCALES: tuple[Scale, ...] = get_args(Scale)
LEVELS: tuple[Level, ...] = get_args(Level)
LOSS_TYPES: tuple[LossType, ...] = get_args(LossType)
SAMPLING_CORRECTIONS: tuple[SamplingCorrection, ...] = get_args(SamplingCorrection)
