"""Layouts of sampling on a card: joined prompts, and responses that grow by a token at a time.

    slots of a row    p p p r r . . .    its prompt, the tokens of its response so far, room for more

Every row reads its own tokens. All numbers that differ from step to step lie in tensors which a step changes in place:
a captured step can be replayed for each of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf.data.batch import on_device
from rlhf.models.lean import packed
from rlhf.models.lean.layouts import Layout
from rlhf.models.lean.packed import Packed, Piece, places_of


class JoinedPrompts(Packed):
    """Prompts in rows of `width` ids, joined without padding, for `copies` responses to each of up to `room` tokens.

    The states of their last tokens are selected. `tables` as in `LeanTrunk._rotary`, with the positions of responses.
    """

    in_place = True

    def __init__(self, tables: tuple[Tensor, Tensor], width: int, lengths: Sequence[int], copies: int, room: int):
        pieces = [Piece(row, 0, length, 1) for row, length in enumerate(lengths)]
        super().__init__(tables, places_of(width, pieces).to(tables[0].device))
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

    `cached` has keys and then values of a layer, (rows * slots, 2 * kv heads, D), so that both are stored at once.
    """

    selects, in_place = False, True

    def __init__(self, tables: tuple[Tensor, Tensor], cached: list[Tensor], lengths: Tensor, slots: int):
        self.tables = torch.cat(tables, -1)  # (T, 2 D)
        self.cached, self.slots = cached, slots
        self._begin(lengths)

    def _begin(self, lengths: Tensor) -> None:
        rows = torch.arange(len(lengths) + 1, device=lengths.device)
        self.lengths = lengths.int()  # (B,), the cached tokens of each row
        self.numbers, self.first = rows.int(), (rows * self.slots).int()  # (B + 1,), of rows, and of their first slots
        self.newest = self.first[:-1].long() + lengths - 1  # slots, of all rows

    @property
    def token_bytes(self) -> int:
        """Return the bytes of a token's keys and values."""
        return sum(x[0].nbytes for x in self.cached)

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
        out, *_ = packed.flash_attention(q[:, 0], keys, values, *bounds, 0.0, False, False, seqused_k=self.lengths)
        return out[:, None]
