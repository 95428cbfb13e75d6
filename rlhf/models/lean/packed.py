"""Rows of different lengths without padding, joined into one row for the lean trunk.

A prompt that several responses share is computed once: its keys and values are copied for each of them. On a card flash
attention takes where each row begins in the joined one, so that nothing is computed for padding. A CPU has no such
kernel: there rows lie apart for attention alone, a small part of the work.

    rows        p p p r r .    p p r r r r      two prompts and their responses, padded
    joined      p p p r p p r r r               the last token of a response predicts nothing
    sampling    p p p r r . . .                 slots of a row: its prompt, its response so far, room for more
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf.data.batch import Lengths, on_device
from rlhf.models.lean.layouts import Layout, attention
from rlhf.models.matmul import round_to_few_sizes

APART_BY_DEVICE = {"cpu": True, "cuda": False}  # whether attention takes rows apart, with padding
# The operation behind torch.nn.attention.varlen.varlen_attn, whose own arguments differ between releases: the wrapper
# of torch 2.11 has no `seqused_k`. That of 2.13 also fills a tensor in each call that nothing here reads.
flash_attention = torch.ops.aten._flash_attention_forward


def suits(weight: Tensor, size: int) -> bool:
    """Return whether rows are joined for weights like this: float32 on a CPU, else heads that flash attention takes."""
    if APART_BY_DEVICE[weight.device.type]:
        return weight.dtype == torch.float32
    return weight.dtype in (torch.float16, torch.bfloat16) and size % 8 == 0 and size <= 256


class Piece(NamedTuple):
    """Neighbouring tokens of a row of ids."""

    row: int
    start: int  # position of its first token
    end: int
    selected: int  # its last tokens whose states are needed
    prompt: int | None = None  # the number of the piece before which these tokens stand in their own row


class Packed(Layout):
    """Pieces of rows of `width` ids, joined into one row of tokens (1, N). A token attends to those before it.

    `tables` as in `LeanTrunk._rotary`. The states of the M selected tokens are needed. Tokens of a piece behind the end
    of its row are the row's last one. Where rows lie apart for attention, N and M are rounded up to one of few sizes:
    more tokens, which nothing reads, follow.
    """

    def __init__(self, tables: tuple[Tensor, Tensor], width: int, pieces: Sequence[Piece]):
        cos, sin = tables
        device = cos.device
        borders = _borders(piece.end - piece.start for piece in pieces)
        own = [torch.arange(*border) for border in pairwise(borders)]  # of each piece, its tokens in the joined row
        read = [n if p.prompt is None else torch.cat([own[p.prompt], n]) for p, n in zip(pieces, own, strict=True)]
        selected = [tokens[len(tokens) - piece.selected :] for piece, tokens in zip(pieces, own, strict=True)]
        positions = [torch.arange(piece.start, piece.end).clamp(max=width - 1) for piece in pieces]
        tokens = [piece.row * width + place for piece, place in zip(pieces, positions, strict=True)]
        joined = [torch.cat(x) for x in (tokens, selected, positions)]
        self.apart = Apart.of(pieces, read, joined[1], borders[-1], device) if APART_BY_DEVICE[device.type] else None
        if self.apart:
            joined = [F.pad(x, (0, round_to_few_sizes(len(x)) - len(x))) for x in joined]
        self.tokens, self.at, places = (on_device(x, device) for x in joined)
        # of all pieces one after the other, if they are not the tokens
        self.keys = on_device(torch.cat(read), device) if any(p.prompt is not None for p in pieces) else None
        self.rotary = cos[places][None], sin[places][None]
        self.selected_rotary = self.selected(self.rotary[0]), self.selected(self.rotary[1])
        self.bounds, self.selected_bounds, self.key_bounds = (
            on_device(torch.tensor(_borders(map(len, x)), dtype=torch.int32), device) for x in (own, selected, read)
        )
        self.longest, self.longest_selected, self.longest_keys = (max(map(len, x)) for x in (own, selected, read))

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
        if self.apart:
            return self.apart.attend(q[0], k[0], v[0], only_selected)[None]
        if self.keys is not None:
            k, v = k[:, self.keys], v[:, self.keys]  # sums the gradients of a prompt in the same order each time
        bounds, longest = (
            (self.selected_bounds, self.longest_selected) if only_selected else (self.bounds, self.longest)
        )
        q, k, v = (x.squeeze(0) for x in (q, k, v))  # x[0] would cost a kernel more in the backward pass
        out: Tensor
        # no dropout; causal; no mask for debugging
        out, *_ = flash_attention(q, k, v, bounds, self.key_bounds, longest, self.longest_keys, 0.0, True, False)
        return out[None]


class Apart(NamedTuple):
    """Rows of joined tokens that lie apart for attention, padded on the right: one for each piece that ends a row."""

    tokens: Tensor  # (B, T), the joined token in each slot
    slots: Tensor  # of each joined token, in the first of the rows that read it
    selected_slots: Tensor  # of each selected one

    @classmethod
    def of(
        cls, pieces: Sequence[Piece], read: Sequence[Tensor], selected: Tensor, count: int, device: torch.device
    ) -> "Apart":
        """Return the rows of `pieces`, of which each reads the joined tokens `read`; `count` tokens are joined."""
        prompts = {piece.prompt for piece in pieces}
        rows = [tokens for number, tokens in enumerate(read) if number not in prompts]
        tokens = pad_sequence(rows, batch_first=True)
        slots = torch.empty(count, dtype=torch.int64)
        for number, row in reversed([*enumerate(rows)]):
            slots[row] = number * tokens.shape[1] + torch.arange(len(row))
        return cls(*(on_device(x, device) for x in (tokens, slots, slots[selected])))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, only_selected: bool) -> Tensor:
        """Return the causal attention output (N or M, heads, D) of queries of as many tokens, 0 where nothing reads it.

        Shapes: q (N or M, heads, D); k, v (N, kv_heads, D). Slots without a query of their own, as those of a prompt in
        all but one of its rows, have zeros as queries.
        """
        slots = self.selected_slots if only_selected else self.slots
        queries = q.new_zeros(self.tokens.numel(), *q.shape[1:]).index_copy_(0, slots, q[: len(slots)])
        keys, values = (x.index_select(0, self.tokens.flatten()) for x in (k, v))
        queries, keys, values = (x.unflatten(0, self.tokens.shape) for x in (queries, keys, values))
        mixed = attention(queries, keys, values, None)
        return F.pad(mixed.flatten(0, 1).index_select(0, slots), (0, 0, 0, 0, 0, len(q) - len(slots)))


def pieces_of(lengths: Lengths) -> tuple[list[Piece], Tensor]:
    """Return pieces that hold what predicts the response tokens of rows, and where those are.

    The second are the numbers (B, R) of selected tokens, from which each slot of a response is predicted; those of
    unused slots are in bounds. Neighbouring rows with the same prompt number share its piece. A row without a response
    counts as one with a token of it.
    """
    numbers = lengths.prompt_numbers or [*range(len(lengths.prompt))]
    shared = any(a == b for a, b in pairwise(numbers))
    pieces: list[Piece] = []
    slots: list[Tensor] = []
    number = last = count = 0  # the newest prompt's piece and its selected token; the tokens selected so far
    for row, (prompt, response) in enumerate(zip(lengths.prompt, lengths.response, strict=True)):
        inside = max(0, response - 1)  # tokens of the response that predict one
        if not shared:
            pieces.append(Piece(row, 0, prompt + inside, 1 + inside))
            last, count = count, count + 1
        elif not row or numbers[row] != numbers[row - 1]:
            number, last, count = len(pieces), count, count + 1
            pieces.append(Piece(row, 0, prompt, 1))
        if shared and inside:
            pieces.append(Piece(row, prompt, prompt + inside, inside, number))
        slots.append(torch.tensor([last, *range(count, count + inside)]))
        count += inside
    return pieces, pad_sequence(slots, batch_first=True)[:, : max(lengths.response)]


def pieces_of_pairs(ids: Tensor, lengths: Sequence[int]) -> list[Piece]:
    """Return pieces of ids (2 B, T) of which the state of each row's last token is needed: of row 0, B, 1, B + 1 …

    The tokens with which rows n and B + n both begin are one piece. A row has the first `lengths` tokens.
    """
    pairs = len(ids) // 2
    same = (ids[:pairs] == ids[pairs:]).cumprod(1).sum(1).tolist()
    pieces: list[Piece] = []
    for row in range(pairs):
        both = row, pairs + row
        common = min(same[row], *(lengths[one] - 1 for one in both))
        number = len(pieces) if common else None
        if common:
            pieces.append(Piece(row, 0, common, 0))
        pieces += [Piece(one, common, lengths[one], 1, number) for one in both]
    return pieces


def whole_rows(lengths: Iterable[int]) -> list[Piece]:
    """Return a piece for each row: its first tokens, of which the state of the last one is needed."""
    return [Piece(row, 0, length, 1) for row, length in enumerate(lengths)]


def _borders(lengths: Iterable[int]) -> list[int]:
    """Return where each of some parts begins that follow each other, and where the last one ends."""
    return [0, *accumulate(lengths)]


# -- sampling: every number that differs from step to step lies in a tensor, so that a captured step can be replayed ---


class JoinedPrompts(Packed):
    """Prompts in rows of `width` ids, for `copies` responses to each of up to `room` tokens.

    The states of their last tokens are selected. `tables` as in `LeanTrunk._rotary`, with the positions of responses.
    """

    def __init__(self, tables: tuple[Tensor, Tensor], width: int, lengths: Sequence[int], copies: int, room: int):
        super().__init__(tables, width, whole_rows(lengths))
        self.rows, self.slots = copies * len(lengths), max(lengths) + room
        places = [
            torch.cat([(row * copies + copy) * self.slots + torch.arange(n) for row, n in enumerate(lengths)])
            for copy in range(copies)
        ]
        self.places = on_device(torch.stack(places), self.tokens.device)  # (copies, N), of each token's keys and values
        self.lengths = on_device(torch.tensor(lengths).repeat_interleave(copies), self.tokens.device)
        self.tables = tables
        self.cached: list[Tensor] = []

    def store(self, number: int, heads: Tensor, first: int) -> None:
        """As `Layout.store`."""
        tokens = heads[0, :, first:]
        # zeros: what is not read still enters a product with weight 0, and 0 * NaN is NaN
        cached = tokens.new_zeros(self.rows * self.slots, *tokens.shape[1:])
        for places in self.places:
            cached.index_copy_(0, places, tokens)
        self.cached.append(cached)

    def responses(self) -> "GrowingRows":
        """Return the layout of responses to the prompts, after the last layer."""
        return GrowingRows(self.tables, self.cached, self.lengths, self.slots)


class GrowingRows(Layout):
    """Rows that grow by a token at a time, each in `slots` slots; `lengths` (rows,) are their tokens so far.

    Every row reads its own tokens. `cached` has keys and then values of a layer, (rows * slots, 2 * kv heads, D), so
    that both are stored at once.
    """

    selects = False

    def __init__(self, tables: tuple[Tensor, Tensor], cached: list[Tensor], lengths: Tensor, slots: int):
        self.tables = torch.cat(tables, -1)  # (T, 2 D)
        self.cached, self.slots = cached, slots
        self._begin(lengths)

    def _begin(self, lengths: Tensor) -> None:
        rows = torch.arange(len(lengths) + 1, device=lengths.device)
        self.lengths = lengths.int()  # (B,), the cached tokens of each row
        self.numbers, self.first = rows.int(), (rows * self.slots).int()  # (B + 1,), of rows, and of their first slots
        self.newest = self.first[:-1].long() + lengths - 1  # slots, of all rows

    def next_token(self) -> None:
        """Begin the next token of each row."""
        cos, sin = self.tables.index_select(0, self.lengths)[:, None].chunk(2, -1)
        self.rotary = cos, sin
        self.lengths.add_(1)
        self.newest.add_(1)

    def keep(self, rows: Tensor) -> None:
        """Continue with some of the rows."""
        for number, cached in enumerate(self.cached):  # one layer after the other: memory for one copy
            self.cached[number] = cached.unflatten(0, (-1, self.slots))[rows].flatten(0, 1)
        self._begin(self.lengths[rows].long())

    def store(self, number: int, heads: Tensor, first: int) -> None:
        """As `Layout.store`."""
        self.cached[number].index_copy_(0, self.newest, heads[:, 0, first:])

    def attend(self, number: int, q: Tensor, k: Tensor, v: Tensor, only_selected: bool) -> Tensor:
        """As `Layout.attend`, for the newest tokens (B, 1)."""
        keys, values = self.cached[number].chunk(2, 1)
        bounds = self.numbers, self.first, 1, self.slots
        out: Tensor
        # no dropout; not causal, as the only query is the newest token; no mask for debugging
        out, *_ = flash_attention(q[:, 0], keys, values, *bounds, 0.0, False, False, seqused_k=self.lengths)
        return out[:, None]
