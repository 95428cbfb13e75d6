"""Attention layouts of the lean trunk: whole sequences, responses with shared prompts, growing responses on a CPU."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.data.batch import Rollout
from rlhf.objectives.masked import at_least_float32

# With a mask, whether keys that several heads share are copied for each head. On a card, fused kernels take either a
# mask or shared keys: with both, torch would form all scores.
COPIES_HEADS_BY_DEVICE = {"cpu": False, "cuda": True}

# Whether attention of bfloat16 is computed in float32, and rounded once. torch's kernel for a CPU is slow in bfloat16:
# its backward pass took 4 times as long on an AMD EPYC with AVX512-BF16.
WIDE_ATTENTION_BY_DEVICE = {"cpu": True, "cuda": False}


class Layout:
    """Which tokens of some rows attend to which, and where the last layer's states are needed."""

    rotary: tuple[Tensor, Tensor]  # tables of `Rotary` for all tokens
    selects = True  # whether the last layer's states are needed at some positions only
    selected_rotary: tuple[Tensor, Tensor]  # for the tokens at those

    def selected(self, x: Tensor) -> Tensor:
        """Return x (B, T, H) at the selected positions, (B, R, H)."""
        raise NotImplementedError

    def store(self, number: int, heads: Tensor, first: int) -> None:
        """Keep what later tokens attend to: of heads (B, T, heads, D) those from `first` on, keys and then values."""

    def attend(self, number: int, q: Tensor, k: Tensor, v: Tensor, only_selected: bool) -> Tensor:
        """Return the attention output (B, T, heads, D) of a layer; of the selected queries if `only_selected`."""
        raise NotImplementedError


class Sequences(Layout):
    """Rows of tokens (B, T), each of which attends to those before it.

    `positions` (B, R) selects the positions at which the last layer's states are needed; by default all.
    """

    def __init__(self, rotary: tuple[Tensor, Tensor], positions: Tensor | None = None):
        cos, sin = rotary
        self.rotary = cos[None], sin[None]
        self.positions, self.selects = positions, positions is not None
        if positions is not None:
            self.selected_rotary = cos[positions], sin[positions]
            self.mask = torch.arange(len(cos), device=positions.device) <= positions[..., None]  # (B, R, T)

    def selected(self, x: Tensor) -> Tensor:
        """As `Layout.selected`."""
        assert self.positions is not None
        return x.gather(1, self.positions[..., None].expand(-1, -1, x.shape[-1]))

    def attend(self, _number: int, q: Tensor, k: Tensor, v: Tensor, only_selected: bool) -> Tensor:
        """As `Layout.attend`."""
        return attention(q, k, v, self.mask if only_selected else None)


class SharedPrompts(Layout):
    """Prompts and responses to them, joined into one row of tokens: P prompts (P, S), then B responses (B, R - 1).

    The last token of a response predicts nothing and is left out. The states of the prompts' last tokens and of all
    response tokens are needed. `prompt_numbers` (B,) are those of `rollout`, equal ones side by side. The joined row is
    padded to `round_up(length)`.
    """

    def __init__(
        self,
        rotary: tuple[Tensor, Tensor],
        rollout: Rollout,
        prompt_numbers: Tensor,
        round_up: Callable[[int], int] = int,
    ):
        cos, sin = rotary
        new = prompt_numbers != prompt_numbers.roll(1)
        new[0] = True
        self.prompt_of_row = new.cumsum(0) - 1  # (B,), its place among the P prompts
        self.first = new.nonzero().squeeze(1)  # (P,), the first row of each prompt
        device, lengths = rollout.ids.device, rollout.prompt_length
        self.last = lengths[self.first, None] - 1  # (P, 1)
        self.prompts, self.longest_prompt = len(self.first), int(lengths.max())
        self.width = rollout.mask.shape[1]
        slots = torch.arange(max(self.width - 1, 1), device=device)
        self.rows, self.slots, self.round_up = len(prompt_numbers), len(slots), round_up
        self.positions = (lengths[:, None] + slots).clamp(max=rollout.ids.shape[1] - 1)  # (B, R - 1)
        places = torch.arange(self.longest_prompt, device=device)
        positions = self._joined(places.repeat(self.prompts, 1), self.positions)
        self.rotary = cos[positions], sin[positions]
        positions = self._joined(self.last, self.positions)
        self.selected_rotary = cos[positions], sin[positions]
        self.prompt_mask = places <= self.last[..., None]  # (P, 1, S), for the last token
        prompt = (places < lengths[:, None])[:, None].expand(-1, self.slots, -1)
        own = (slots <= slots[:, None]).expand(self.rows, -1, -1)
        self.mask = torch.cat([prompt, own], 2)  # (B, R - 1, S + R - 1)

    def join(self, x: Tensor) -> Tensor:
        """Return the tokens' states (1, N, H), of x (B, T, H) with a prompt in each row."""
        responses = x.gather(1, self.positions[..., None].expand(-1, -1, x.shape[-1]))
        return self._joined(x[self.first, : self.longest_prompt], responses)

    def selected(self, x: Tensor) -> Tensor:
        """Return the states (1, P + B * (R - 1), H) of the prompts' last tokens and of the responses."""
        prompts, responses = self._parts(x)
        last = prompts.gather(1, self.last[..., None].expand(-1, -1, x.shape[-1]))
        return self._joined(last, responses)

    def responses(self, x: Tensor) -> Tensor:
        """Return the selected states as (B, R, H): before each token of a response."""
        before, inside = self._parts(x, 1)
        return torch.cat([before[self.prompt_of_row], inside], 1)[:, : self.width]

    def attend(self, _number: int, q: Tensor, k: Tensor, v: Tensor, only_selected: bool) -> Tensor:
        """As `Layout.attend`. A response attends to its prompt and to itself."""
        (k_prompt, k_own), (v_prompt, v_own) = self._parts(k), self._parts(v)
        q_prompt, q_own = self._parts(q, 1 if only_selected else None)
        prompts = attention(q_prompt, k_prompt, v_prompt, self.prompt_mask if only_selected else None)
        k_all = torch.cat([k_prompt[self.prompt_of_row], k_own], 1)
        v_all = torch.cat([v_prompt[self.prompt_of_row], v_own], 1)
        return self._joined(prompts, attention(q_own, k_all, v_all, self.mask))

    def _parts(self, x: Tensor, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the prompts (P, `length` or S, …) and the responses (B, R - 1, …) of x (1, N, …)."""
        length = length or self.longest_prompt
        border = self.prompts * length
        prompts, responses, _ = x[0].tensor_split([border, border + self.rows * self.slots])
        return prompts.unflatten(0, (self.prompts, length)), responses.unflatten(0, (self.rows, self.slots))

    def _joined(self, prompts: Tensor, responses: Tensor) -> Tensor:
        """Return the tokens of prompts and responses as one row (1, N, …), with its padding."""
        count = prompts.shape[:2].numel() + responses.shape[:2].numel()
        padding = prompts.new_zeros(self.round_up(count) - count, *prompts.shape[2:])
        return torch.cat([prompts.flatten(0, 1), responses.flatten(0, 1), padding])[None]


class PrefillLayout(Sequences):
    """Prompts (P, S), padded on the right. Keeps their keys and values; selects the states of their last tokens."""

    def __init__(self, rotary: tuple[Tensor, Tensor], lengths: Tensor, padded_length: int, copies: int, room: int):
        cos, sin = rotary
        super().__init__((cos[:padded_length], sin[:padded_length]), lengths[:, None] - 1)
        self.tables, self.lengths = rotary, lengths  # the tables hold the positions of responses too
        self.copies, self.room = copies, room
        self.keys_values: list[tuple[Tensor, Tensor]] = []  # of each layer, (P, heads, D, S)

    def store(self, number: int, heads: Tensor, first: int) -> None:
        """As `Layout.store`."""
        k, v = heads[:, :, first:].chunk(2, 2)
        self.keys_values.append((_slots_last(k), _slots_last(v)))

    def responses(self) -> "DecodingLayout":
        """Return the layout of responses to the prompts, after the last layer."""
        return DecodingLayout(self)


class DecodingLayout(Layout):
    """Responses (B) that grow by a token at a time to at most `room`: `copies` to each of P prompts, side by side.

    A prompt's keys and values are kept once for all responses to it, until rows are dropped. They lie in memory as
    (heads, D, slots): on a CPU the product of one token with them takes a third of the time of torch's attention, which
    wants the slots first.
    """

    selects = False

    def __init__(self, prompts: PrefillLayout):
        self.tables, self.copies, room = prompts.tables, prompts.copies, prompts.room
        self.prompt_lengths = prompts.lengths.repeat_interleave(self.copies)
        self.prompt_cache = prompts.keys_values
        slots = torch.arange(self.prompt_cache[0][0].shape[-1], device=self.prompt_lengths.device)
        self.padding = slots >= prompts.lengths[:, None]  # (P, S)
        self.response_cache = [
            (_room_for(keys, len(self.prompt_lengths), room), _room_for(values, len(self.prompt_lengths), room))
            for keys, values in self.prompt_cache
        ]
        self.length = 0  # tokens of each response so far

    def next_token(self) -> None:
        """Begin the next token of each response."""
        cos, sin = self.tables
        positions = (self.prompt_lengths + self.length)[:, None]
        self.rotary = cos[positions], sin[positions]
        self.length += 1

    def keep(self, rows: Tensor) -> None:
        """Continue with some of the responses, each with a copy of its prompt's keys and values."""
        prompt = rows // self.copies
        for caches, index in ((self.prompt_cache, prompt), (self.response_cache, rows)):
            for number, (keys, values) in enumerate(caches):  # one layer after the other: memory for one copy
                caches[number] = keys[index], values[index]
        self.padding, self.prompt_lengths, self.copies = self.padding[prompt], self.prompt_lengths[rows], 1

    @property
    def cached(self) -> list[Tensor]:
        """Return all keys and values."""
        return [x for pair in (*self.prompt_cache, *self.response_cache) for x in pair]

    def store(self, number: int, heads: Tensor, first: int) -> None:
        """As `Layout.store`."""
        keys, values = self.response_cache[number]
        keys[..., self.length - 1], values[..., self.length - 1] = heads[:, 0, first:].chunk(2, 1)

    def attend(self, number: int, q: Tensor, k: Tensor, v: Tensor, only_selected: bool) -> Tensor:
        """As `Layout.attend`, for the newest tokens (B, 1)."""
        (prompt_keys, prompt_values), (all_keys, all_values) = self.prompt_cache[number], self.response_cache[number]
        keys, values = all_keys[..., : self.length], all_values[..., : self.length]
        prompts, kv_heads, head_dim, width = prompt_keys.shape
        form = (prompts, self.copies, kv_heads, -1)  # the queries of several heads share a key
        queries = (q * head_dim**-0.5).reshape(*form, head_dim)
        scores = torch.cat(
            [
                torch.matmul(self._by_prompt(queries), prompt_keys)
                .masked_fill_(self.padding[:, None, None], -torch.inf)
                .view(prompts, kv_heads, self.copies, -1, width)
                .transpose(1, 2),
                torch.matmul(queries.flatten(0, 1), keys).view(*form, self.length),
            ],
            -1,
        )
        to_prompt, to_own = scores.softmax(-1).split([width, self.length], -1)
        mixed = torch.matmul(to_own.flatten(0, 1), values.transpose(2, 3)).view(*form, head_dim)
        from_prompt = torch.matmul(self._by_prompt(to_prompt), prompt_values.transpose(2, 3))
        mixed += from_prompt.view(prompts, kv_heads, self.copies, -1, head_dim).transpose(1, 2)
        return mixed.view(len(q), 1, -1, head_dim)

    def _by_prompt(self, x: Tensor) -> Tensor:
        """Return x (P, copies, kv_heads, n, …) as (P, kv_heads, copies * n, …)."""
        return x.transpose(1, 2).flatten(2, 3)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v, (B, Q, heads, D); causal without a mask (B, Q, K).

    Shapes: q (B, Q, heads, D); k, v (B, K, kv_heads, D).
    """
    grouped = q.shape[2] != k.shape[2]
    if grouped and mask is not None and COPIES_HEADS_BY_DEVICE[q.device.type]:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        grouped = False
    dtype = q.dtype
    if WIDE_ATTENTION_BY_DEVICE[q.device.type]:
        q, k, v = (at_least_float32(x) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if mask is None else mask[:, None],
        is_causal=mask is None,
        enable_gqa=grouped,
    )
    return mixed.transpose(1, 2).to(dtype)


def _slots_last(x: Tensor) -> Tensor:
    """Return x (B, S, heads, D) as (B, heads, D, S)."""
    return x.permute(0, 2, 3, 1).contiguous()


def _room_for(x: Tensor, rows: int, room: int) -> Tensor:
    """Return memory for `room` slots of each of `rows` rows, of the heads of x (P, heads, D, S)."""
    return x.new_empty(rows, *x.shape[1:3], room)
