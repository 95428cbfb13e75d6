"""Sampling: prompts in, responses out, as token ids with masks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from rlhf.data.tokenize import Codec, pad_right


@dataclass(frozen=True)
class Rollout:
    """Prompts with their responses.

    ids (B, T) int64, prompt then response then padding; prompt_length, response_length (B,) int64, the response with
    its EOS; mask (B, R) bool, slot t is the t-th response token; ended (B,) bool, the response ends with EOS.
    """

    ids: Tensor
    prompt_length: Tensor
    response_length: Tensor
    ended: Tensor

    @property
    def mask(self) -> Tensor:
        slots = torch.arange(int(self.response_length.max()), device=self.ids.device)
        return slots < self.response_length[:, None]

    @property
    def tokens(self) -> Tensor:
        """The response tokens (B, R); slots where `mask` is False hold some valid id."""
        return self.ids.gather(1, self._positions())

    @property
    def predictors(self) -> Tensor:
        """Positions (B, R) whose hidden state predicts the token of each slot: one before the token."""
        return self._positions() - 1

    @property
    def last(self) -> Tensor:
        """Position (B,) of the last real token."""
        return self.prompt_length + self.response_length - 1

    def rows(self, index: Tensor) -> "Rollout":
        """A part of the batch, without the padding that only the other rows needed."""
        prompt, response = self.prompt_length[index], self.response_length[index]
        width = int((prompt + response).max())
        return Rollout(self.ids[index, :width], prompt, response, self.ended[index])

    def by_length(self, size: int) -> list[Tensor]:
        """Row indices in groups of `size`, short sequences with short ones."""
        return list((self.prompt_length + self.response_length).argsort(stable=True).split(size))

    def _positions(self) -> Tensor:
        slots = torch.arange(int(self.response_length.max()), device=self.ids.device)
        return (self.prompt_length[:, None] + slots).clamp(max=self.ids.shape[1] - 1)


def collate(prompts: Sequence[list[int]], responses: Sequence[list[int]], pad_id: int, eos_id: int) -> Rollout:
    """Put prompts and responses together; every response has at least one token."""
    return Rollout(
        ids=pad_right([p + r for p, r in zip(prompts, responses, strict=True)], pad_id),
        prompt_length=torch.tensor([len(p) for p in prompts]),
        response_length=torch.tensor([len(r) for r in responses]),
        ended=torch.tensor([r[-1] == eos_id for r in responses]),
    )


def to_device(rollout: Rollout, device: torch.device) -> Rollout:
    fields = (rollout.ids, rollout.prompt_length, rollout.response_length, rollout.ended)
    return Rollout(*(field.to(device) for field in fields))


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn: from softmax(logits / temperature), with no other filter."""

    max_prompt_length: int
    response_length: int
    temperature: float
    batch_size: int  # prompts decoded together


@torch.no_grad()
def sample(model: PreTrainedModel, prompts: Sequence[list[int]], codec: Codec, how: Sampling) -> Rollout:
    """Sample one response per prompt (token ids), from the model as it stands, with the adapter that is active.

    Prompts of similar length are decoded together. Randomness comes from torch's generator; the result is in the order
    of `prompts`.
    """
    model.eval()
    settings = GenerationConfig(
        do_sample=True,
        temperature=how.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=how.response_length,
        pad_token_id=codec.pad_id,
        eos_token_id=codec.eos_id,
    )
    device = next(model.parameters()).device
    responses: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for at in range(0, len(order), how.batch_size):
        rows = order[at : at + how.batch_size]
        ids = pad_right([prompts[i][::-1] for i in rows], codec.pad_id).flip(1).to(device)  # prompts end together
        width = ids.shape[1]
        lengths = torch.tensor([len(prompts[i]) for i in rows], device=device)
        real = torch.arange(width, device=device) >= width - lengths[:, None]
        output = model.generate(input_ids=ids, attention_mask=real.long(), generation_config=settings)
        for row, new in zip(rows, output[:, width:].tolist(), strict=True):
            responses[row] = new[: new.index(codec.eos_id) + 1] if codec.eos_id in new else new
    return to_device(collate(prompts, responses, codec.pad_id, codec.eos_id), device)
