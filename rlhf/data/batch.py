"""Prompts with their responses as one batch of token ids."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.process import distributed


@dataclass(frozen=True)
class Rollout:
    """Prompts with their responses.

    ids (B, T) int64, prompt then response then padding; prompt_length, response_length (B,) int64, the response with
    its EOS; mask (B, R) bool, slot t is the t-th response token; ended (B,) bool, the response ends with EOS;
    logprobs (B, R) float32, of each response token as it was drawn, and seen (B, R), what an observer made of the
    hidden state it was drawn from: None where there was no sampling or no observer.
    """

    ids: Tensor
    prompt_length: Tensor
    response_length: Tensor
    ended: Tensor
    logprobs: Tensor | None = None
    seen: Tensor | None = None

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
        longest = int(response.max())
        logprobs, seen = (None if x is None else x[index, :longest] for x in (self.logprobs, self.seen))
        return Rollout(self.ids[index, :width], prompt, response, self.ended[index], logprobs, seen)

    def by_length(self, size: int) -> list[Tensor]:
        """Row indices in groups of `size`, short sequences with short ones."""
        return list((self.prompt_length + self.response_length).argsort(stable=True).split(size))

    def dealt(self, size: int) -> list[Tensor]:
        """The same for the rows that this rank works on: every rank has some of every length."""
        return list(distributed.own_rows((self.prompt_length + self.response_length).argsort(stable=True)).split(size))

    def _positions(self) -> Tensor:
        slots = torch.arange(int(self.response_length.max()), device=self.ids.device)
        return (self.prompt_length[:, None] + slots).clamp(max=self.ids.shape[1] - 1)
