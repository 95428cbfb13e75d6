"""Rows of different lengths without padding, joined into one row for the lean trunk.

Flash attention takes where each row begins in the joined one, so that nothing is computed for padding. A prompt that
several responses share is computed once: its keys and values are copied for each of them.

    rows        p p p r r .    p p r r r r      two prompts and their responses, padded
    joined      p p p r p p r r r               the last token of a response predicts nothing
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.data.batch import Lengths, Places
from rlhf.models.lean.layouts import Layout

PACKS_BY_DEVICE = {"cpu": False, "cuda": True}
# The operation behind torch.nn.attention.varlen.varlen_attn, whose own arguments differ between releases: the wrapper
# of torch 2.11 has no `seqused_k`. That of 2.13 also fills a tensor in each call that nothing here reads.
flash_attention = torch.ops.aten._flash_attention_forward


def suits(dtype: torch.dtype, size: int) -> bool:
    """Return whether torch's flash attention takes heads of this type and size."""
    return dtype in (torch.float16, torch.bfloat16) and size % 8 == 0 and size <= 256


class Piece(NamedTuple):
    """Neighbouring tokens of a row of ids."""

    row: int
    start: int  # position of its first token
    end: int
    selected: int  # its last tokens whose states are needed; one or more
    prompt: int | None = None  # the number of the piece before which these tokens stand in their own row


class Packed(Layout):
    """Pieces of rows of ids, joined into one row of tokens (1, N). A token attends to those before it.

    `tables` as in `LeanTrunk._rotary`, `places` on their device. The states of the M selected tokens are needed.
    """

    def __init__(self, tables: tuple[Tensor, Tensor], places: Places):
        cos, sin = tables
        self.tokens, self.positions, self.at, keys, _ = places.numbers.split(places.counts)
        self.keys = keys if len(keys) else None  # of all pieces one after the other, if they are not the tokens
        self.rotary = cos[self.positions][None], sin[self.positions][None]
        self.selected_rotary = self.selected(self.rotary[0]), self.selected(self.rotary[1])
        self.bounds, self.selected_bounds, self.key_bounds = places.bounds.unbind()
        self.longest, self.longest_selected, self.longest_keys = places.longest

    def join(self, x: Tensor) -> Tensor:
        """Return the tokens' ids or states (1, N, …), of x (B, T, …)."""
        return x.flatten(0, 1).index_select(0, self.tokens)[None]

    def selected(self, x: Tensor) -> Tensor:
        """Return x (1, N, …) at the selected tokens, (1, M, …)."""
        return x.index_select(1, self.at)

    def attend(self, _number: int, q: Tensor, k: Tensor, v: Tensor, only_selected: bool) -> Tensor:
        """Return the attention output (1, N or M, heads, D) of a layer; of the selected queries if `only_selected`.

        The kernel takes queries to be the last tokens of their keys. What is selected of a piece are its last tokens.
        """
        if self.keys is not None:
            k, v = k[:, self.keys], v[:, self.keys]  # sums the gradients of a prompt in the same order each time
        bounds, longest = (
            (self.selected_bounds, self.longest_selected) if only_selected else (self.bounds, self.longest)
        )
        q, k, v = (x.squeeze(0) for x in (q, k, v))  # x[0] would cost a kernel more in the backward pass
        return _causal(q, k, v, bounds, self.key_bounds, longest, self.longest_keys)[None]


def pieces_of(lengths: Lengths) -> tuple[list[Piece], Tensor]:
    """Return pieces that hold what predicts the response tokens of rows, and where those are.

    The second are the numbers (B, R) of selected tokens, from which each slot of a response is predicted; those of
    unused slots are in bounds. Neighbouring rows with the same prompt number share its piece. A row without a response
    counts as one with a token of it.
    """
    prompts, numbers = lengths.prompt, lengths.prompt_numbers
    responses = [max(1, response) for response in lengths.response]
    shared = numbers is not None and any(a == b for a, b in pairwise(numbers))
    pieces: list[Piece] = []
    slots = torch.arange(max(lengths.response)).repeat(len(prompts), 1)
    number = last = count = 0  # the newest prompt's piece and its selected token; the tokens selected so far
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        slots[row].clamp_(max=response - 1)
        if not shared:
            pieces.append(Piece(row, 0, prompt + response - 1, response))
            slots[row] += count
            count += response
            continue
        assert numbers is not None
        if not row or numbers[row] != numbers[row - 1]:
            number, last, count = len(pieces), count, count + 1
            pieces.append(Piece(row, 0, prompt, 1))
        slots[row, 1:] += count - 1
        slots[row, 0] = last
        if response > 1:
            pieces.append(Piece(row, prompt, prompt + response - 1, response - 1, number))
            count += response - 1
        else:
            slots[row] = last
    return pieces, slots


def places_of(width: int, pieces: Sequence[Piece], slots: Tensor | None = None) -> Places:
    """Return where the tokens of pieces of rows of `width` ids lie, on the host. `slots` as in `pieces_of`.

    Tokens of a piece behind the end of its row are the row's last one.
    """
    borders = _borders(piece.end - piece.start for piece in pieces)
    own = [torch.arange(*border) for border in pairwise(borders)]  # of each piece, its tokens in the joined row
    none = own[0][:0]
    of_prompts = [none if piece.prompt is None else own[piece.prompt] for piece in pieces]
    read = [torch.cat(parts) for parts in zip(of_prompts, own, strict=True)]
    positions = [torch.arange(p.start, p.end).clamp(max=width - 1) for p in pieces]
    numbers = [
        torch.cat([p.row * width + place for p, place in zip(pieces, positions, strict=True)]),
        torch.cat(positions),
        torch.cat([tokens[-p.selected :] for p, tokens in zip(pieces, own, strict=True)]),
        torch.cat(read) if any(p.prompt is not None for p in pieces) else none,
        none if slots is None else slots.flatten(),
    ]
    lengths = [[*map(len, own)], [p.selected for p in pieces], [*map(len, read)]]
    bounds = torch.tensor([*map(_borders, lengths)], dtype=torch.int32)
    return Places(torch.cat(numbers), bounds, tuple(map(len, numbers)), tuple(map(max, lengths)))


def whole_rows(last: Tensor) -> list[Piece]:
    """Return a piece for each row, up to the token at the position `last` (B,), whose state is needed."""
    return [Piece(row, 0, position + 1, 1) for row, position in enumerate(last.tolist())]


def _borders(lengths: Iterable[int]) -> list[int]:
    """Return where each of some parts begins that follow each other, and where the last one ends."""
    return [0, *accumulate(lengths)]


def _causal(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, key_bounds: Tensor, longest: int, longest_keys: int
) -> Tensor:
    """Return attention (N, heads, D) of queries (N, heads, D) to keys and values (K, kv heads, D).

    Sequences lie between bounds, (sequences + 1,) int32. In each the queries belong to the last of its keys.
    """
    out: Tensor
    out, *_ = flash_attention(q, k, v, bounds, key_bounds, longest, longest_keys, 0.0, True, False)  # no dropout, mask
    return out
