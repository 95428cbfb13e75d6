"""Typed records of files that models, adapters and trainers write. `rlhf/run/reader.py` reads a file as one of them."""

from typing import Annotated

from pydantic import Field

from rlhf.run.records import Amount, Count, Record


class SchedulerState(Record):
    """The state of one of torch's learning-rate schedules, in scheduler.pt and in PPO's state.pt."""

    last_epoch: Count
    step_count: Annotated[Count, Field(alias="_step_count")]
    base_lrs: list[Amount]
    last_lr: Annotated[list[Amount], Field(alias="_last_lr")]


class ParameterGroup(Record):
    """One group of parameters of an optimizer."""

    params: list[Count]
    lr: Amount
    betas: tuple[Amount, Amount] | list[Amount]
    eps: Amount
    weight_decay: Amount


class OptimizerState(Record):
    """The state of an AdamW, in optimizer.pt and in PPO's state.pt.

    Its tensors are checked against the parameters elsewhere.
    """

    state: dict[Count, dict[str, object]]
    param_groups: Annotated[list[ParameterGroup], Field(min_length=1)]
