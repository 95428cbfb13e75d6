"""Decoding with the lean trunk, where it can merge weights; a prompt's keys and values are kept once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf.data.tokenize import SpecialIds, pad_right
from rlhf.models.lean.layouts import DecodingLayout
from rlhf.models.lean.trunk import RoleTrunk
from rlhf.models.matmul import matmul
from rlhf.models.precision import Model
from rlhf.rollout.cache import repeated
from rlhf.rollout.decoding import Decoding, Done, Sampling, ValueFn


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
        value_fn: ValueFn | None,
    ):
        super().__init__(model, uniforms, sampling, tokenizer, value_fn)
        self.trunk, self.role = trunk
        ids = pad_right(prompts, self.pad_id).to(uniforms.device)
        lengths = torch.tensor([len(p) for p in prompts], device=uniforms.device)
        copies = len(uniforms) // len(prompts)
        states, prefilled = self.trunk.prefill(self.role, ids, lengths, self.room)
        self._draw(repeated(states, copies))
        self.layout = DecodingLayout(prefilled, copies, self.room)

    def run(self, done: Done) -> list[Tensor]:
        """Decode to the end, as `Decoding.run`; rows that have ended are dropped, half of the batch at a time."""
        for _ in self.steps_telling(done):
            left, half = int((~self.rows.ended).sum()), len(self.rows) // 2
            if left == 0:
                break
            if left <= half:  # exactly half, so that there are few shapes: see `round_to_few_sizes`
                index = self.rows.ended.sort(stable=True).indices[:half].sort().values
                self._keep(index)
                self.layout.keep(index)
            newest = self.rows.tokens.index_select(1, self.step)
            self.step += 1
            self._draw(self.trunk.decode(self.role, newest, self.layout))
        self.deliver()
        return self.results

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (B, V) of hidden states (B, H), by the faster product."""
        plain = type(self.output_layer) is torch.nn.Linear and getattr(self.output_layer, "bias", None) is None
        return matmul(hidden, self.output_layer.weight.t()) if plain else super().logits(hidden)
