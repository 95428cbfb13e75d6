"""Decoding with the lean trunk: in float32 on a CPU, and in 16 bits on a card."""

from collections.abc import Sequence

from torch import Tensor

from rlhf.data.tokenize import SpecialIds, pad_right
from rlhf.models.lean.trunk import RoleTrunk
from rlhf.models.matmul import matmul
from rlhf.models.precision import Model
from rlhf.rollout.decoding import Decoding, Sampling, repeated


class TrunkDecoding(Decoding):
    """Decoding with hidden states of the lean trunk."""

    def __init__(
        self,
        trunk: RoleTrunk,
        model: Model,
        prompts: Sequence[list[int]],
        uniforms: Tensor,
        sampling: Sampling,
        tokenizer: SpecialIds,
    ):
        super().__init__(model, uniforms, sampling, tokenizer)
        self.trunk, self.role = trunk
        copies = len(uniforms) // len(prompts)
        ids = pad_right(prompts, self.pad_id).to(uniforms.device)
        states, prefilled = self.trunk.prefill(self.role, ids, [*map(len, prompts)], copies, self.room)
        self._draw(repeated(states, copies))
        self.layout = prefilled.responses()

    def states(self, newest: Tensor) -> Tensor:
        """As `Decoding.states`."""
        return self.trunk.decode(self.role, newest, self.layout)

    def drop_ended(self) -> None:
        """As `Decoding.drop_ended`: exactly half of the rows, so that there are few shapes (`round_to_few_sizes`)."""
        index = self.rows.ended.sort(stable=True).indices[: len(self.rows) // 2].sort().values
        self.keep(index)
        self.layout.keep(index)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Decoding.logits`; in float32 on a CPU by the faster product."""
        if not self.trunk.rounds:
            return super().logits(hidden)
        weight: Tensor = self.model.get_output_embeddings().weight
        return matmul(hidden, weight.t())
