"""One frozen base model, and a small adapter for each role: in PPO three or four of them.

    policy     trainable, starts as a copy of SFT; in a recipe without SFT as a new adapter
    reference  frozen copy of SFT; without SFT the base itself
    reward     frozen: the reward model's adapter and its scalar head
    second_reward  likewise, of the second reward model, which only measures
    value      trainable: either a head on the policy's hidden states, or a separate adapter that starts as the
               reward model, so that the critic begins by knowing what the score will be; where functions alone
               reward, as the policy

With the library's layers, a backward pass raises if the active role is not that of its forward pass
(rlhf/models/roles.py). The lean trunk is told the role in each pass, and recomputes with the same one.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from rlhf.data.batch import Rollout
from rlhf.errors import UserError
from rlhf.models.adapters import SCORE_WEIGHT, adapter_state, adapter_weights
from rlhf.models.lean.trunk import LeanTrunk, RoleTrunk
from rlhf.models.output_layer import logits_of, response_statistics
from rlhf.models.precision import mixed_precision
from rlhf.models.roles import AdapterStart, Roles
from rlhf.objectives.logprobs import EntropyMode, TokenStatistics
from rlhf.recipe.stages import Role, ScoreRole


class SharedBase:
    """Roles over one base: `base` without an adapter, and those of `adapters`, by where each starts.

    Only `trainable` roles get gradients. `lean`: hidden states come from rlhf/models/lean/ and not from the library;
    `joins` as in `LeanTrunk`.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        adapters: Mapping[Role, AdapterStart],
        trainable: tuple[Role, ...] = (),
        lean: bool = False,
        joins: bool = False,
    ):
        base.generation_config = GenerationConfig()  # a hub model may bring sampling settings
        self.base = base
        self.lean_trunk = LeanTrunk(base, joins) if lean else None
        self.score_heads: dict[ScoreRole, nn.Linear] = {}
        self.value_head: nn.Linear | None = None
        self._divided: list[Any] = []  # modules whose weights are divided among ranks
        self.checked = set[object]()  # what samples and was compared with training; None: the base itself
        self.roles = Roles(base, adapters, trainable)

    @property
    def peft(self) -> PeftModel:
        """Return the library's model of the base with all adapters."""
        return self.roles.peft

    @property
    def device(self) -> torch.device:
        """Return the device of the base."""
        return self.base.device

    def add_reward(self, adapter: Path, role: ScoreRole = "reward") -> None:
        """Add a reward model's adapter as a role, and its head."""
        weights = adapter_weights(adapter)
        weight = weights.pop(SCORE_WEIGHT)
        self.roles.add(role, adapter, weights)
        head = nn.Linear(weight.shape[1], 1, bias=False).requires_grad_(False)
        head.weight.copy_(weight)
        self.score_heads[role] = head.to(self.device)

    def add_value_head(self) -> nn.Linear:
        """Add a critic that is a head on the policy's hidden states. Return the head, which starts at zero."""
        head = nn.Linear(self.base.config.hidden_size, 1)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.value_head = head.to(self.device)
        return self.value_head

    def add_value_copy(self) -> nn.Linear:
        """Add a critic with an adapter of its own, role `value`, and a head. Return the head.

        The adapter starts as the policy's, the head at zero: nothing tells the critic yet what rewards will be.
        """
        head = self.add_value_head()
        config: Any = self.peft.peft_config["policy"]
        self.roles.add("value", config, adapter_state(self.peft, "policy"), trainable=True)
        return head

    def add_value_adapter(self, reward: Path, mean: float, sd: float, weight: float = 1.0) -> nn.Linear:
        """Add a critic with an adapter of its own, role `value`, and a head. Return the head.

        The critic starts as the normalised score of the reward model with the adapter in the folder `reward`,
        (score - `mean`) / `sd`, times `weight`.
        """
        head = self.add_value_head()  # before the role, which draws from torch's generator too
        weights = adapter_weights(reward)
        reward_head = weights.pop(SCORE_WEIGHT)
        self.roles.add("value", reward, weights, trainable=True)
        with torch.no_grad():
            head.weight.copy_(weight * (reward_head.float() / sd))
            head.bias.fill_(weight * (-mean / sd))
        return head

    @property
    def role_trunk(self) -> RoleTrunk | None:
        """Return the lean trunk with the active role; None without a lean trunk or an active role."""
        trunk, role = self.lean_trunk, self.roles.active
        return None if trunk is None or role is None else RoleTrunk(trunk, role)

    def shard(self) -> None:
        """Divide the frozen layers among ranks (FSDP2); each rank keeps whole embeddings, adapters and heads.

        No weight that is divided has a gradient, so gradients are reduced as without.
        """
        from torch.distributed.fsdp import FSDPModule, fully_shard

        decoder = self.base.get_decoder()
        for layer in decoder.layers:
            fully_shard(layer, ignored_params={p for name, p in self.peft.named_parameters() if "lora_" in name})
        fully_shard(decoder, ignored_params=set(decoder.parameters()))  # divides nothing more; layers are fetched ahead
        self._divided = [module for module in self.base.modules() if isinstance(module, FSDPModule)]
        self.gather()

    def gather(self) -> None:
        """Collect the whole base on each rank. To sample and score, ranks then need not run the layers in step."""
        for part in self._divided:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()

    def scatter(self) -> None:
        """Keep only this rank's part of each layer; in an update all ranks run the layers in step."""
        for part in self._divided:
            part.set_reshard_after_forward(True, recurse=False)
            part.reshard()

    @contextmanager
    def role(self, name: Role) -> Iterator[None]:
        """Make a role the active one inside a block; the lean trunk merges its weights once for the whole block.

        A backward pass must run in the same block as its forward pass, and the role's weights must not change in the
        block. Raises ValueError when there is no such role.
        """
        with self.roles.using(name), nullcontext() if self.lean_trunk is None else self.lean_trunk.merging(name):
            yield

    def hidden(self, ids: Tensor) -> Tensor:
        """Return final-norm hidden states (B, T, H) of the active role.

        Right padding needs no mask under causal attention. The backward pass of the library's states raises
        RuntimeError when another role is active by then. Raises RuntimeError without an active role.
        """
        if self.lean_trunk is not None:
            return self.lean_trunk.hidden(self._active, ids)
        role = self._active
        with mixed_precision(self.base):
            states: Tensor = self.base.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        self.roles.guard_backward(states, role)
        return states

    def response_hidden(self, rollout: Rollout) -> Tensor:
        """Return the hidden states (B, R, H) from which the response tokens are predicted, for the active role."""
        if self.lean_trunk is not None:
            return self.lean_trunk.response_hidden(self._active, rollout)
        return self._hidden_at(rollout.ids, rollout.predictors)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (N, vocabulary) of the next token from final-norm hidden states (N, H)."""
        return logits_of(self.base, hidden)

    @property
    def vocabulary(self) -> int:
        """Return the number of logits of a token."""
        return len(self.base.get_output_embeddings().weight)

    def logprobs(self, hidden: Tensor, rollout: Rollout, temperature: float) -> Tensor:
        """Return log-probabilities (B, R) of the response tokens given `response_hidden`, 0 in masked slots."""
        return self._statistics(hidden, rollout, temperature, "none").logp

    def logprobs_and_entropies(
        self, hidden: Tensor, rollout: Rollout, temperature: float, differentiable: bool
    ) -> tuple[Tensor, Tensor]:
        """Return `logprobs` and the entropies (B, R) in nats, which have a gradient if they are `differentiable`."""
        mode: EntropyMode = "gradient" if differentiable else "value"
        logp, entropies, _ = self._statistics(hidden, rollout, temperature, mode)
        assert entropies is not None
        return logp, entropies

    def _statistics(self, hidden: Tensor, rollout: Rollout, temperature: float, mode: EntropyMode) -> TokenStatistics:
        """Return log-probabilities and, as `mode` says, entropies of the response tokens."""
        few_sizes = self.lean_trunk is not None and self.lean_trunk.rounds
        return response_statistics(self.base, hidden, rollout, temperature, mode, few_sizes=few_sizes)

    def values(self, hidden: Tensor) -> Tensor:
        """Return the values (B, R) of the states before each response token, float32."""
        assert self.value_head is not None
        with torch.autocast(hidden.device.type, enabled=False):  # sampling may run in mixed precision
            values: Tensor = self.value_head(hidden.float())
        return values.squeeze(-1)

    def scores(self, rollout: Rollout, role: ScoreRole = "reward") -> Tensor:
        """Return a reward model's raw scores (B,) float32 of prompts with their responses."""
        return self.scores_at(rollout.ids, rollout.last, role)

    @torch.no_grad()
    def scores_at(self, ids: Tensor, last: Tensor, role: ScoreRole = "reward") -> Tensor:
        """Return a reward model's raw scores (B,) float32 of right-padded sequences (B, T).

        last: the position (B,) of the last real token, at which the head reads.
        """
        ids = ids.to(self.device)
        with self.roles.using(role):
            if self.lean_trunk is not None:
                at_end = self.lean_trunk.last_hidden(self._active, ids, last)
            else:
                at_end = self._hidden_at(ids, last.to(self.device)[:, None]).squeeze(1)
        scores: Tensor = self.score_heads[role](at_end.float())
        return scores.squeeze(-1)

    def _hidden_at(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the library's hidden states (B, R, H) of the active role at some positions (B, R)."""
        hidden = self.hidden(ids)
        return hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1]))

    @property
    def _active(self) -> Role:
        """Return the active role. Raises RuntimeError when there is none: any adapter would do then."""
        if self.roles.active is None:
            raise RuntimeError("no role is active: run the pass in `with shared.role(name)`")
        return self.roles.active


def check_scores(scores: Tensor) -> None:
    """Raise UserError unless the scores of a reward model are all finite. NaN stands for no verdict, which it has."""
    if not scores.cpu().isfinite().all():
        raise UserError("the reward model gives scores that are not finite: look at rm/metrics.jsonl")
