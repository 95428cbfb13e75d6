"""Prompts with their responses as one batch of token ids."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from rlhf.data.tokenize import pad_right
from rlhf.process import distributed


class Lengths(NamedTuple):
    """What a host knows of the rows of a rollout, to decide shapes without a wait for the device."""

    prompt: list[int]
    response: list[int]
    prompt_numbers: list[int] | None  # those of the rollout, if it has them

    def of_rows(self, rows: Sequence[int]) -> "Lengths":
        """Return those of some rows."""
        prompt, response, numbers = self
        return Lengths(
            [prompt[row] for row in rows],
            [response[row] for row in rows],
            None if numbers is None else [numbers[row] for row in rows],
        )


@dataclass(frozen=True)
class Rollout:
    """B prompts with their responses, in rows of T tokens; R slots for the tokens of a response."""

    ids: Tensor  # (B, T) int64: prompt, then response, then padding
    prompt_length: Tensor  # (B,) int64
    response_length: Tensor  # (B,) int64, with EOS
    ended: Tensor  # (B,) bool: the response ends with EOS
    logprobs: Tensor | None = None  # (B, R) float32, of each response token when it was sampled
    prompt_numbers: Tensor | None = None  # (B,) int64, if neighbouring rows may share the computation of their prompt

    @cached_property  # the host waits for the device to read them, once: parts of the rollout have theirs from it
    def lengths(self) -> Lengths:
        """Return lengths and numbers of the rows as the host knows them."""
        known = [x for x in (self.prompt_length, self.response_length, self.prompt_numbers) if x is not None]
        prompt, response, *numbers = torch.stack(known).tolist()
        return Lengths(prompt, response, numbers[0] if numbers else None)

    @property
    def longest_response(self) -> int:
        """Return R, the number of tokens in the longest response."""
        return max(self.lengths.response)

    @property
    def mask(self) -> Tensor:
        """Return the bool mask (B, R), true in the slots of real response tokens, EOS included."""
        return torch.arange(self.longest_response, device=self.ids.device) < self.response_length[:, None]

    @property
    def tokens(self) -> Tensor:
        """Return the response tokens (B, R); slots where `mask` is False hold some valid id."""
        return self.ids.gather(1, self._positions())

    @property
    def response_ids(self) -> list[list[int]]:
        """Return the tokens of each response, EOS included."""
        return [row[:n] for row, n in zip(self.tokens.tolist(), self.response_length.tolist(), strict=True)]

    @property
    def predictors(self) -> Tensor:
        """Return the positions (B, R) whose hidden states predict the tokens: one before each token."""
        return self._positions() - 1

    @property
    def real_slots(self) -> Tensor:
        """Return the numbers of the slots where `mask` is True, counted through the rows.

        Indexing with them spares the wait for the device that indexing with `mask` needs.
        """
        longest = self.longest_response
        slots = [torch.arange(row * longest, row * longest + n) for row, n in enumerate(self.lengths.response)]
        return on_device(torch.cat(slots), self.ids.device)

    @property
    def last(self) -> Tensor:
        """Return the position (B,) of the last real token of each row, on the host."""
        return torch.tensor(self.lengths.prompt) + torch.tensor(self.lengths.response) - 1

    def rows(self, index: Tensor) -> "Rollout":
        """Return some rows of the batch, no wider than the longest of them."""
        lengths = self.lengths.of_rows(index.tolist())
        width = max(map(sum, zip(lengths.prompt, lengths.response, strict=True)))
        longest = max(lengths.response)
        index = on_device(index, self.ids.device)
        part = Rollout(
            ids=self.ids[index, :width],
            prompt_length=self.prompt_length[index],
            response_length=self.response_length[index],
            ended=self.ended[index],
            logprobs=None if self.logprobs is None else self.logprobs[index, :longest],
            prompt_numbers=None if self.prompt_numbers is None else self.prompt_numbers[index],
        )
        vars(part)["lengths"] = lengths  # the cached property
        return part

    def by_length(self, size: int) -> list[Tensor]:
        """Return row indices in parts of `size`; rows of one prompt, else of similar length, follow each other."""
        return list(self._order().split(size))

    def sharded_by_length(self, size: int, among: Tensor | None = None) -> list[Tensor]:
        """Return the row indices of this rank in parts of `size`, ordered as in `by_length`; of rows `among` all.

        Every rank gets rows of every length; without enough rows for all ranks, some get none.
        """
        own = distributed.own_rows(self._order(among))
        return list(own.split(size)) if len(own) else []  # the split of an empty tensor has one part

    def _order(self, among: Tensor | None = None) -> Tensor:
        """Return row indices, on the host, by length, and with `prompt_numbers` by prompt before that."""
        rows = torch.arange(len(self.ids)) if among is None else among.cpu()
        lengths = self.lengths.of_rows(rows.tolist())
        order = (torch.tensor(lengths.prompt) + torch.tensor(lengths.response)).argsort(stable=True)
        if lengths.prompt_numbers is not None:
            order = order[torch.tensor(lengths.prompt_numbers)[order].argsort(stable=True)]
        return rows[order]

    def _positions(self) -> Tensor:
        """Return the positions (B, R) of the tokens; those of unused slots are in bounds."""
        slots = torch.arange(self.longest_response, device=self.ids.device)
        return (self.prompt_length[:, None] + slots).clamp(max=self.ids.shape[1] - 1)


def collate(
    prompts: Sequence[list[int]],
    responses: Sequence[list[int]],
    pad_id: int,
    eos_id: int,
    device: torch.device | None = None,
) -> Rollout:
    """Join prompts and responses into a batch; every response has at least one token."""
    lengths = Lengths([len(p) for p in prompts], [len(r) for r in responses], None)
    rollout = Rollout(
        ids=pad_right([p + r for p, r in zip(prompts, responses, strict=True)], pad_id).to(device),
        prompt_length=torch.tensor(lengths.prompt, device=device),
        response_length=torch.tensor(lengths.response, device=device),
        ended=torch.tensor([r[-1] == eos_id for r in responses], device=device),
    )
    vars(rollout)["lengths"] = lengths  # the cached property
    return rollout


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a small tensor of the host on a device. The host does not wait until the device has done all before."""
    return x.to(device, non_blocking=True)


@dataclass(kw_only=True)
class TrainingBatch:
    """A rollout and what an update needs of it: fields of a subclass are tensors (B,) or (B, R), or None."""

    rollout: Rollout
    judged: Tensor  # (B,) bool: which responses count
    mask: Tensor  # (B, R) bool: the tokens of the loss

    @property
    def counted(self) -> Tensor:
        """Return the number (B,) of tokens of each response that counts, on the host; 0 for one that is not judged."""
        return (self.mask.sum(1) * self.judged).cpu()

    def rows(self, index: Tensor) -> Self:
        """Return some rows of the batch, as wide as the longest response among them."""
        rollout = self.rollout.rows(index)
        slots, index = slice(rollout.longest_response), on_device(index, rollout.ids.device)
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "rollout"}
        parts: dict[str, Any] = {
            name: x if x is None else x[index] if x.dim() == 1 else x[index, slots] for name, x in tensors.items()
        }
        return replace(self, rollout=rollout, **parts)
