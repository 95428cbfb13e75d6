"""The training of online stages: trained parameters, optimizer and schedule, an update's minibatches, checkpoints."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from transformers import get_scheduler

from rlhf.data.batch import TrainingBatch
from rlhf.errors import UserError
from rlhf.files import reading
from rlhf.models.adapters import save_adapter
from rlhf.models.optimizer import new_optimizer
from rlhf.models.random_state import random_state, set_random_state
from rlhf.models.shared_base import SharedBase
from rlhf.objectives.kl import adapt
from rlhf.objectives.losses import Stats
from rlhf.process import distributed
from rlhf.recipe import StageName
from rlhf.recipe.schema_model import BaseSpec
from rlhf.recipe.schema_online import OnlineOptions
from rlhf.run.layout import ADAPTER
from rlhf.run.reader import advising
from rlhf.stages.online.scores import ScoreNorm
from rlhf.terminal import say

STATE = "state.pt"  # in the folder of a checkpoint
SavedState = Mapping[str, Any]  # what `TrainState.save` writes there
TrainedRole = Literal["policy", "value"]  # also the keys of their parameters in state.pt
RATE_KEYS: dict[TrainedRole, str] = {"policy": "learning_rate", "value": "value_learning_rate"}  # keys of the recipe
GRAD_NORM_KEYS: dict[TrainedRole, str] = {"policy": "policy/grad_norm", "value": "val/grad_norm"}  # of metrics
BatchT = TypeVar("BatchT", bound=TrainingBatch)


class TrainState(Generic[BatchT]):
    """What a checkpoint keeps: trained parameters, optimizer, schedule, step, KL coefficient, norm of the scores.

    A method's `Learner` adds `add_gradients`.
    """

    def __init__(
        self,
        stage: StageName,
        shared: SharedBase,
        options: OnlineOptions,
        score_norm: ScoreNorm,
        by_role: Mapping[TrainedRole, Sequence[nn.Parameter]],
    ):
        self.stage, self.shared, self.options = stage, shared, options
        self.score_norm, self.by_role = score_norm, by_role
        self.optimizer = new_optimizer(
            options.optim,
            [{"params": parameters, "lr": getattr(options, RATE_KEYS[role])} for role, parameters in by_role.items()],
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_epsilon,
            weight_decay=options.weight_decay,
        )
        self.schedule = get_scheduler(
            options.lr_scheduler_type, self.optimizer, options.warmup_steps, num_training_steps=options.steps + 1
        )
        # With warm-up a schedule of transformers starts at a rate of 0, which would waste the first batch: skip it.
        # Without warm-up this skips the full rate; recorded results depend on it. The optimizer steps first only
        # because torch warns otherwise; there are no gradients yet, so nothing moves.
        self.optimizer.step()
        self.schedule.step()
        self.kl_coef = options.kl_coef
        self.step = 0

    @property
    def all_parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters of all roles."""
        return [parameter for parameters in self.by_role.values() for parameter in parameters]

    @property
    def reward_kl_coef(self) -> float:
        """Return the weight of the KL in the rewards; 0 if the recipe puts the KL into the loss instead."""
        return self.kl_coef if self.options.kl_penalty == "reward" else 0.0

    def add_gradients(self, batch: BatchT, mini_rows: Tensor) -> dict[str, float]:
        """Add the gradients of a minibatch, given as rows of the batch. Return its statistics."""
        raise NotImplementedError

    def update(self, batch: BatchT) -> dict[str, float]:
        """Pass over a batch in minibatches, as often as the recipe says. Return the mean statistics of those used.

        A minibatch of which nothing counts is not used, nor a batch of one token that counts, which has no spread: a
        step would follow the optimizer's momentum.
        """
        counted, lr = batch.counted, self.schedule.get_last_lr()[0]
        if counted.sum() < 2:
            share = f"{int(counted.count_nonzero())} of {len(counted)} responses count"
            say(f"note: {self.stage}: no update in step {self.step + 1}: {share}, too few to learn from")
            return {"update/optimizer_steps": 0, "lr": lr}
        self.shared.base.train(self.options.gradient_checkpointing)  # dropout is 0; checkpointing needs train mode
        self.shared.scatter()
        used: list[dict[str, float]] = []  # statistics of the minibatches with which a step was taken
        for rows in self._minibatches(len(counted)):
            if counted[rows].any():
                stats = self.add_gradients(batch, rows)
                used.append(stats | self.step_optimizer())
        self.shared.base.eval()
        self.shared.gather()
        means = {name: sum(stats[name] for stats in used) / len(used) for name in used[0]}
        return means | {"update/optimizer_steps": len(used), "lr": lr}

    def _minibatches(self, count: int) -> Iterator[Tensor]:
        """Yield the rows of each minibatch of a batch of `count` rows, pass by pass, each in a new random order.

        The rehearsal of memory (rlhf/plan/rehearsal/seams.py) takes the first of them alone.
        """
        for _ in range(self.options.passes):
            yield from torch.randperm(count).chunk(self.options.num_mini_batches)

    def micro_batches(self, batch: BatchT, mini_rows: Tensor) -> Iterator[tuple[Tensor, BatchT]]:
        """Yield this rank's micro-batches of a minibatch, each with its rows of the batch, on the host."""
        for rows in batch.rollout.sharded_by_length(self.options.per_device_train_batch_size, mini_rows):
            yield rows, batch.rows(rows)

    def sums_of(self, parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return the sums of the statistics of micro-batches, over all ranks."""
        names = list(dict.fromkeys(name for part in parts for name in part))
        sums = {name: sum(part.get(name, 0.0) for part in parts) for name in names}
        return distributed.sum_of(sums, self.shared.device)

    def step_optimizer(self) -> dict[str, float]:
        """Clip the gradients of each role and take a step. Return the gradient norms.

        Raises UserError for a gradient that is not finite.
        """
        distributed.reduce_gradients(self.all_parameters)
        limit = self.options.max_grad_norm
        grad_norms = {role: nn.utils.clip_grad_norm_(part, limit) for role, part in self.by_role.items()}
        broken = [role for role, norm in grad_norms.items() if not norm.isfinite()]
        if broken:
            rates = " or ".join(f"{self.stage}.{RATE_KEYS[role]}" for role in broken)
            raise UserError(f"{self.stage}: the gradient is not finite in step {self.step + 1}; lower {rates}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {GRAD_NORM_KEYS[role]: norm.item() for role, norm in grad_norms.items()}

    def advance(self, kl: float | None) -> None:
        """Go to the next step of the schedule.

        The KL coefficient follows `kl_target`, given the batch's KL in nats per token; for None it stays.
        """
        options = self.options
        if options.kl_target is not None and kl is not None:
            self.kl_coef = adapt(self.kl_coef, kl, options.kl_target)
        self.schedule.step()
        self.step += 1

    def save(self, base: BaseSpec, folder: Path) -> None:
        """Write everything that determines the next step.

        The order of prompts is not stored, because it is a function of seed and step.
        """
        state: dict[str, object] = {
            "step": self.step,
            "norm": tuple(self.score_norm),
            "kl_coef": self.kl_coef,
            **{role: [p.detach().cpu() for p in parameters] for role, parameters in self.by_role.items()},
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": random_state(),
        }
        torch.save(state, folder / STATE)
        save_adapter(self.shared.peft, base.model.revision, folder / ADAPTER, adapter="policy")

    def restore(self, saved: SavedState) -> None:
        """Continue from a state that `save` wrote."""
        with torch.no_grad():
            for role, parameters in self.by_role.items():
                for parameter, value in zip(parameters, saved[role], strict=True):
                    parameter.copy_(value)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])
        self.step, self.kl_coef = saved["step"], saved["kl_coef"]
        set_random_state(saved["random"])


def read_state(folder: Path) -> SavedState:
    """Read the state in a checkpoint, whose hash has been checked. Tensors and numbers alone are unpickled.

    Raises UserError for anything else.
    """
    advice = f"move {folder} away, and --resume takes the checkpoint before it"
    with advising(advice), reading(folder / STATE):
        saved: SavedState = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    return saved


def as_floats(stats: Stats, weight: Tensor | float = 1.0) -> dict[str, float]:
    """Return the statistics of a micro-batch times `weight`, with one wait for the device."""
    values = torch.stack([x.detach() for x in stats.values()]) * weight
    return dict(zip(stats, values.tolist(), strict=True))
